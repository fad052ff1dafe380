"""Tests of prompt templates and response formats."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.codecs.codec import InvalidActionError
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.prompts import HIDDEN_RESPONSE, RESPONSE_FORMATS, PromptTemplate, get_response_format
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


def test_the_instruction_occurs_once_in_a_prompt() -> None:
    """The original experiment on control writes the instructions twice into every prompt."""
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


# Response formats.

NAMES = sorted(RESPONSE_FORMATS)
WORDS = st.text("abc ,.1", min_size=1).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", NAMES)
@given(action=WORDS, reasoning=WORDS)
def test_extract_is_the_inverse_of_render(name: str, action: str, reasoning: str) -> None:
    style = get_response_format(name)
    assert style.extract(style.render(action, reasoning)) == action
    assert style.extract(style.render(action)) == action


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(response=st.text())
def test_any_text_is_extracted_or_raises_an_invalid_action_error(name: str, response: str) -> None:
    with contextlib.suppress(InvalidActionError):
        assert isinstance(get_response_format(name).extract(response), str)


@pytest.mark.parametrize(
    "response",
    [
        "", "UP", "<answer>UP</answer>", "<think>a</think>", "<think>a</think><answer>UP",
        "<answer>UP</answer><think></think>",
        "so <think>a</think><answer>UP</answer>", "<think>a</think><answer>UP</answer> DOWN",
        "<think>a</think>, <answer>UP</answer>", "<think>a</think><answer>UP<answer></answer>",
    ],
)  # fmt: skip
def test_think_answer_raises_for_any_other_form(response: str) -> None:
    with pytest.raises(InvalidActionError, match="not of the form"):
        get_response_format("think_answer").extract(response)


def test_think_answer_ignores_whitespace_around_the_action() -> None:
    response = " <think>first\nsecond</think>\n<answer> UP\n</answer>\n"
    assert get_response_format("think_answer").extract(response) == "UP"


def test_final_answer_extracts_the_text_after_the_last_marker() -> None:
    style = get_response_format("final_answer")
    assert style.extract("final answer: no. final answer: go forward") == "go forward"
    with pytest.raises(InvalidActionError, match="does not contain"):
        style.extract("the answer is go forward")


def test_direct_extracts_the_whole_response() -> None:
    assert get_response_format("direct").extract(" UP\n") == "UP"
    assert get_response_format("direct").render("UP", "ignored") == "UP"


def test_think_answer_allows_only_action_tags_inside_the_answer() -> None:
    action = "<action>1,2</action>"
    for form in RESPONSE_FORMATS.values():
        assert form.extract(form.render(action, "so")) == action
    for content in (f"{action}{action}", f"a{action}", "<action>", "<b>1</b>", f"{action}</answer>"):
        with pytest.raises(InvalidActionError):
            RESPONSE_FORMATS["think_answer"].extract(RESPONSE_FORMATS["think_answer"].render(content))


@pytest.mark.parametrize(
    ("name", "response", "reasoning"),
    [
        ("direct", "LEFT", None),
        ("think_answer", "<think>so LEFT</think><answer>UP</answer>", "so LEFT"),
        ("think_answer", "LEFT", ""),
        ("final_answer", "see a ball, so LEFT final answer: UP", "see a ball, so LEFT "),
        ("final_answer", "LEFT", ""),
    ],
)
def test_reasoning_is_the_text_before_the_action(name, response, reasoning):
    assert get_response_format(name).reasoning(response) == reasoning
