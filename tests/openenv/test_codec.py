"""Tests of the codec for OpenEnv environments."""

import pytest

from lrl.codecs.codec import InvalidActionError
from lrl.openenv.codec import OpenEnvAction, OpenEnvCodec

METADATA = {"type": "object", "description": "Additional metadata for the action"}


def codec(properties, required=None, description="A game", observation_field=None, definitions=None, **action):
    """Return a codec of a schema in the format of pydantic."""
    required = list(properties) if required is None else required
    schema = {"properties": {"metadata": METADATA, **properties}, "required": required, "$defs": definitions or {}}
    return OpenEnvCodec(description, schema, OpenEnvAction(**action), observation_field)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " as it is", " as it is"),
        ({"type": "integer"}, "-12", -12),
        ({"type": "integer", "minimum": 0, "maximum": 3}, "3", 3),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 3}, "2", 2),
        ({"type": "number", "minimum": -1, "maximum": 1}, "0.5", 0.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"enum": ["up", "down"]}, "down", "down"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"$ref": "#/$defs/Move"}, "1", 1),
    ],
)
def test_a_text_is_the_value_of_the_only_field(schema, text, value):
    one = codec({"move": schema}, definitions={"Move": {"enum": [0, 1]}})
    assert one.text_to_action(text) == {"move": value}
    assert one.text_to_action(one.action_to_text({"move": value})) == {"move": value}


@pytest.mark.parametrize(
    ("schema", "text", "reason"),
    [
        ({"type": "integer"}, "1.5", "the action must be an integer"),
        ({"type": "integer", "minimum": 0}, "-1", "the action must be between 0 and inf"),
        ({"type": "number"}, "nan", "the action must be between -inf and inf"),
        ({"type": "number"}, "fast", "the action must be a number"),
        ({"type": "integer", "minimum": 0, "maximum": 2}, "3", "the action must be one of 0, 1, 2"),
        ({"type": "array"}, "[1,", "the action must be valid JSON"),
        ({"enum": ["up", "down"]}, "Up", "the action must be one of up, down"),
    ],
)
def test_a_text_that_does_not_fit_is_invalid(schema, text, reason):
    with pytest.raises(InvalidActionError, match=f"^{reason}$"):
        codec({"move": schema}).text_to_action(text)


def test_a_text_is_the_value_of_the_required_field_without_optional_ones():
    one = codec({"move": {"type": "string"}, "speed": {"type": "number", "default": 1}}, ["move"])
    assert one.text_to_action("go") == {"move": "go"}


def test_several_required_fields_are_a_json_object():
    one = codec({"tool": {"type": "string"}, "arguments": {"type": "object"}})
    action = {"tool": "say", "arguments": {"text": "é"}}
    assert one.text_to_action('{"tool": "say", "arguments": {"text": "é"}}') == action
    assert one.action_to_text(action) == '{"tool": "say", "arguments": {"text": "é"}}'
    assert one.description == "A game. Actions: a JSON object with the fields tool (text), arguments (a JSON value)."
    for text, reason in (
        ("[]", "the action must be a JSON object"),
        ('{"tool": "say"}', "the action lacks arguments; its fields are tool, arguments"),
        ('{"tool": "", "arguments": {}, "x": 1}', "the action has no field x; its fields are tool, arguments"),
    ):
        with pytest.raises(InvalidActionError, match=f"^{reason}$"):
            one.text_to_action(text)


def test_settings_complete_the_schema():
    properties = {"action_id": {"type": "integer"}, "game": {"type": "string"}}
    one = codec(properties, field="action_id", constants={"game": "catch"}, names={"LEFT": 0, "RIGHT": 2})
    assert one.action_texts == ("LEFT", "RIGHT")
    assert one.text_to_action("RIGHT") == {"game": "catch", "action_id": 2}
    assert one.action_to_text({"game": "catch", "action_id": 0}) == "LEFT"
    assert codec(properties, constants={"game": "catch"}).text_to_action("5") == {"game": "catch", "action_id": 5}


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"field": "jump"}, "env.action.field is 'jump'"), ({"constants": {"x": 1}}, "constants is 'x'")],
)
def test_a_field_that_does_not_exist_raises(settings, key):
    with pytest.raises(ValueError, match=f"{key}; it must be one of move"):
        codec({"move": {"type": "string"}}, **settings)


def test_actions_are_described_unless_the_environment_describes_them():
    moves = {"move": {"enum": ["up", "down"]}}
    assert codec(moves).description == "A game. Actions: up, down."
    assert codec(moves, description="Go up or down.").description == "Go up or down."
    assert codec(moves, description="").description == "Actions: up, down."
    assert codec({"move": {"type": "string", "description": "a move"}}).description == "A game. Actions: a move."


def test_an_observation_is_its_only_field_or_a_line_for_each_field():
    one = codec({"move": {"type": "string"}})
    assert one.observation_to_text({"text": "a wall", "reward": 1.0, "done": False, "metadata": {}}) == "a wall"
    assert one.observation_to_text({"text": None, "board": [1, 2], "hint": "é"}) == "board: [1, 2]\nhint: é"
    chosen = codec({"move": {"type": "string"}}, observation_field="board")
    assert chosen.observation_to_text({"board": [1, 2], "hint": "é"}) == "[1, 2]"
    with pytest.raises(ValueError, match=r"env\.observation_field is 'board'; it must be one of hint\."):
        chosen.observation_to_text({"hint": ""})


def test_random_and_default_actions_of_a_schema():
    bounded = codec({"force": {"type": "number", "minimum": -2, "maximum": 2}})
    assert [bounded.random_action_text(u) for u in (0.0, 0.5, 0.75)] == ["-2.0", "0.0", "1.0"]
    wide = codec({"bet": {"type": "integer", "minimum": 1, "maximum": 1000}})
    assert [wide.random_action_text(u) for u in (0.0, 0.9999)] == ["1", "1000"]
    named = codec({"move": {"enum": ["up", "down"]}})
    assert (named.random_action_text(0.6), named.default_action_text) == ("down", "up")
    free = codec({"text": {"type": "string", "examples": ["hello"]}})
    assert free.default_action_text == "hello" and free.action_texts is None
    with pytest.raises(ValueError, match="policy is 'random', but the actions of this environment cannot be sampled"):
        free.random_action_text(0.5)
