"""Row of a data set of prompts: a state with the action of an expert, and maybe the value of each action."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

TIE_TOLERANCE = 1e-6
"""Relative difference below which two values are a tie."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds a state as text and natively, and what an expert does in it."""

    observation: str
    """Text of the state that the policy sees."""
    q_values: tuple[float, ...] = ()
    """The expert's value of each action, in the order of the action space; empty if they are not known."""
    action: int | np.ndarray
    """The expert's native action: an integer of a Discrete space, or an array; with Q-values one of the best."""
    native_observation: Any = field(default=None, compare=False)
    """The state as the environment observes it: an array, an integer, or a dict of these; None if it is not known."""
    state: int = 0
    """Index of the state in its environment."""
    desc: tuple[str, ...] = ()
    """Map of the environment; empty if it has none."""

    @property
    def best_actions(self) -> tuple[int, ...]:
        """Actions with the highest value, including ties (:data:`TIE_TOLERANCE`); empty without Q-values."""
        best = max(self.q_values, default=0.0)
        floor = best - TIE_TOLERANCE * abs(best)
        return tuple(action for action, value in enumerate(self.q_values) if value >= floor)
