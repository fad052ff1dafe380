"""Rewards, against numbers worked out by hand."""

import numpy as np
import pytest

from lrl.rewards.expert_q import NormalizedAdvantageReward, OptimalActionReward, QGapReward
from lrl.rewards.format import FormatReward, InvalidActionReward
from lrl.rewards.reward import Reward
from lrl.rewards.row import Row

ROW = Row(observation="", q_values=(0.1, 0.5, 0.3, 0.46), action=1)
FLAT = Row(observation="", q_values=(0.2, 0.2, 0.2, 0.2), action=2)
TIE = Row(observation="", q_values=(0.4, 0.0, 0.4 - 1e-9, 0.1), action=0)


def paid(reward: Reward, row: Row) -> list[float]:
    """What LEFT, DOWN, RIGHT, UP and an invalid answer are paid."""
    return reward([row] * 5, [""] * 5, [0, 1, 2, 3, None]).tolist()


def test_the_normalised_advantage_is_the_originals_formula() -> None:
    # (Q - .1) / .4 = 0, 1, .5, .9; the expert's gets .2 more, clipped at 1
    np.testing.assert_allclose(paid(NormalizedAdvantageReward(), ROW), [0, 1, 0.5, 0.9, 0])


def test_the_match_bonus_goes_to_the_experts_action_even_where_its_values_disagree() -> None:
    row = Row(observation="", q_values=(0.1, 0.5, 0.3, 0.46), action=2)
    np.testing.assert_allclose(paid(NormalizedAdvantageReward(), row), [0, 1, 0.7, 0.9, 0])


def test_the_normalised_advantage_of_equal_values_is_one_for_the_experts_action_and_half_else() -> None:
    assert paid(NormalizedAdvantageReward(), FLAT) == [0.5, 0.5, 1, 0.5, 0]


def test_only_best_actions_are_optimal_and_ties_count() -> None:
    assert paid(OptimalActionReward(), ROW) == [0, 1, 0, 0, 0]
    assert paid(OptimalActionReward(), TIE) == [1, 0, 1, 0, 0]
    assert paid(OptimalActionReward(), FLAT) == [1, 1, 1, 1, 0]


def test_the_gap_reward_separates_best_and_second_best_by_its_temperature() -> None:
    expected = [np.exp(-5), 1, np.exp(-2.5), np.exp(-0.5), 0]  # gaps 1, 0, .5, .1 of the spread
    np.testing.assert_allclose(paid(QGapReward(temperature=0.2), ROW), expected)
    assert paid(QGapReward(), FLAT) == [1, 1, 1, 1, 0]
    np.testing.assert_allclose(paid(QGapReward(temperature=1e-3), TIE), [1, 0, 1, 0, 0], atol=1e-4)


def test_a_temperature_that_is_not_positive_is_an_error() -> None:
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
def test_the_format_reward_wants_both_pairs_of_tags(response: str, value: float) -> None:
    assert FormatReward()([ROW], [response], [None]).tolist() == [value]


def test_an_invalid_action_costs_one() -> None:
    assert paid(InvalidActionReward(), ROW) == [0, 0, 0, 0, -1]


def test_no_rows_are_paid_nothing() -> None:
    for reward in (NormalizedAdvantageReward(), OptimalActionReward(), QGapReward(), FormatReward()):
        assert reward([], [], []).shape == (0,)
