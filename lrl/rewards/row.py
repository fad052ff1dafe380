"""Row of a data set of prompts: a state with the expert's value of each action."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TIE_TOLERANCE = 1e-6
"""Relative difference below which two values are a tie."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds the text of a state and the expert's values in it."""

    observation: str
    """Text of the state that the policy sees."""
    q_values: tuple[float, ...]
    """The expert's value of each action, in the order of the action space."""
    action: int
    """The expert's action, one of the best."""
    state: int = 0
    """Index of the state in its environment."""
    desc: tuple[str, ...] = ()
    """Map of the environment; empty if it has none."""
    native_observation: np.ndarray | int | None = None
    """The state as the environment gives it; None if the data set does not say."""

    @property
    def best_actions(self) -> tuple[int, ...]:
        """Actions with the highest value, including ties (:data:`TIE_TOLERANCE`)."""
        best = max(self.q_values)
        floor = best - TIE_TOLERANCE * abs(best)
        return tuple(action for action, value in enumerate(self.q_values) if value >= floor)
