"""Real vectors that stand for the proposals of a space, for methods that move through real numbers only."""

from __future__ import annotations

from typing import final

import numpy as np

from lrl.search.space import ParameterSpace


@final
class Relaxation:
    """The real vectors behind the proposals: the parameters themselves, or one logit for each action of each entry.

    Logits order nothing: every action of a table is as far from every other, which numbers of actions are not. The
    proposal is the action with the highest logit.

    Args:
        space: what may be proposed.
    """

    def __init__(self, space: ParameterSpace) -> None:
        self.space = space
        self._actions = None if space.actions is None else np.asarray(space.actions, dtype=np.float64)
        self.size = space.size if self._actions is None else space.size * len(self._actions)
        self.scale = space.scale if self._actions is None else 1.0
        """Standard deviation of the vectors of random proposals."""

    @property
    def bounds(self) -> np.ndarray | None:
        """Lower and upper end of each number, ``(size, 2)``; None for logits, which have none."""
        return None if self._actions is not None else np.tile([self.space.low, self.space.high], (self.size, 1))

    @property
    def zero(self) -> np.ndarray:
        """The vector inside the bounds that is nearest to zero."""
        return self.clip(np.zeros(self.size))

    def clip(self, point: np.ndarray) -> np.ndarray:
        """Return the nearest vector inside the bounds."""
        return point if self._actions is not None else np.clip(point, self.space.low, self.space.high)

    def proposal(self, point: np.ndarray) -> np.ndarray:
        """Return the legal parameters ``(parameter,)`` of a real vector ``(size,)``."""
        if self._actions is None:
            return self.space.nearest(point)
        return self._actions[point.reshape(self.space.size, -1).argmax(1)]

    def point(self, parameters: np.ndarray) -> np.ndarray:
        """Return a real vector ``(size,)`` of some parameters; a chosen action has logit 1, all others 0."""
        if self._actions is None:
            return np.asarray(parameters, dtype=np.float64)
        return (np.asarray(parameters)[:, None] == self._actions).astype(np.float64).ravel()
