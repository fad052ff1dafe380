"""Rewards for how an answer is written."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lrl.rewards.reward import Reward
from lrl.rewards.row import Row


class FormatReward(Reward):
    """1 if the answer holds both ``<think>...</think>`` and ``<answer>...</answer>``, wherever they stand, else 0."""

    name = "format"
    _think = re.compile(r"<think>.*?</think>", re.DOTALL)
    _answer = re.compile(r"<answer>.*?</answer>", re.DOTALL)

    def __call__(self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | None]) -> np.ndarray:
        """See :class:`FormatReward`; float64 ``(row,)``."""
        return np.array([bool(self._think.search(r) and self._answer.search(r)) for r in responses], dtype=np.float64)


class InvalidActionReward(Reward):
    """-1 if the answer is no legal action, else 0; the weight is the penalty's size."""

    name = "invalid_action"

    def __call__(self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | None]) -> np.ndarray:
        """See :class:`InvalidActionReward`; float64 ``(row,)``."""
        return np.array([-1.0 if action is None else 0.0 for action in actions])
