"""Tests of the FrozenLake codec."""

import random

import pytest

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.prompts import RESPONSE_FORMATS


def test_the_agent_is_visible_in_the_map() -> None:
    assert render_map(5, ("SFF", "FFG")) == "row 1 column 2\nS F F\nF F A"


def test_action_texts_are_parsed_in_any_case() -> None:
    codec = FrozenLakeCodec()
    for action, text in enumerate(codec.action_texts):
        assert codec.text_to_action(codec.action_to_text(action)) == action
        assert codec.text_to_action(f"  {text.lower()}\n") == action


@pytest.mark.parametrize("text", ["", "LEFT RIGHT", "lef", "0", "ＬＥＦＴ"])
def test_any_other_text_raises(text: str) -> None:
    with pytest.raises(InvalidActionError, match="LEFT, DOWN, RIGHT, UP"):
        FrozenLakeCodec().text_to_action(text)


def test_random_text_raises_only_invalid_action_errors() -> None:
    rng = random.Random(0)
    codec = FrozenLakeCodec()
    for _ in range(500):
        text = "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(20)))
        for form in RESPONSE_FORMATS.values():
            for response in (text, form.render(text), form.render("LEFT", text)):
                try:
                    assert codec.text_to_action(form.extract(response)) in range(4)
                except InvalidActionError as error:
                    assert str(error)


def test_a_state_without_its_map_raises() -> None:
    with pytest.raises(ValueError, match="map"):
        FrozenLakeCodec().observation_to_text(3)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("first LEFT, then up", "UP"),
        ("LEFT LEFT", "LEFT"),
        ("no idea", None),
        ("", None),
        ("go Down.", "DOWN"),
        ("LEFT, I suppose, not upper", "LEFT"),
    ],
)
def test_the_last_mentioned_action_is_found(text, action):
    assert FrozenLakeCodec().last_mentioned_action(text) == action
