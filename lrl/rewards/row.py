"""One state of a data set of prompts, with what an expert thinks of every action in it."""

from __future__ import annotations

from dataclasses import dataclass

TIE_TOLERANCE = 1e-6
"""Two values are a tie if they differ by less than this part of the larger one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A state, as text, with expert values."""

    observation: str
    """What the policy sees."""
    q_values: tuple[float, ...]
    """The expert's value of each action, in the order of the action space."""
    action: int
    """The action that the expert takes: one of the best."""
    state: int = 0
    """The state's index in its environment."""
    desc: tuple[str, ...] = ()
    """The map, where the environment has one."""

    @property
    def best_actions(self) -> tuple[int, ...]:
        """Every action of the highest value; ties count (:data:`TIE_TOLERANCE`)."""
        best = max(self.q_values)
        floor = best - TIE_TOLERANCE * abs(best)
        return tuple(action for action, value in enumerate(self.q_values) if value >= floor)
