"""Tests of the response formats."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.codecs.codec import InvalidActionError
from lrl.prompts.response_format import RESPONSE_FORMATS, get_response_format

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
