"""Reward functions that compare the chosen action with an expert's Q-values.

The reward of an invalid response is 0. The functions differ in the reward of the second-best action: in state 14 of the
slippery 4x4 FrozenLake, the normalised advantage is 0.68 and the Q-gap at temperature 0.2 is 0.20.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.ranges import PositiveFloat, check_arguments
from lrl.registry import register
from lrl.rewards.reward import ActionReward, NativeAction, Row

_EQUAL_VALUES_TOLERANCE = 1e-9
"""Spread of Q-values up to which all are considered equal, as value iteration leaves small residuals."""


class _ChosenActionReward(ActionReward):
    """Abstract base class of reward functions that are 0 for invalid responses."""

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Check that rows have Q-values; see :meth:`~lrl.rewards.reward.Reward.connect`.

        Raises:
            ValueError: If the row has no Q-values.
        """
        super().connect(codec, response_format, row)
        if not row.q_values:
            raise ValueError(
                f"env.rewards has a {type(self).__name__}, but env.rows has no Q-values; it must be a reward that "
                "needs none, such as BehaviourCloningReward."
            )


@register
class NormalizedAdvantageReward(_ChosenActionReward):
    """Reward of the original experiment: ``min(1, (Q(a) - min Q) / (max Q - min Q) + 0.2 [a is the expert's action])``.

    If all Q-values are equal, it is 1 for the expert's action, else 0.5. The original experiment looks for ``<answer>``
    anywhere in a response; here a response is invalid unless the environment accepts it. The total reward of the
    original experiment is the sum of this reward and :class:`~lrl.rewards.format.FormatReward`, both with weight 0.5.
    """

    name = "normalized_advantage"

    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Compute the rewards of valid actions, float64 ``(row,)``."""
        q, q_chosen, spread, all_equal = _q_values(rows, actions)
        is_expert = np.array(actions) == np.array([row.action for row in rows])
        normalized = (q_chosen - q.min(1)) / spread
        return np.where(all_equal, np.where(is_expert, 1.0, 0.5), np.minimum(1.0, normalized + 0.2 * is_expert))


@register
class OptimalActionReward(_ChosenActionReward):
    """Reward of 1 for a best action, ties included, else 0."""

    name = "optimal_action"

    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Compute the rewards of valid actions, float64 ``(row,)``."""
        return np.array([float(action in row.best_actions) for row, action in zip(rows, actions, strict=True)])


@register
class QGapReward(_ChosenActionReward):
    """Reward ``exp(-(max Q - Q(a)) / (temperature (max Q - min Q)))``, which is 1 if all Q-values are equal.

    At low temperatures it approaches :class:`OptimalActionReward`; at high temperatures all rewards are similar.

    Args:
        weight: factor of this reward in the weighted sum.
        temperature: gap ``max Q - Q(a)``, as a fraction of ``max Q - min Q``, at which the reward is 1/e; positive.
    """

    name = "q_gap"

    def __init__(self, weight: float = 1.0, temperature: PositiveFloat = 0.2) -> None:
        check_arguments(QGapReward.__init__, locals(), "rewards")
        super().__init__(weight)
        self.temperature = float(temperature)

    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Compute the rewards of valid actions, float64 ``(row,)``."""
        q, q_chosen, spread, all_equal = _q_values(rows, actions)
        return np.where(all_equal, 1.0, np.exp(-(q.max(1) - q_chosen) / (self.temperature * spread)))


def _q_values(
    rows: Sequence[Row], actions: Sequence[NativeAction]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the Q-values of the rows and three quantities that depend on them.

    Returns:
        The Q-values, float64 ``(row, action)``, and for each row, ``(row,)``: the Q-value of the chosen action; the
        spread ``max Q - min Q``, or 1 if all Q-values are equal; and whether all Q-values are equal.
    """
    q = np.array([row.q_values for row in rows], dtype=np.float64)
    spread = q.max(1) - q.min(1)
    all_equal = spread <= _EQUAL_VALUES_TOLERANCE
    return q, q[np.arange(len(q)), np.array(actions)], np.where(all_equal, 1.0, spread), all_equal
