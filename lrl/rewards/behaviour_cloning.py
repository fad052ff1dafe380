"""Reward functions that compare the chosen action with the action of the data set.

They need neither Q-values nor a simulator, and support Discrete, MultiDiscrete, MultiBinary and Box actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lrl.codecs.codec import TextCodec
from lrl.ranges import PositiveFloat, check_arguments
from lrl.registry import register
from lrl.rewards.reward import ActionReward, NativeAction, Row


class _DistanceReward(ActionReward):
    """Abstract base class of rewards that depend on the distance between two actions."""

    def connect(self, codec: TextCodec, response_format: str | None, row: Row) -> None:
        """Check the type of actions; see :meth:`~lrl.rewards.reward.Reward.connect`.

        Raises:
            ValueError: If actions are neither integers nor arrays, but for example dicts or tuples.
        """
        super().connect(codec, response_format, row)
        if not isinstance(row.action, (int, np.integer, np.ndarray)):
            raise ValueError(
                f"env.rewards has a {type(self).__name__}, but an action of env.rows is {row.action!r}; it must be an "
                "integer or an array."
            )


def _errors(rows: Sequence[Row], actions: Sequence[NativeAction]) -> tuple[np.ndarray, bool]:
    """Return the error of each action, float64 ``(row,)``, and whether actions are continuous.

    The error of a continuous action is the mean over the dimensions of the squared difference from the row's action.
    The error of a discrete action is 0 if it equals the row's action, else 1.
    """
    taken, wanted = np.array(actions), np.array([row.action for row in rows])
    taken, wanted = taken.reshape(len(rows), -1), wanted.reshape(len(rows), -1)
    if np.issubdtype(wanted.dtype, np.floating):
        return np.square(taken.astype(np.float64) - wanted).mean(1), True
    return (taken != wanted).any(1).astype(np.float64), False


@register
class BehaviourCloningReward(_DistanceReward):
    """Reward of the original experiment on control: the negative mean squared error of a continuous action.

    The reward of a discrete action is 0 if it equals the row's action, else -1. The reward of an invalid response is
    -10.
    Unlike in the original experiment, numbers out of bounds are clipped first, as in the environment, and a response is
    invalid unless the whole of it is an action. ``docs/extending/reward.md`` lists the differences.

    Args:
        weight: factor of this reward in the weighted sum.
    """

    name = "behaviour_cloning"

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(weight, invalid=-10.0)

    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Compute the rewards of valid actions, float64 ``(row,)``."""
        errors, _ = _errors(rows, actions)
        return -errors


@register
class BoundedCloningReward(_DistanceReward):
    """Reward ``exp(-MSE / scale)`` of a continuous action; 1 or 0 of a discrete action; 0 if invalid.

    The reward is between 0 and 1. A single invalid response therefore cannot dominate the advantages of its group, as
    it can with the -10 of :class:`BehaviourCloningReward`.

    Args:
        weight: factor of this reward in the weighted sum.
        scale: mean squared error over the dimensions at which the reward is 1/e; positive.
    """

    name = "bounded_cloning"

    def __init__(self, weight: float = 1.0, scale: PositiveFloat = 0.1) -> None:
        check_arguments(BoundedCloningReward.__init__, locals(), "rewards")
        super().__init__(weight, 0.0)
        self.scale = float(scale)

    def of_actions(self, rows: Sequence[Row], actions: Sequence[NativeAction]) -> np.ndarray:
        """Compute the rewards of valid actions, float64 ``(row,)``."""
        errors, continuous = _errors(rows, actions)
        return np.exp(-errors / self.scale) if continuous else 1 - errors
