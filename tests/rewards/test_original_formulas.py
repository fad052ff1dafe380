"""Rewards that follow published experiments, against their formulas; ``docs/extending/reward.md`` lists differences.

The formulas are written here from their description. The prompt of the experiment on control ends with ``<action>``, so
its responses begin after that tag; the experiment on FrozenLake searches ``<answer>`` anywhere.
"""

import itertools
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from lrl.codecs.codec import InvalidActionError, clip_to_space
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import SpaceCodec
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.prompts import get_response_format
from lrl.rewards.behaviour_cloning import BehaviourCloningReward
from lrl.rewards.expert_q import NormalizedAdvantageReward
from lrl.rewards.format import ClosingTagFormatReward, FormatReward
from lrl.rewards.reward import Row

MOTORS = gym.spaces.Box(-1, 1, (2,), np.float32)
EXPERT = np.array([0.5, -0.5], np.float32)
TAG = "</action>"


def original_on_numbers(response: str, number: str, decode) -> tuple[float, float]:
    """Return the original rewards for format and for cloning, which depend only on the list of numbers at the start."""
    found = re.match(rf"{number}(?:,\s*{number})*", response)
    if found is None:
        return -10.0, -10.0
    values = [text.strip() for text in found.group().split(",")]
    closed = float(re.search(rf"{TAG}$", response) is not None)
    if len(values) != 2:
        return -10 + closed, -10.0
    action = decode(values)
    extra = len("".join(response.split(TAG)[1:]))
    return closed - extra / 10, -10.0 if action is None else -float(np.square(action - EXPERT).mean())


def decimals(values):
    return np.array([float(value) for value in values])


def integers(values):
    numbers = np.array([int(value) for value in values])
    return None if numbers.max() > 999 else -1 + 2 * numbers / 999


def original_on_digits(response: str) -> tuple[float, float]:
    """Return the original rewards for two discrete actions; the expert's action is 1."""
    found = re.match(rf"([01]){TAG}", response)
    if found is None:
        return -10.0, -10.0
    closed = float(re.search(rf"{TAG}$", response) is not None)
    return closed - (len(response) - len(found.group())) / 10, -float(found[1] != "1")


def rewards_here(codec, row: Row, response: str) -> tuple[float, float]:
    """Return the rewards of lrl for format and for cloning, for the action that its environments parse."""
    form = ClosingTagFormatReward()
    form.connect(codec, "direct", row)
    try:
        text = get_response_format("direct").extract(response)
        action, _ = clip_to_space(codec.action_space, codec.text_to_action(text))
    except InvalidActionError:
        action = None
    cloning = BehaviourCloningReward()([row], [response], [action])
    return form([row], [response], [action])[0], cloning[0]


def on_control(kind: str, response: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return both rewards by the original formulas and by lrl, for a response without its opening tag."""
    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    if kind == "digits":
        here = rewards_here(
            SpaceCodec(box, gym.spaces.Discrete(2)), Row(observation="", action=1), response.removesuffix(TAG)
        )
        return original_on_digits(response), here
    codec = SpaceCodec(box, MOTORS, NumberFormat(kind=kind))
    number, decode = (r"[-+]?\d*\.\d+", decimals) if kind == "decimals" else (r"\d+", integers)
    return original_on_numbers(response, number, decode), rewards_here(
        codec, Row(observation="", action=EXPERT), f"<action>{response}"
    )


NUMBERS = {"decimals": ("0.5", "-0.25", "1.00", "0.0", "-1.0"), "integers": ("0", "7", "500", "999")}


@pytest.mark.parametrize("kind", NUMBERS)
def test_rewards_on_control_are_those_of_the_original_for_every_list_that_ends_with_the_tag(kind):
    for count, comma in itertools.product((1, 2, 3), (",", ", ")):
        for values in itertools.product(NUMBERS[kind], repeat=count):
            original, here = on_control(kind, comma.join(values) + TAG)
            np.testing.assert_allclose(here, original, atol=1e-6, err_msg=str(values))


@pytest.mark.parametrize("digit", ["0", "1", "2"])
def test_rewards_of_a_digit_are_those_of_the_original(digit):
    original, here = on_control("digits", digit + TAG)
    assert here == original


DIFFERENCES = [  # kind, response, format and cloning in the original, format and cloning here
    ("decimals", "0.5,-0.5</action> so", (-0.3, 0), (-0.3, -10)),
    ("decimals", "0.5,-0.5</action>ab</action>", (0.8, 0), (-0.1, -10)),
    ("decimals", "0.5,-0.5</action></action>", (1, 0), (0.1, -10)),
    ("decimals", "0.5,-0.5</action>\n", (0.9, 0), (-0.1, 0)),
    ("decimals", "0.5,-0.5", (0, 0), (-10, -10)),
    ("decimals", "0.5,-0.5 and so on", (0, 0), (-10, -10)),
    ("decimals", "0.5,-0.5 N</action>", (1, 0), (-9, -10)),
    ("decimals", "</action>", (-10, -10), (-9, -10)),
    ("decimals", "left</action>!!", (-10, -10), (-10.2, -10)),
    ("decimals", "", (-10, -10), (-10, -10)),
    ("decimals", "0.5</action> so", (-10, -10), (-10.3, -10)),
    ("decimals", "+0.5,-0.5</action>", (1, 0), (-9, -10)),
    ("decimals", ".5,-.5</action>", (1, 0), (-9, -10)),
    ("decimals", "1,-1</action>", (-10, -10), (1, -0.25)),
    ("decimals", "0.5,1</action>", (-9, -10), (1, -1.125)),
    ("decimals", "0.5 ,-0.5</action>", (-9, -10), (1, 0)),
    ("decimals", "0.5,\n-0.5</action>", (1, 0), (-9, -10)),
    ("decimals", "1.5,-0.5</action>", (1, -0.5), (1, -0.125)),
    ("integers", "007,500</action>", (1, None), (-9, -10)),
    ("integers", "1000,500</action>", (1, -10), (-9, -10)),
    ("digits", "1</action> so", (-0.3, 0), (-1.2, -10)),
    ("digits", "1", (-10, -10), (1, 0)),
    ("digits", "</action>", (-10, -10), (-10, -10)),
]
"""Responses with different rewards, and similar responses with equal rewards, with both pairs of values."""


@pytest.mark.parametrize(("kind", "response", "original", "here"), DIFFERENCES)
def test_rewards_on_control_differ_from_the_original_as_documented(kind, response, original, here):
    computed = on_control(kind, response)
    for values, expected in zip(computed, (original, here), strict=True):
        for value, one in zip(values, expected, strict=True):
            assert one is None or value == pytest.approx(one, abs=1e-6)


def test_the_page_shows_the_rewards_of_both():
    page = (Path(__file__).parents[2] / "docs/extending/reward.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|`]*\| `([^`]+)`" + r" \| ([-\d.]+)" * 4 + r" \|$", page, re.M)
    assert len(rows) >= 10
    for response, *shown in rows:
        original, here = on_control("decimals", response.replace("\\n", "\n"))
        np.testing.assert_allclose([*original, *here], [float(value) for value in shown], atol=1e-6, err_msg=response)


Q = (0.1, 0.5, 0.3, 0.2)
LAKE = Row(observation="", action=1, q_values=Q)
LEVEL = Row(observation="", action=1, q_values=(0.4,) * 4)
NAMES = ("LEFT", "DOWN", "RIGHT", "UP")


def original_on_frozen_lake(row: Row, response: str) -> tuple[float, float]:
    """Return the original rewards for format and for the action, each multiplied by one half in the total."""
    form = float(all(re.search(rf"<{tag}>.*?</{tag}>", response, re.DOTALL) for tag in ("think", "answer")))
    found = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    name = found[1].strip().upper() if found else ""
    if name not in NAMES:
        return form, 0.0
    action, q = NAMES.index(name), row.q_values
    assert q is not None
    if max(q) == min(q):
        return form, 1.0 if action == row.action else 0.5
    return form, min(1.0, (q[action] - min(q)) / (max(q) - min(q)) + 0.2 * (action == row.action))


def frozen_lake_here(row: Row, response: str) -> tuple[float, float]:
    """Return the rewards of lrl."""
    try:
        action = FrozenLakeCodec().text_to_action(get_response_format("think_answer").extract(response))
    except InvalidActionError:
        action = None
    return tuple(reward([row], [response], [action])[0] for reward in (FormatReward(), NormalizedAdvantageReward()))


@pytest.mark.parametrize("row", [LAKE, LEVEL], ids=["one best action", "equal values"])
@pytest.mark.parametrize("name", [*NAMES, "left", " Down\n", "JUMP", ""])
def test_rewards_on_frozen_lake_are_those_of_the_original(row, name):
    for response in (
        f"<think>so</think><answer>{name}</answer>",
        f"<think>\n</think>\n<answer>{name}</answer>\n",
        name,
    ):
        np.testing.assert_allclose(frozen_lake_here(row, response), original_on_frozen_lake(row, response), atol=1e-9)


@pytest.mark.parametrize(
    ("response", "original", "here"),
    [
        ("<answer>DOWN</answer>", (0, 1), (0, 0)),
        ("<answer>DOWN</answer><think>so</think>", (1, 1), (1, 0)),
        ("Well: <think>so</think><answer>DOWN</answer>", (1, 1), (1, 0)),
        ("<think>so</think><answer>DOWN</answer> yes", (1, 1), (1, 0)),
        ("<think>so</think> thus <answer>DOWN</answer>", (1, 1), (1, 0)),
    ],
)
def test_rewards_on_frozen_lake_differ_for_responses_that_the_environment_rejects(response, original, here):
    assert original_on_frozen_lake(LAKE, response) == original
    assert frozen_lake_here(LAKE, response) == here
