"""Tests of the reward for closing tags, against values computed by hand."""

import gymnasium as gym
import numpy as np
import pytest

from lrl.codecs.codec import TextCodec
from lrl.codecs.numbers import NumberFormat
from lrl.codecs.spaces import EnvironmentMetadata, SpaceCodec
from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.rewards.format import ClosingTagFormatReward, FormatReward
from lrl.rewards.reward import Row

ROW = Row(observation="", action=0)
MOTORS = gym.spaces.Box(-1, 1, (3,), np.float32)
BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


def rewards_of(codec: TextCodec, *responses: str, response_format: str = "direct", **values: float) -> list[float]:
    """Return the rewards of responses in an environment."""
    reward = ClosingTagFormatReward(**values)
    reward.connect(codec, response_format, ROW)
    return reward([ROW] * len(responses), responses, [None] * len(responses)).tolist()


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<action>0.1,-0.2,0.3</action>", 1),
        ("<action>0.1, -0.2, 0.3</action>", 1),
        ("<action>5,5,5</action>", 1),  # out of bounds is clipped, not invalid
        ("<action>0.1,-0.2,0.3</action> and so on", -1),  # 10 characters
        ("<action>0.1,-0.2,0.3</action>xx</action>", -0.1),  # 11 characters, and closed
        ("<action>0.1,-0.2</action>", -9),
        ("<action>0.1,-0.2,0.3,0.4</action>", -9),
        ("<action>0.1,-0.2,fast</action>", -9),
        ("<action>0.1 -0.2 0.3</action>!", -10.1),
        ("<action>0.1,-0.2,0.3", -10),
        ("0.1,-0.2,0.3", -10),
        ("", -10),
    ],
)
def test_the_reward_of_numbers_depends_on_their_count_and_the_text_after_them(response: str, expected: float) -> None:
    """A wrong number of numbers and text after the tag reduce the reward, because both are invalid in evaluation."""
    assert rewards_of(SpaceCodec(BOX, MOTORS), response) == pytest.approx([expected])


def test_integers_must_be_bins() -> None:
    codec = SpaceCodec(BOX, MOTORS, NumberFormat(kind="integers"))
    responses = "<action>0,500,999</action>", "<action>0,500,1000</action>", "<action>0.1,0.2,0.3</action>"
    assert rewards_of(codec, *responses) == [1, -9, -9]


def test_without_a_closing_tag_the_name_of_the_action_takes_its_place() -> None:
    codec = SpaceCodec(
        BOX, gym.spaces.Discrete(3), metadata=EnvironmentMetadata(action_names=("left", "left up", "right"))
    )
    responses = "left", "left up", "left up!!", "lift", "right away, of course", "push left", ""
    expected = [1, 1, -0.2, -10, -1.6, -10, -10]
    assert rewards_of(codec, *responses) == pytest.approx(expected)
    assert rewards_of(codec, "so final answer: left", "final answer: leftmost", response_format="final_answer") == [
        1,
        pytest.approx(-0.4),
    ]
    assert rewards_of(codec, "left", response_format="final_answer") == [-10]


def test_a_name_is_legal_if_the_environment_accepts_it() -> None:
    """FrozenLake ignores the case of actions, and so does the reward."""
    responses = "left", "Left", "LEFT", "Lift", "left ahead"
    assert rewards_of(FrozenLakeCodec(), *responses) == pytest.approx([1, 1, 1, -10, -0.6])
    said = rewards_of(FrozenLakeCodec(), "so final answer: left", response_format="final_answer")
    assert said == [1]


def test_digits_of_discrete_actions_are_rewarded_as_in_the_original() -> None:
    codec = SpaceCodec(BOX, gym.spaces.Discrete(2))
    assert rewards_of(codec, "0", "1", "2", "1 or 0") == pytest.approx([1, 1, -10, -0.5])


def test_the_closing_tag_is_that_of_the_response_format() -> None:
    responses = (
        "<think>so</think><answer>LEFT</answer>",
        "<think>so</think><answer>LEFT</answer> yes",
        "<think>so</think><answer>JUMP</answer>",
        "<answer>LEFT</answer>",
        "LEFT",
    )
    rewards = rewards_of(FrozenLakeCodec(), *responses, response_format="think_answer")
    assert rewards == pytest.approx([1, -0.4, -9, -9, -10])
    nested = "<think></think><answer><action>0,0,0</action></answer>"
    assert rewards_of(SpaceCodec(BOX, MOTORS), nested, response_format="think_answer") == [1]


class Wordless(TextCodec):
    """Codec with infinitely many actions that end without a tag."""

    description, action_texts, default_action_text = "", None, "0.0"

    def observation_to_text(self, observation, context=None):
        return ""

    def text_to_action(self, text):
        return float(text)

    def action_to_text(self, action):
        return str(action)


def test_responses_without_an_end_raise() -> None:
    with pytest.raises(ValueError, match=r"ClosingTagFormatReward, but a response such as '0.0' has no closing tag"):
        ClosingTagFormatReward().connect(Wordless(), "direct", ROW)
    ClosingTagFormatReward().connect(Wordless(), "think_answer", ROW)


@pytest.mark.parametrize("reward", [FormatReward(), ClosingTagFormatReward()])
def test_rewards_for_text_raise_where_actions_are_native(reward) -> None:
    with pytest.raises(ValueError, match=r"env.rewards has a \w+FormatReward|FormatReward, which reads the text of"):
        reward.connect(SpaceCodec(BOX, MOTORS), None, ROW)
