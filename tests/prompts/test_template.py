"""Tests of the prompt template."""

from __future__ import annotations

import pytest

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.prompts.template import HIDDEN_RESPONSE, PromptTemplate
from lrl.types import PastTurn

CODEC = FrozenLakeCodec()
TURNS = tuple(PastTurn(f"seen {turn}", f"said {turn}") for turn in range(4))


def contents(template: PromptTemplate, history: tuple[PastTurn, ...] = ()) -> list[str]:
    return [message["content"] for message in template.messages(CODEC, "now", history)]


def test_the_default_system_message_is_the_description_and_the_instruction() -> None:
    system, observation = PromptTemplate(response_format="direct").messages(CODEC, "now")
    assert system == {"role": "system", "content": f"{CODEC.description} Answer with the action only."}
    assert observation == {"role": "user", "content": "now"}


def test_a_custom_system_message_replaces_the_default_and_an_empty_one_is_omitted() -> None:
    assert contents(PromptTemplate(system="Play.")) == ["Play.", "now"]
    assert contents(PromptTemplate(system="")) == ["now"]


@pytest.mark.parametrize("size", range(6))
def test_the_history_is_truncated_to_the_last_turns(size: int) -> None:
    template = PromptTemplate(history=size)
    assert template.truncate_history(TURNS) == TURNS[len(TURNS) - min(size, 4) :]
    assert template.truncate_history(()) == ()


def test_examples_come_before_the_history_and_roles_alternate() -> None:
    template = PromptTemplate(system="s", history=1, examples=(PastTurn("example", "shown"),))
    messages = template.messages(CODEC, "now", TURNS)
    assert [m["content"] for m in messages] == ["s", "example", "shown", "seen 3", "said 3", "now"]
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 2, "user"]


def test_the_instructions_stand_in_a_prompt_once() -> None:
    """The first work on control wrote its instructions twice into every prompt."""
    template = PromptTemplate(history=2, examples=(PastTurn("example", "shown"),))
    texts = " ".join(message["content"] for message in template.messages(CODEC, "now", TURNS))
    assert texts.count(CODEC.description) == 1


def test_a_negative_history_raises() -> None:
    with pytest.raises(ValueError, match=r"prompt\.history is -1; it must be 0"):
        PromptTemplate(history=-1)


def test_an_unknown_format_raises_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="response_format is 'json'; it must be one of direct, think_answer"):
        PromptTemplate(response_format="json")


def last_response(template: PromptTemplate, response: str) -> str:
    *_, turn = template.extend_history(CODEC, TURNS, "now", response)
    assert turn.observation == "now"
    return turn.response


def test_invalid_responses_can_be_hidden_from_the_history() -> None:
    shown, hidden = (
        PromptTemplate(response_format="direct", history=2, hide_invalid_in_context=hide) for hide in (False, True)
    )
    for response in ("JUMP", "", "LEFT DOWN"):
        assert last_response(shown, response) == response
        assert last_response(hidden, response) == "Generated invalid action"
    assert last_response(hidden, "LEFT") == "LEFT"


def test_responses_in_the_wrong_format_are_hidden_too() -> None:
    template = PromptTemplate(response_format="think_answer", history=1, hide_invalid_in_context=True)
    assert last_response(template, "LEFT") == HIDDEN_RESPONSE
    response = "<think>.</think><answer>LEFT</answer>"
    assert last_response(template, response) == response


def test_the_extended_history_is_truncated() -> None:
    assert PromptTemplate(history=2).extend_history(CODEC, TURNS, "now", "a") == (TURNS[-1], PastTurn("now", "a"))
    assert PromptTemplate().extend_history(CODEC, TURNS, "now", "a") == ()


def test_hiding_without_history_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="hide_invalid_in_context is ignored: prompt.history is 0"):
        PromptTemplate(hide_invalid_in_context=True)


def test_examples_that_have_not_been_generated_raise() -> None:
    template = PromptTemplate(num_examples=2)
    with pytest.raises(ValueError, match="num_examples is 2, but no examples have been generated"):
        template.messages(CODEC, "now")
    assert contents(template.with_examples(TURNS[:2]))[1:5] == ["seen 0", "said 0", "seen 1", "said 1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_examples": -1}, "num_examples is -1; it must be 0"),
        ({"num_examples": 3, "examples": TURNS[:1]}, "num_examples is 3, but 1 prompt.examples are given"),
    ],
)
def test_an_invalid_number_of_examples_raises(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptTemplate(**settings)
