"""Interface of reward functions for responses to the rows of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from lrl.rewards.row import Row


class Reward(ABC):
    """Abstract base class of reward functions for batches of responses.

    The reward of an environment is the weighted sum of its reward functions.

    Args:
        weight: Factor of this function in the sum; may be negative.
    """

    name: str
    """Name of the metric: ``reward/<name>``."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = float(weight)

    @abstractmethod
    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[int | np.ndarray | None]
    ) -> np.ndarray:
        """Compute the unweighted reward of each response.

        Args:
            rows: The rows shown to the policy, ``(row,)``.
            responses: The complete responses, ``(row,)``.
            actions: The native actions of the responses, ``(row,)``: integers, or arrays of a Box; None for an invalid
                response.

        Returns:
            Rewards, float64 ``(row,)``.
        """
