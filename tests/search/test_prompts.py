"""Tests of the content of prompts."""

import numpy as np
import pytest
from gymnasium import spaces

from lrl.codecs.spaces import EnvironmentMetadata, SpaceCodec
from lrl.codecs.toy_text import CliffWalkingCodec
from lrl.envs.factory import GymnasiumEnvs
from lrl.search.described import environment_in_words, policy_in_words
from lrl.search.policies import LinearPolicy, TabularPolicy
from lrl.search.prompts import SearchPrompt
from lrl.search.searchers import ParameterSpace

REAL, TABLE = ParameterSpace(size=3), ParameterSpace(size=2, actions=(0, 1, 2))
TASK = ("A pole stands on a cart.", "it is linear.")


def text_of(prompt=None, space=REAL, **settings):
    """Return the message of a prompt."""
    (message,) = (prompt or SearchPrompt()).render(space=space, task=TASK, **{"history": "H"} | settings)
    assert message["role"] == "user"
    return message["content"]


def test_prompts_contain_only_numbers_unless_the_environment_is_described():
    plain, plus = text_of(), text_of(SearchPrompt(describe_environment=True))
    assert "unknown function" in plain and "policy" not in plain and "pole" not in plain
    assert "A pole stands on a cart." in plus and "it is linear." in plus and "unknown function" not in plus
    shared = "params has 3 entries. Each is a number from -6 to 6, with one decimal."
    assert shared in plain and shared in plus
    assert plain.split("\n\n", 1)[1] in plus  # everything else is the same


def test_prompts_forbid_repeats():
    assert "tried before must not be proposed again" in text_of()


def test_prompts_contain_the_actual_number_of_iterations_counted_from_one():
    assert "This is proposal 7 of 30." in text_of(iteration=7, total=30)
    assert "400" not in text_of(iteration=7, total=30)


def test_prompts_contain_the_optimum_only_if_it_is_set():
    assert "maximum of f is about 500" in text_of(SearchPrompt(optimum=500))
    assert "is about" not in text_of().replace("by about", "")


def test_the_step_size_applies_to_real_parameters_and_can_be_left_out():
    assert "by about 0.1 from good ones" in text_of(SearchPrompt(step_size=0.1))
    assert "by about" not in text_of(SearchPrompt(step_size=None)) and "by about" not in text_of(space=TABLE)
    assert "Each is one of 0, 1, 2." in text_of(space=TABLE)


def test_the_reply_is_shown_as_a_pattern():
    assert "params[0]: <value>, params[1]: <value>, params[2]: <value>\n" in text_of()
    long = text_of(space=ParameterSpace(size=108))
    assert "params[0]: <value>, params[1]: <value>, ..., params[107]: <value>\n" in long
    assert "3 numbers in one line" in text_of(style="compact") and "params[0]" not in text_of(style="compact")


def test_a_rejection_is_the_last_sentence_of_the_prompt():
    told = text_of(complaint="2 values were given; there must be 3.")
    assert told.endswith("was rejected: 2 values were given; there must be 3. Correct that.")
    assert "rejected" not in text_of()


def test_prompts_say_if_the_history_is_empty():
    assert "Nothing was tried so far." in text_of(history="")
    assert "Tried so far, oldest first:\nH" in text_of()
    assert "Tried so far, worst first:\nH" in text_of(order="value")


def codec_of(observed, acted, names=None):
    return SpaceCodec(observed, acted, metadata=EnvironmentMetadata(description="A task.", action_names=names))


def evaluated(words, symbol, seen, values):
    """Return the outputs of the formulas in a description."""
    formulas = [part.split(" = ")[1] for part in words.split(".", 1)[0].split(": ", 1)[1].split("; ")]
    assert len(formulas) == words.split(".", 1)[0].count(f"{symbol}[")
    return [eval(formula, {"s": seen, "params": values}) for formula in formulas]  # of our own text


@pytest.mark.parametrize("bias", [True, False])
def test_the_formulas_of_a_linear_policy_are_what_it_computes(bias):
    observed, acted = spaces.Box(-1, 1, (3,)), spaces.Box(-9, 9, (2,))
    policy = LinearPolicy(bias=bias)
    policy.connect_spaces(observed, acted)
    words, rng = policy_in_words(policy, codec_of(observed, acted)), np.random.default_rng(0)
    seen, values = rng.normal(size=3), rng.normal(size=policy.parameter_space().size)
    computed = evaluated(words.replace("s[0] to s[2]: ", "", 1).replace("whose 3", ":", 1), "a", seen, values)
    assert policy.decider(values)(seen[None])[0] == pytest.approx(computed, rel=1e-6)
    assert "a[1] from -9 to 9" in words


def test_actions_and_states_are_named():
    observed, acted = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
    policy = LinearPolicy()
    policy.connect_spaces(observed, acted)
    words = policy_in_words(policy, codec_of(observed, acted, ("left", "right")))
    assert "score[0] is that of left, score[1] is that of right" in words
    table = TabularPolicy()
    table.connect_spaces(spaces.Discrete(48), spaces.Discrete(4))
    words = policy_in_words(table, CliffWalkingCodec())
    assert "params[i] is the action in state i." in words and "2 is DOWN" in words
    assert "36 is row 3 column 0" in words and "47 is row 3 column 11" in words


def test_the_environment_is_described_with_native_numbers_and_without_the_action_format():
    car = environment_in_words(GymnasiumEnvs("MountainCarContinuous-v0").codec)
    assert car == (
        "A weak car stands in a valley. Swing it up to the flag on the right hill with little force. The numbers of an "
        "observation are, in order: position (m), velocity (m per step). The numbers of an action are, in order: push "
        "(force to the right)."
    )
    swimmer = environment_in_words(GymnasiumEnvs("Swimmer-v5").codec)
    assert "Swim to the right as fast as possible" in swimmer and "in order: front tip angle, first joint" in swimmer
    assert "<action>" in GymnasiumEnvs("Swimmer-v5").codec.description and "<action>" not in swimmer
    assert environment_in_words(CliffWalkingCodec()) == CliffWalkingCodec().description
    unknown = SpaceCodec(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (1,)))
    assert environment_in_words(unknown) == ""


def test_many_weights_are_described_by_one_formula():
    observed, acted = spaces.Box(-1, 1, (17,)), spaces.Box(-1, 1, (6,))
    policy = LinearPolicy()
    policy.connect_spaces(observed, acted)
    words = policy_in_words(policy, codec_of(observed, acted))
    assert "a[j] = sum over i of s[i] * params[i * 6 + j] + params[102 + j], j from 0 to 5" in words
