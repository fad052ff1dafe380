"""Tests of the rewards that compare actions with those of the data set, against values computed by hand."""

import numpy as np
import pytest

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.rewards.behaviour_cloning import BehaviourCloningReward, BoundedCloningReward
from lrl.rewards.reward import Row

PUSH = Row(observation="", action=np.array([0.5, -0.5], dtype=np.float32))
STEP = Row(observation="", action=2)
SWITCHES = Row(observation="", action=np.array([1, 0, 3]))


def rewards_of(reward, row, *actions):
    """Return the rewards of actions in the state of one row."""
    return reward([row] * len(actions), [""] * len(actions), actions).tolist()


def test_the_reward_of_a_continuous_action_is_the_negative_mean_squared_error() -> None:
    # (1.5^2 + 0.5^2) / 2 = 1.25, and (0 + 0.2^2) / 2 = 0.02
    actions = np.array([-1.0, 0.0]), np.array([0.5, -0.3]), np.array([0.5, -0.5]), None
    np.testing.assert_allclose(rewards_of(BehaviourCloningReward(), PUSH, *actions), [-1.25, -0.02, 0, -10])


def test_each_row_of_a_batch_has_its_own_reward() -> None:
    """The original script for HalfCheetah raises an error here: it calls ``list.append`` with two arguments."""
    rows = [Row(observation="", action=np.full(6, value)) for value in (0.0, 1.0)]
    rewards = BehaviourCloningReward()(rows, ["", ""], [np.full(6, 0.5), np.array([1, 1, 1, 1, 1, 0.4])])
    np.testing.assert_allclose(rewards, [-0.25, -0.06])


def test_the_reward_of_a_wrong_discrete_action_is_minus_one() -> None:
    assert rewards_of(BehaviourCloningReward(), STEP, 2, np.int64(2), 1, None) == [0, 0, -1, -10]
    several = np.array([1, 0, 3]), np.array([1, 0, 2]), None
    assert rewards_of(BehaviourCloningReward(), SWITCHES, *several) == [0, -1, -10]


def test_the_bounded_reward_is_between_zero_and_one() -> None:
    actions = np.array([-1.0, 0.0]), np.array([0.5, -0.3]), np.array([0.5, -0.5]), None
    expected = [np.exp(-1.25 / 0.5), np.exp(-0.02 / 0.5), 1, 0]
    np.testing.assert_allclose(rewards_of(BoundedCloningReward(scale=0.5), PUSH, *actions), expected, rtol=1e-6)
    assert rewards_of(BoundedCloningReward(), STEP, 2, 1, None) == [1, 0, 0]


def test_the_reward_of_an_error_equal_to_the_scale_is_one_over_e() -> None:
    action = PUSH.action + np.float32(0.5)
    np.testing.assert_allclose(rewards_of(BoundedCloningReward(scale=0.25), PUSH, action), [1 / np.e])


@pytest.mark.parametrize("reward", [BehaviourCloningReward(), BoundedCloningReward()])
def test_empty_batches_and_batches_of_invalid_responses_are_supported(reward) -> None:
    assert reward([], [], []).shape == (0,)
    assert reward([PUSH, PUSH], ["", ""], [None, None]).tolist() == [reward.invalid] * 2


@pytest.mark.parametrize("scale", [0, -1])
def test_a_scale_that_is_not_positive_raises(scale: float) -> None:
    with pytest.raises(ValueError, match=f"rewards.scale is {scale}; it must be positive"):
        BoundedCloningReward(scale=scale)


def test_actions_of_several_parts_raise() -> None:
    row = Row(observation="", action={"arm": np.zeros(2)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="BoundedCloningReward, but an action of env.rows is .*integer or an array"):
        BoundedCloningReward().connect(FrozenLakeCodec(), "direct", row)
