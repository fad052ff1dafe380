"""Codecs for Gymnasium's FrozenLake, Taxi and CliffWalking, whose native observations are state indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsInt

import gymnasium as gym

from lrl.codecs.codec import NamedActionsCodec
from lrl.registry import register


@register
class TaxiCodec(NamedActionsCodec):
    """Codec for Taxi, with observations such as ``taxi at row 2 column 3, passenger at red, destination green``."""

    has_expert = True
    _actions = ("south", "north", "east", "west", "pick up", "drop off")
    _places = ("red", "green", "yellow", "blue", "taxi")
    _corners = "red is row 0 column 0, green row 0 column 4, yellow row 4 column 0, blue row 4 column 3"
    _walls = (
        "Walls stand between columns 1 and 2 in rows 0 and 1, and between 0 and 1 and between 2 and 3 in rows 3 and 4."
    )

    @property
    def description(self) -> str:
        """Grid, walls and actions."""
        return (
            f"Drive the taxi on a grid of 5 x 5: pick the passenger up and drop them off at their destination. Of the "
            f"places, {self._corners}. {self._walls} Actions: {', '.join(self._actions)}."
        )

    def observation_to_text(self, observation: SupportsInt, context: Any = None) -> str:
        """Describe the positions of the taxi and the passenger, and the destination, of a state index.

        Raises:
            ValueError: If ``observation`` is not from 0 to 499.
        """
        _check_state(observation, 500)
        rest, destination = divmod(int(observation), 4)
        rest, passenger = divmod(rest, 5)
        row, column = divmod(rest, 5)
        where = "in the taxi" if passenger == 4 else f"at {self._places[passenger]}"
        return f"taxi at row {row} column {column}, passenger {where}, destination {self._places[destination]}"


@register
class CliffWalkingCodec(NamedActionsCodec):
    """Codec for CliffWalking, with observations such as ``row 3 column 0``."""

    has_expert = True
    _actions = ("UP", "RIGHT", "DOWN", "LEFT")

    @property
    def description(self) -> str:
        """Grid, cliff and actions."""
        return (
            "Walk on a grid of 4 rows and 12 columns from row 3 column 0 to row 3 column 11. Between them in row 3 "
            f"is a cliff: who steps into it starts again. Actions: {', '.join(self._actions)}."
        )

    def observation_to_text(self, observation: SupportsInt, context: Any = None) -> str:
        """Describe the row and column of a state index.

        Raises:
            ValueError: If ``observation`` is not from 0 to 47.
        """
        _check_state(observation, 48)
        row, column = divmod(int(observation), 12)
        return f"row {row} column {column}"


def _check_state(observation: SupportsInt, num_states: int) -> None:
    """Raise if a state index is out of range."""
    if int(observation) not in range(num_states):
        raise ValueError(f"the observation is {observation}; it must be from 0 to {num_states - 1}.")


Desc = tuple[str, ...]
"""A FrozenLake map: one string per row, made of the letters S, F, H and G."""


@register
class FrozenLakeCodec(NamedActionsCodec):
    """Codec for FrozenLake with rectangular maps of any size.

    An observation reads ``row 0 column 1``, followed by the map with ``A`` on the agent's cell. The actions are LEFT,
    DOWN, RIGHT and UP. The context is the map (:data:`Desc`) and a native observation is the index of a cell.

    Args:
        is_slippery: whether the description says that the ice is slippery.
    """

    needs_context = True

    _actions = ("LEFT", "DOWN", "RIGHT", "UP")
    _ignores_case = True

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
        """Mark cell ``observation`` on the map ``context``.

        Raises:
            ValueError: If ``context`` is None, or ``observation`` is not the index of a cell.
        """
        if context is None:
            raise ValueError("context is None; FrozenLakeCodec needs the map, because an observation is only a cell.")
        return render_map(int(observation), context)


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
        ValueError: If ``state`` is not the index of a cell of the map.
    """
    if state not in range(len(desc) * len(desc[0])):
        raise ValueError(f"the observation is {state}; it must be from 0 to {len(desc) * len(desc[0]) - 1}.")
    row, column = divmod(state, len(desc[0]))
    lines = [
        " ".join("A" if (r, c) == (row, column) else cell for c, cell in enumerate(line)) for r, line in enumerate(desc)
    ]
    return "\n".join([f"row {row} column {column}", *lines])
