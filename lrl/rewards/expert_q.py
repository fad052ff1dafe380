"""Rewards for the action that was chosen, from an expert's Q-values.

All pay 0 for an invalid answer. How much the second best action is paid decides what can be learned: on the slippery
4x4 FrozenLake the normalised advantage pays .68 for it in state 14, the gap at temperature .2 pays .20.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from lrl.rewards.reward import Reward
from lrl.rewards.row import Row

_FLAT = 1e-9
"""Q-values closer together than this are all equal: what value iteration leaves over is not a preference."""


class _ChosenActionReward(Reward):
    """Pays for valid actions only."""

    def __call__(self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | None]) -> np.ndarray:
        """The formula's value of each valid action, 0 for each invalid one; float64 ``(row,)``."""
        paid = np.zeros(len(rows))
        valid = [index for index, action in enumerate(actions) if action is not None]
        if valid:
            chosen = np.array([int(actions[index]) for index in valid])  # pyright: ignore[reportArgumentType]
            paid[valid] = self._pay([rows[index] for index in valid], chosen)
        return paid

    @abstractmethod
    def _pay(self, rows: Sequence[Row], chosen: np.ndarray) -> np.ndarray:
        """Float64 ``(row,)`` for the valid actions ``chosen``, int64 ``(row,)``."""


class NormalizedAdvantageReward(_ChosenActionReward):
    """The original experiment's: ``min(1, (Q(a) - min Q) / (max Q - min Q) + .2 [a is the expert's])``.

    Where all actions are worth the same: 1 for the expert's, else .5. The original total is the mean of this and
    :class:`~lrl.rewards.format.FormatReward`: weights .5 and .5.
    """

    name = "normalized_advantage"

    def _pay(self, rows: Sequence[Row], chosen: np.ndarray) -> np.ndarray:
        _, of_chosen, low, spread = _values(rows, chosen)
        match = chosen == np.array([row.action for row in rows])
        flat = spread <= _FLAT
        normalised = (of_chosen - low) / np.where(flat, 1.0, spread)
        return np.where(flat, np.where(match, 1.0, 0.5), np.minimum(1.0, normalised + 0.2 * match))


class OptimalActionReward(_ChosenActionReward):
    """1 for a best action (ties count), else 0: nothing to gain from the second best."""

    name = "optimal_action"

    def _pay(self, rows: Sequence[Row], chosen: np.ndarray) -> np.ndarray:
        return np.array([float(action in row.best_actions) for row, action in zip(rows, chosen, strict=True)])


class QGapReward(_ChosenActionReward):
    """``exp(-(max Q - Q(a)) / (temperature (max Q - min Q)))``: between the two others, by its temperature.

    Towards 0 it becomes :class:`OptimalActionReward`; large ones level all actions. 1 where all are worth the same.

    Args:
        weight: factor in the sum.
        temperature: the fraction of the spread at which an action is paid 1/e; positive.
    """

    name = "q_gap"

    def __init__(self, weight: float = 1.0, temperature: float = 0.2) -> None:
        super().__init__(weight)
        if temperature <= 0:
            raise ValueError(f"rewards.temperature is {temperature}; it must be positive.")
        self.temperature = float(temperature)

    def _pay(self, rows: Sequence[Row], chosen: np.ndarray) -> np.ndarray:
        q, of_chosen, _, spread = _values(rows, chosen)
        flat = spread <= _FLAT
        gap = (q.max(1) - of_chosen) / (self.temperature * np.where(flat, 1.0, spread))
        return np.where(flat, 1.0, np.exp(-gap))


def _values(rows: Sequence[Row], chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Q ``(row, action)``; Q of the chosen action, the lowest Q and the spread of Q, each ``(row,)``."""
    q = np.array([row.q_values for row in rows], dtype=np.float64)
    low = q.min(1)
    return q, q[np.arange(len(q)), chosen], low, q.max(1) - low
