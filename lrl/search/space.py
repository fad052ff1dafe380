"""Spaces that parameters of a small policy are searched in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ParameterSpace:
    """The vectors of parameters that a search may propose: real numbers in a range, or one of some actions each.

    Give either ``actions`` or ``low`` and ``high``.
    """

    size: int
    """Number of parameters."""
    low: float = -6.0
    """Smallest value of a real parameter."""
    high: float = 6.0
    """Largest value of a real parameter."""
    decimals: int | None = 1
    """Decimal places of a real parameter; null does not round."""
    actions: Sequence[int] | None = None
    """The values of each parameter of a tabular policy; null where parameters are real numbers."""
    scale: float = 3.0
    """Standard deviation of the normal distribution that :meth:`sample` draws real parameters from."""

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Draw a random vector, float64 ``(size,)``: normal, clipped and rounded; or uniform among the actions."""
        if self.actions is not None:
            return rng.choice(np.asarray(self.actions, dtype=np.float64), self.size)
        return self.nearest(rng.normal(0.0, self.scale, self.size))

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """Return the legal vector that is nearest to real numbers ``(size,)``: clipped and rounded."""
        if self.actions is not None:
            actions = np.asarray(self.actions, dtype=np.float64)
            return actions[np.abs(np.asarray(values)[:, None] - actions).argmin(axis=1)]
        clipped = np.clip(values, self.low, self.high)
        return clipped if self.decimals is None else clipped.round(self.decimals) + 0.0  # no negative zeros

    def complaint(self, values: Sequence[float]) -> str:
        """Return a sentence on what is wrong with proposed values; empty where they are legal."""
        if len(values) != self.size:
            return f"{len(values)} values were given; there must be {self.size}."
        if self.actions is not None:
            wrong = [i for i, value in enumerate(values) if value not in self.actions]
            legal = f"one of {', '.join(map(str, self.actions))}"
        else:
            wrong = [i for i, value in enumerate(values) if not self.low <= value <= self.high]
            legal = f"between {self.low:g} and {self.high:g}"
        if not wrong:
            return ""
        return f"params[{wrong[0]}] is {values[wrong[0]]:g}; it must be {legal}."
