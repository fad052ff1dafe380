"""Reward functions that compare the chosen action with the action of the data set.

They need neither Q-values nor a simulator, and support Discrete, MultiDiscrete, MultiBinary and Box actions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.ranges import PositiveFloat, check_arguments
from lrl.registry import register
from lrl.rewards.reward import NativeAction, Reward, Row


class _DistanceReward(Reward):
    """Abstract base class of rewards that depend on the distance between two actions.

    Args:
        weight: factor of this reward in the weighted sum.
        invalid: reward of an invalid response.
    """

    def __init__(self, weight: float, invalid: float) -> None:
        super().__init__(weight)
        self.invalid = float(invalid)

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Raise if actions are composed of parts; see :meth:`~lrl.rewards.reward.Reward.connect`."""
        super().connect(codec, response_format, row)
        if not isinstance(row.action, (int, np.integer, np.ndarray)):
            raise ValueError(
                f"env.rewards has a {type(self).__name__}, but an action of env.rows is {row.action!r}; it must be an "
                "integer or an array."
            )

    def __call__(
        self, rows: Sequence[Row], responses: Sequence[str], actions: Sequence[NativeAction | None]
    ) -> np.ndarray:
        """Compute the reward of each response; float64 ``(row,)``."""
        rewards = np.full(len(rows), self.invalid)
        valid = [index for index, action in enumerate(actions) if action is not None]
        if valid:
            taken, wanted = np.array([actions[i] for i in valid]), np.array([rows[i].action for i in valid])
            taken, wanted = taken.reshape(len(valid), -1), wanted.reshape(len(valid), -1)
            if np.issubdtype(wanted.dtype, np.floating):
                rewards[valid] = self._continuous(np.square(taken.astype(np.float64) - wanted).mean(1))
            else:
                rewards[valid] = self._discrete((taken == wanted).all(1))
        return rewards

    @abstractmethod
    def _continuous(self, error: np.ndarray) -> np.ndarray:
        """Return the rewards ``(row,)`` for mean squared errors ``(row,)`` over the dimensions of a Box."""

    @abstractmethod
    def _discrete(self, equal: np.ndarray) -> np.ndarray:
        """Return the rewards ``(row,)`` of integer actions; ``equal``, bool ``(row,)``, marks those of the data."""


@register
class BehaviourCloningReward(_DistanceReward):
    """Reward of the original experiment on control: the negative mean squared error of a continuous action.

    The reward of a discrete action is 0 if it equals that of the data set, else -1. Unlike in the original
    experiment, numbers out of bounds are clipped first, as in the environment, and a response is invalid unless the
    whole of it is an action. ``docs/extending/reward.md`` lists the differences.

    Args:
        weight: factor of this reward in the weighted sum.
        invalid: reward of an invalid response.
    """

    name = "behaviour_cloning"

    def __init__(self, weight: float = 1.0, invalid: float = -10.0) -> None:
        super().__init__(weight, invalid)

    def _continuous(self, error: np.ndarray) -> np.ndarray:
        return -error

    def _discrete(self, equal: np.ndarray) -> np.ndarray:
        return np.where(equal, 0.0, -1.0)


@register
class BoundedCloningReward(_DistanceReward):
    """Reward ``exp(-MSE / scale)`` of a continuous action; 1 or 0 of a discrete action; 0 if invalid.

    Because it is between 0 and 1, the reward of a single response cannot dominate its group, as -10 can.

    Args:
        weight: factor of this reward in the weighted sum.
        scale: mean squared error over the dimensions at which the reward is 1/e; positive.
    """

    name = "bounded_cloning"

    def __init__(self, weight: float = 1.0, scale: PositiveFloat = 0.1) -> None:
        check_arguments(BoundedCloningReward.__init__, locals(), "rewards")
        super().__init__(weight, 0.0)
        self.scale = float(scale)

    def _continuous(self, error: np.ndarray) -> np.ndarray:
        return np.exp(-error / self.scale)

    def _discrete(self, equal: np.ndarray) -> np.ndarray:
        return equal.astype(np.float64)
