"""Tests of the reward functions against values computed by hand."""

import numpy as np
import pytest

from lrl.codecs.toy_text import FrozenLakeCodec
from lrl.rewards.expert_q import NormalizedAdvantageReward, OptimalActionReward, QGapReward
from lrl.rewards.format import FormatReward, InvalidActionReward
from lrl.rewards.reward import Reward, Row

ROW = Row(observation="", q_values=(0.1, 0.5, 0.3, 0.46), action=1)
FLAT = Row(observation="", q_values=(0.2, 0.2, 0.2, 0.2), action=2)
TIE = Row(observation="", q_values=(0.4, 0.0, 0.4 - 1e-9, 0.1), action=0)


def rewards_of(reward: Reward, row: Row) -> list[float]:
    """Return the rewards of LEFT, DOWN, RIGHT, UP and an invalid response."""
    return reward([row] * 5, [""] * 5, [0, 1, 2, 3, None]).tolist()


def test_normalized_advantage_follows_the_formula_of_the_original() -> None:
    # (Q - 0.1) / 0.4 = 0, 1, 0.5, 0.9; the expert's action has a bonus of 0.2, and rewards are clipped at 1.
    np.testing.assert_allclose(rewards_of(NormalizedAdvantageReward(), ROW), [0, 1, 0.5, 0.9, 0])


def test_the_experts_action_has_the_bonus_even_if_it_is_not_the_best() -> None:
    row = Row(observation="", q_values=(0.1, 0.5, 0.3, 0.46), action=2)
    np.testing.assert_allclose(rewards_of(NormalizedAdvantageReward(), row), [0, 1, 0.7, 0.9, 0])


def test_normalized_advantage_of_equal_values_is_one_for_the_experts_action_else_one_half() -> None:
    assert rewards_of(NormalizedAdvantageReward(), FLAT) == [0.5, 0.5, 1, 0.5, 0]


def test_optimal_action_includes_ties() -> None:
    assert rewards_of(OptimalActionReward(), ROW) == [0, 1, 0, 0, 0]
    assert rewards_of(OptimalActionReward(), TIE) == [1, 0, 1, 0, 0]
    assert rewards_of(OptimalActionReward(), FLAT) == [1, 1, 1, 1, 0]


def test_q_gap_decays_with_the_gap_and_the_temperature() -> None:
    expected = [np.exp(-5), 1, np.exp(-2.5), np.exp(-0.5), 0]  # gaps are 1, 0, 0.5 and 0.1 of the spread
    np.testing.assert_allclose(rewards_of(QGapReward(temperature=0.2), ROW), expected)
    assert rewards_of(QGapReward(), FLAT) == [1, 1, 1, 1, 0]
    np.testing.assert_allclose(rewards_of(QGapReward(temperature=1e-3), TIE), [1, 0, 1, 0, 0], atol=1e-4)


def test_a_temperature_of_zero_raises() -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        QGapReward(temperature=0)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a\nb</think><answer>nonsense</answer>", 1),
        ("before <answer></answer> between <think></think>", 1),
        ("<think>a<answer>LEFT</answer>", 0),
        ("<think>a</think>LEFT", 0),
        ("</think><think></answer><answer>", 0),
        ("", 0),
    ],
)
def test_format_requires_both_pairs_of_tags(response: str, value: float) -> None:
    assert FormatReward()([ROW], [response], [None]).tolist() == [value]


def test_invalid_actions_are_penalized() -> None:
    assert rewards_of(InvalidActionReward(), ROW) == [0, 0, 0, 0, -1]


@pytest.mark.parametrize("reward", [NormalizedAdvantageReward(), OptimalActionReward(), QGapReward()])
def test_rows_without_q_values_raise(reward: Reward) -> None:
    reward.connect(FrozenLakeCodec(), "direct", ROW)
    reward.connect(FrozenLakeCodec(), None, ROW)
    with pytest.raises(ValueError, match=f"env.rewards has a {type(reward).__name__}, but env.rows has no Q-values"):
        reward.connect(FrozenLakeCodec(), "direct", Row(observation="", action=1))


def test_a_row_without_q_values_has_no_best_action() -> None:
    assert Row(observation="", action=1).best_actions == ()
    assert Row(observation="", action=np.zeros(2)).best_actions == ()


def test_native_observations_do_not_affect_the_equality_of_rows() -> None:
    rows = [Row(observation="a", action=1, native_observation=np.zeros(2)), Row(observation="a", action=1)]
    assert len(set(rows)) == 1 and Row(observation="b", action=1) not in rows


def test_an_empty_batch_has_no_rewards() -> None:
    for reward in (NormalizedAdvantageReward(), OptimalActionReward(), QGapReward(), FormatReward()):
        assert reward([], [], []).shape == (0,)
