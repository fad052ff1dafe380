"""FrozenLake as text: the map with the agent drawn into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from lrl.codecs.codec import InvalidActionError, TextCodec

Desc = tuple[str, ...]
"""A map: one string of S, F, H and G per row."""


class FrozenLakeCodec(TextCodec):
    """``row 1 column 0``, then the map with ``A`` on the agent's cell; LEFT, DOWN, RIGHT and UP.

    Works for any rectangular map. The context is the map (:data:`Desc`), the observation the cell's index.

    Args:
        is_slippery: whether the description says that the ice is slippery.
    """

    needs_context = True

    _actions = ("LEFT", "DOWN", "RIGHT", "UP")
    _index = {text.lower(): index for index, text in enumerate(_actions)}

    def __init__(self, is_slippery: bool = True) -> None:
        self.is_slippery = is_slippery
        self._ice = "The ice is slippery. " if is_slippery else ""

    @property
    def description(self) -> str:
        """The rules, the letters and the four actions."""
        return (
            "You walk on a frozen lake. A is you, F is ice, H is a hole, S is the start, G is the goal. "
            f"{self._ice}Reach G and avoid H. Actions: LEFT, DOWN, RIGHT, UP."
        )

    @property
    def action_texts(self) -> tuple[str, ...]:
        """LEFT, DOWN, RIGHT, UP: actions 0 to 3."""
        return self._actions

    def context(self, env: gym.Env) -> Desc:
        """The map of the running episode."""
        return desc_of(env)

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Draw state ``observation`` into the map ``context``."""
        if context is None:
            raise ValueError("FrozenLakeCodec needs the map as context: the observation is a cell's index only.")
        return draw(int(observation), context)

    def text_to_action(self, text: str) -> int:
        """The index of an action's name, upper or lower case."""
        action = self._index.get(text.strip().lower())
        if action is None:
            raise InvalidActionError(f"the action must be one of {', '.join(self._actions)}")
        return action

    def action_to_text(self, action: Any) -> str:
        """The name of action 0 to 3."""
        return self._actions[int(action)]


def desc_of(env: gym.Env) -> Desc:
    """The map of a FrozenLake environment as strings."""
    desc = env.unwrapped.desc  # pyright: ignore[reportAttributeAccessIssue]
    return tuple("".join(cell.decode() for cell in row) for row in desc)


def is_slippery(env: gym.Env) -> bool:
    """Whether a move of a FrozenLake environment can end where it was not meant to."""
    table = env.unwrapped.P  # pyright: ignore[reportAttributeAccessIssue]
    return any(len(outcomes) > 1 for actions in table.values() for outcomes in actions.values())


def draw(state: int, desc: Sequence[str]) -> str:
    """The map with ``A`` on cell ``state``, under a line that names the cell."""
    row, column = divmod(state, len(desc[0]))
    lines = [
        " ".join("A" if (r, c) == (row, column) else cell for c, cell in enumerate(line)) for r, line in enumerate(desc)
    ]
    return "\n".join([f"row {row} column {column}", *lines])
