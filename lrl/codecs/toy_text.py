"""Codecs for Gymnasium's Taxi and CliffWalking, whose native observations are state indices."""

from __future__ import annotations

from typing import Any, SupportsInt

from lrl.codecs.codec import NamedActionsCodec


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
        """Describe the positions of the taxi and the passenger, and the destination, of a state index."""
        _check_state(observation, 500)
        rest, destination = divmod(int(observation), 4)
        rest, passenger = divmod(rest, 5)
        row, column = divmod(rest, 5)
        where = "in the taxi" if passenger == 4 else f"at {self._places[passenger]}"
        return f"taxi at row {row} column {column}, passenger {where}, destination {self._places[destination]}"


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
        """Describe the row and column of a state index."""
        _check_state(observation, 48)
        row, column = divmod(int(observation), 12)
        return f"row {row} column {column}"


def _check_state(observation: SupportsInt, num_states: int) -> None:
    """Raise if a state index is out of range."""
    if int(observation) not in range(num_states):
        raise ValueError(f"the observation is {observation}; it must be from 0 to {num_states - 1}.")
