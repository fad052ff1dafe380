"""The interface of rewards for answers to the rows of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from lrl.rewards.row import Row


class Reward(ABC):
    """Pays for answers, a batch at a time. The total that an environment pays is the weighted sum of its rewards.

    Args:
        weight: factor in the sum; any sign.
    """

    name: str
    """Metrics carry it: ``reward/<name>``."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = float(weight)

    @abstractmethod
    def __call__(self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | None]) -> np.ndarray:
        """Pay for each answer, before the weight.

        Args:
            rows: what was asked.
            responses: the whole answers.
            actions: the actions that they mean; None where an answer is invalid.

        Returns:
            float64 ``(row,)``.
        """
