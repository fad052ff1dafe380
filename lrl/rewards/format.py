"""Reward functions for the format of a response."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lrl.rewards.reward import Reward
from lrl.rewards.row import Row


class FormatReward(Reward):
    """Reward of 1 if a response contains ``<think>...</think>`` and ``<answer>...</answer>`` anywhere, else 0."""

    name = "format"
    _think = re.compile(r"<think>.*?</think>", re.DOTALL)
    _answer = re.compile(r"<answer>.*?</answer>", re.DOTALL)

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | np.ndarray | None]
    ) -> np.ndarray:
        """Compute the reward of each response; float64 ``(row,)``."""
        return np.array([bool(self._think.search(r) and self._answer.search(r)) for r in responses], dtype=np.float64)


class InvalidActionReward(Reward):
    """Reward of -1 if a response contains no legal action, else 0. The weight is the size of the penalty."""

    name = "invalid_action"

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | np.ndarray | None]
    ) -> np.ndarray:
        """Compute the reward of each response; float64 ``(row,)``."""
        return np.array([-1.0 if action is None else 0.0 for action in actions])
