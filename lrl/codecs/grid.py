"""Codec for FrozenLake: the map, with the agent's cell marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsInt

import gymnasium as gym

from lrl.codecs.codec import NamedActionsCodec

Desc = tuple[str, ...]
"""A FrozenLake map: one string per row, made of the letters S, F, H and G."""


class FrozenLakeCodec(NamedActionsCodec):
    """Codec for FrozenLake with rectangular maps of any size.

    An observation reads ``row 0 column 1``, followed by the map with ``A`` on the agent's cell. The actions are LEFT,
    DOWN, RIGHT and UP. The context is the map (:data:`Desc`) and a native observation is the index of a cell.

    Args:
        is_slippery: Whether the description says that the ice is slippery.
    """

    needs_context = True

    _actions = ("LEFT", "DOWN", "RIGHT", "UP")
    _by_lower_case = {name.lower(): name for name in _actions}

    def __init__(self, is_slippery: bool = True) -> None:
        self.is_slippery = is_slippery
        self._ice = "The ice is slippery. " if is_slippery else ""

    @property
    def description(self) -> str:
        """Rules, letters of the map and actions."""
        return (
            "You walk on a frozen lake. A is you, F is ice, H is a hole, S is the start, G is the goal. "
            f"{self._ice}Reach G and avoid H. Actions: LEFT, DOWN, RIGHT, UP."
        )

    def context(self, env: gym.Env) -> Desc:
        """Return the map of the current episode."""
        return get_desc(env)

    def observation_to_text(self, observation: SupportsInt, context: Desc | None = None) -> str:
        """Mark cell ``observation`` on the map ``context``."""
        if context is None:
            raise ValueError("context is None; FrozenLakeCodec needs the map, because an observation is only a cell.")
        return render_map(int(observation), context)

    def text_to_action(self, text: str) -> int:
        """Return the index of an action, ignoring case and surrounding whitespace.

        Raises:
            InvalidActionError: If ``text`` is not the name of an action.
        """
        return super().text_to_action(self._by_lower_case.get(text.strip().lower(), text))


def get_desc(env: gym.Env) -> Desc:
    """Return the map of a FrozenLake environment as strings."""
    desc = env.unwrapped.desc  # pyright: ignore[reportAttributeAccessIssue]
    return tuple("".join(cell.decode() for cell in row) for row in desc)


def is_slippery(env: gym.Env) -> bool:
    """Return whether moves in a FrozenLake environment can slip."""
    table = env.unwrapped.P  # pyright: ignore[reportAttributeAccessIssue]
    return any(len(outcomes) > 1 for actions in table.values() for outcomes in actions.values())


def render_map(state: int, desc: Sequence[str]) -> str:
    """Render the map with ``A`` on cell ``state``, below a line with the row and column of that cell.

    Raises:
        ValueError: If there is no such cell.
    """
    if state not in range(len(desc) * len(desc[0])):
        raise ValueError(f"the observation is {state}; it must be from 0 to {len(desc) * len(desc[0]) - 1}.")
    row, column = divmod(state, len(desc[0]))
    lines = [
        " ".join("A" if (r, c) == (row, column) else cell for c, cell in enumerate(line)) for r, line in enumerate(desc)
    ]
    return "\n".join([f"row {row} column {column}", *lines])
