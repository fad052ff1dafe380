"""Tests of the parser of proposals in replies of language models."""

import contextlib
import signal

import pytest

from lrl.search.prompted import ProposalError, parse_parameters
from lrl.search.searchers import ParameterSpace

THREE = ParameterSpace(size=3)
TABLE = ParameterSpace(size=3, actions=(0, 1, 2))
VALUES = [1.2, -0.5, 3.0]


@pytest.mark.parametrize(
    "text",
    [
        "params[0]: 1.2, params[1]: -0.5, params[2]: 3",
        "params[0]: 1.2; params[1]: -.5; params[2]: 3.",
        "params[0] = 1.2\nparams[1] = -0.5\nparams[2] = 3.0",
        "params[2]: 3, params[0]: +1.2, params[1]: -5e-1",
        "params[0]: 1.2, params[1]: −0.5, params[2]: 3",
        "param[0]:1.2,param[1]:-0.5,param[2]:3",
        "params[0]: <1.2>, params[1]: <-0.5>, params[2]: <3.0>",
        "`params[0]`: `< 1.2 >`, **params[1]**: **<-.5>**, params[2]=<3>",
        "**params[0]**: 1.2\n**params[1]**: -0.5\n**params[2]**: 3",
        "params[0]: **1.2**.\nparams[1]: *-0.5*.\nparams[2]: **3**...",
        "`params[0]`: `1.2`, `params[1]`: `-0.5`, `params[2]`: `3`",
        '{"params[0]": 1.2, "params[1]": -0.5, "params[2]": 3}',
        "Sure! I would try\n\n```\nparams[0]: 1.2, params[1]: -0.5, params[2]: 3.0\n```\nas it is close to the best.",
        "<think>params[0]: 9, maybe params[0]: 4?</think>params[0]: 1.2, params[1]: -0.5, params[2]: 3",
        "so params[0]: 9 was bad\n</think>\nparams[0]: 1.2, params[1]: -0.5, params[2]: 3",
        "params[0]: 1.2, params[1]: -0.5, params[2]: 3\nI moved params[1]: -0.7 a bit, params[2]: 2 was low.",
        "params[0]: 1.2 - further, params[1]: -0.5 (from -0.7 to -0.5) / params[2]: 3.0 to be safe",
        "params[0]: 1.2**, *params[1]*: -0.5*, params[2]: 3",
        "Before, params[0]: 1.0 was too low.\nparams[0]: 1.2\nparams[1]: -0.5\nparams[2]: 3",
        "params[0]: 1.2, params[1]: -0.5, params[2]: 3\nAgain:\nparams[0]: 1.2, params[1]: -0.5, params[2]: 3",
        "[1.2, -0.5, 3]",
        "Line 1: 1.2, -0.5, 3\nLine 2: the second one was too high.",
        "(1.2, -0.5, 3.0)",
        "params = [1.2, -0.5, 3.0] (step 0.5)",
        "params: 1.2, -0.5, 3",
        "1.2, -.5, 3.0",
        "1.2 -0.5 3",
        "1.2; -0.5; 3.0;",
        "```json\n[1.2, -0.5, 3.0]\n```\n1. closer to the best",
        "[\n  1.2,\n  -0.5,\n  3.0\n]",
    ],
)
def test_proposals_are_parsed_in_all_common_formats(text):
    assert parse_parameters(text, THREE) == VALUES


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "No parameters were found in the reply."),
        ("I cannot help with that.", "No parameters were found in the reply."),
        ("<think>params[0]: 1, params[1]: 2, params[2]: 3", "No parameters were found in the reply."),
        ("params[0]: , params[1]: , params[2]: ", "No parameters were found in the reply."),
        ("params[0]: 1, params[1]: 2", "2 values were given; there must be 3, and params[2] is missing."),
        ("params[0]: 1, params[2]: 2", "2 values were given; there must be 3, and params[1] is missing."),
        (
            "params[0]: 1, params[1]: 2, params[2]: nan",
            "2 values were given; there must be 3, and params[2] is missing.",
        ),
        ("params[1]: 1, params[2]: 2, params[3]: 2", "params[3] does not exist; the indices are 0 to 2."),
        ("params[0]: 1, params[1]: 2, params[2]: 3, params[3]: 4", "4 values were given; there must be 3."),
        ("params[0]: 1, params[0]: 2, params[1]: 3, params[2]: 4", "params[0] was given more than once"),
        (
            "params[0]: 1, params[1]: 2, params[2]: 3\nor\nparams[0]: 2, params[1]: 2, params[2]: 3",
            "params[0] was given more than once; give every index once.",
        ),
        ("params[0]: 1, params[1]: 2, params[2]: 7.5", "params[2] is 7.5; it must be between -6 and 6."),
        ("params[0]: 1, params[1]: -1e999, params[2]: 0", "params[1] is -inf; it must be between -6 and 6."),
        ("[1, 2]", "2 values were given; there must be 3."),
        ("[1, 2, 3] or [1, 2, 4]", "Several different lists of parameters were given; give one."),
        ("params[0]: 1.0 -> 1.5, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("params[0]: 1. -> 1.5, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("params[0]: <1> to <2>, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("params[0]: <1, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("params[0]: 1.0 → 1.5, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("params[0]: 1.0 to 1.5, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("params[0]: 1, params[1]: 2 + 0.5 = 2.5, params[2]: 3", "2 values were given; there must be 3, and params[1]"),
        ("params[0]: 1, params[1]: 1/2, params[2]: 3", "2 values were given; there must be 3, and params[1]"),
        ("params[0]: 1, params[1]: 1-2, params[2]: 3", "2 values were given; there must be 3, and params[1]"),
        ("params[0]: 1, params[1]: 2, params[2]: 3 ± 1", "2 values were given; there must be 3, and params[2]"),
        ("params[0]: 1, params[1]: 2, params[2]: 3 +/- 1", "2 values were given; there must be 3, and params[2]"),
        ("params[0]: **1** * .5, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("params[0]: 1,5, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0]"),
        ("f(1.0, 2.0, 3.0) was the best so far.", "No parameters were found in the reply."),
        ("params[0]: 1.2.3, params[1]: 2, params[2]: 3", "2 values were given; there must be 3, and params[0] is"),
    ],
)
def test_an_unusable_reply_raises_one_sentence(text, sentence):
    with pytest.raises(ProposalError) as caught:
        parse_parameters(text, THREE)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_a_table_holds_legal_actions_only():
    assert parse_parameters("params[0]: 2, params[1]: 0, params[2]: 1", TABLE) == [2, 0, 1]
    assert parse_parameters("2 0 1", TABLE) == [2, 0, 1]
    for text, wrong in (("2 0 3", "params[2] is 3"), ("2 0.5 1", "params[1] is 0.5"), ("-1 0 1", "params[0] is -1")):
        with pytest.raises(ProposalError, match=rf"{wrong.replace('[', chr(92) + '[')}; it must be one of 0, 1, 2"):
            parse_parameters(text, TABLE)


def test_the_last_number_of_a_truncated_reply_is_ignored():
    text = "params[0]: 1.2, params[1]: -0.5, params[2]: 3"
    assert parse_parameters(text, THREE) == VALUES
    with pytest.raises(ProposalError, match="cut at its maximum length: 2 values were given; there must be 3"):
        parse_parameters(text, THREE, cut=True)
    assert parse_parameters(text + "\nBecause it is n", THREE, cut=True) == VALUES


def test_a_single_parameter_is_parsed_like_a_list():
    one = ParameterSpace(size=1)
    for text in ("params[0]: 2", "2", "[2]", "params = [2.0]"):
        assert parse_parameters(text, one) == [2]


LONG = 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "_" * LONG,
        "line 1" + "`_" * LONG,
        "params" * LONG,
        ("params" + "_" * 50) * (LONG // 50),
        "params[0]" + " *" * LONG,
        "1" * LONG + "x",
        "params[0]: " + "1" * LONG + "x",
        "params[0]: 1" + "." * LONG + "x",
        "params[0]: 1" + " *" * LONG,
        "1   2;   3,   " * (LONG // 14) + "x",
        "[" + "1   2;   3,   " * (LONG // 14) + "x",
        "[1" * LONG,
        "params [1]" * (LONG // 10),
        "<think>" * LONG,
        "</think>" * LONG,
        "params[0]: 1\n" * LONG,
        "".join(f"params[{index}]: 1\n" for index in [*range(LONG), LONG - 1]),
        "params[" + "1" * LONG + "]: 1",
    ],
    ids=lambda text: f"{text[:12]}..{text[-8:]}",
)
@pytest.mark.parametrize("cut", [False, True])
def test_the_time_to_parse_a_reply_is_linear_in_its_length(text, cut):
    def stop(*_):
        raise TimeoutError("reading the reply takes longer than 1 s of the processor")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1)
    try:
        with contextlib.suppress(ProposalError):
            parse_parameters(text, THREE, cut)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
