"""Codecs of RAGEN's boards, which are FrozenLake with random maps and Sokoban: RAGEN's text format, and a plain one.

An observation of a board is one-hot, uint8 ``(row, column, kind)``, where the kind of a cell is its index in
:attr:`Board.kinds`. It contains the whole state except for the number of actions that are left.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lrl.codecs.codec import NamedActionsCodec
from lrl.registry import register


@dataclass(frozen=True, kw_only=True)
class Board:
    """Describes the cells and the actions of one kind of board."""

    task: str
    """The task and the rules, in sentences."""
    kinds: Sequence[tuple[str, str, str]]
    """RAGEN's symbol, the letter of the plain format and the meaning of each kind of cell."""
    agent_kinds: Sequence[int]
    """Kinds of the cell on which the agent stands."""
    actions: tuple[str, ...]
    """Names of the actions 0 to 3."""


SLIPPERY = "You may slip to a side of the direction that you chose, because the ice is slippery."

BOARDS: dict[str, Board] = {
    "frozen_lake": Board(
        task="Walk on a frozen lake to the goal, and avoid the holes.",
        kinds=(
            ("P", "A", "player"),
            ("_", "F", "empty"),
            ("O", "H", "hole"),
            ("G", "G", "goal"),
            ("X", "X", "player in hole"),
            ("√", "Y", "player on goal"),
        ),
        agent_kinds=(0, 4, 5),
        actions=("Left", "Down", "Right", "Up"),
    ),
    "sokoban": Board(
        task="Solve a Sokoban puzzle: push all boxes to targets. You push a box by moving into it, if the cell behind "
        "the box is free. You cannot pull a box, and you cannot push it into a wall or another box.",
        kinds=(
            ("#", "W", "wall"),
            ("_", "F", "empty"),
            ("O", "T", "target"),
            ("√", "D", "box on target"),
            ("X", "B", "box"),
            ("P", "A", "player"),
            ("S", "Y", "player on target"),
        ),
        agent_kinds=(5, 6),
        actions=("Up", "Down", "Left", "Right"),
    ),
}
"""RAGEN's boards. The order of kinds and actions is that of RAGEN's tables of symbols and actions."""

BoardName = Literal["frozen_lake", "sokoban"]
"""Name of a board in :data:`BOARDS`."""


class BoardCodec(NamedActionsCodec):
    """Abstract base class of the codecs of boards. Names of actions are matched without regard to case and whitespace.

    Args:
        board: ``frozen_lake`` or ``sokoban``.
        is_slippery: whether the description says that the ice is slippery.

    Raises:
        ValueError: If there is no board with that name, or Sokoban is said to be slippery.
    """

    has_expert = True
    _ignores_case = True

    _column: int
    """Column of :attr:`Board.kinds` with the symbols of the format."""

    def __init__(self, board: BoardName, is_slippery: bool = False) -> None:
        if board not in BOARDS:
            raise ValueError(f"codec.board is {board!r}; it must be one of {', '.join(BOARDS)}.")
        if is_slippery and board != "frozen_lake":
            raise ValueError(f"codec.is_slippery is true for codec.board {board!r}; it must be false.")
        self.board = BOARDS[board]
        self._task = f"{self.board.task} {SLIPPERY}" if is_slippery else self.board.task
        self._actions = self._action_names()

        self._symbols = [kind[self._column] for kind in self.board.kinds]
        self._kind_of = {symbol: index for index, symbol in enumerate(self._symbols)}

    @abstractmethod
    def _action_names(self) -> tuple[str, ...]:
        """Return the names of the actions in this format."""

    def _kinds(self, observation: Any) -> list[list[int]]:
        """Return the kind of each cell of an observation.

        Raises:
            ValueError: If the observation is not a one-hot array of this board.
        """
        cells = np.asarray(observation)
        if cells.ndim != 3 or cells.shape[2] != len(self._symbols):
            expected = f"(rows, columns, {len(self._symbols)})"
            raise ValueError(f"the observation has shape {cells.shape}; it must have shape {expected}.")
        return cells.argmax(-1).tolist()

    def _place(self, kinds: Sequence[Sequence[int]]) -> str:
        """Return the row and column of the agent in words.

        Raises:
            ValueError: If the board contains no agent.
        """
        for kind in self.board.agent_kinds:
            for row, cells in enumerate(kinds):
                if kind in cells:
                    return f"row {row} column {cells.index(kind)}"
        raise ValueError("the observation contains no player; one cell must be of a kind with the player.")

    def _parse(self, lines: Sequence[str], text: str) -> np.ndarray:
        """Return the observation of lines of symbols, which is the inverse of :meth:`_kinds`.

        Raises:
            ValueError: If the lines are not a rectangle of symbols.
        """
        if not lines or len({len(line) for line in lines}) > 1 or set("".join(lines)) - set(self._symbols):
            raise ValueError(f"the observation is {text!r}; it must be a rectangle of the symbols {self._symbols}.")
        kinds = [[self._kind_of[symbol] for symbol in line] for line in lines]
        return np.eye(len(self._symbols), dtype=np.uint8)[kinds]


@register
class RagenBoardCodec(BoardCodec):
    """Codec of a board in RAGEN's text format (arXiv:2504.20073): ``State:`` and one line of symbols per row.

    An action is ``Right``. As with RAGEN's ``max_actions_per_turn: 1``, which SCOUT (arXiv:2601.21754) uses, a sequence
    such as ``Right || Up`` stands for its first action.

    Departures from RAGEN: the description has the same parts (task, symbols, actions) in other words, and texts contain
    neither the number of the turn nor the number of actions that are left.
    """

    _column = 0
    _separator = "||"
    _header = "State:\n"

    @property
    def description(self) -> str:
        """Task, meaning of the symbols, and actions."""
        symbols = ", ".join(f"{symbol}: {meaning}" for symbol, _, meaning in self.board.kinds)
        return (
            f"{self._task}\nThe meaning of each symbol in the state is:\n{symbols}\n"
            f"Your available actions are:\n{', '.join(self._actions)}\nYou take one action per turn."
        )

    def _action_names(self) -> tuple[str, ...]:
        return self.board.actions

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Write the symbols of all cells below ``State:``."""
        symbols = self._symbols
        return self._header + "\n".join(["".join([symbols[kind] for kind in row]) for row in self._kinds(observation)])

    def text_to_observation(self, text: str) -> np.ndarray:
        """Parse the symbols, with or without ``State:``.

        Raises:
            ValueError: If the text is not a rectangle of symbols.
        """
        return self._parse(text.removeprefix(self._header).split("\n"), text)

    def text_to_action(self, text: str) -> int:
        """Return the index of the first action of a sequence, ignoring case.

        Raises:
            InvalidActionError: If the sequence does not begin with the name of an action.
        """
        named = [part for part in text.split(self._separator) if part.strip()]
        return super().text_to_action(named[0] if named else text)

    def summary(self, text: str) -> str:
        """Return the row and column of the agent."""
        return self._place(self._kinds(self.text_to_observation(text)))


@register
class PlainBoardCodec(BoardCodec):
    """Codec of a board in the format of :class:`~lrl.codecs.toy_text.FrozenLakeCodec`.

    An observation reads ``row 1 column 2``, the agent's cell, followed by one line of letters separated by spaces per
    row. Actions are ``RIGHT``.
    """

    _column = 1

    @property
    def description(self) -> str:
        """Task, meaning of the letters, and actions."""
        letters = ", ".join(f"{letter} is {meaning}" for _, letter, meaning in self.board.kinds)
        return f"{self._task} {letters.replace('player', 'you')}. Actions: {', '.join(self._actions)}."

    def _action_names(self) -> tuple[str, ...]:
        return tuple(name.upper() for name in self.board.actions)

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """Write the row and column of the agent, and the letters of all cells."""
        letters, kinds = self._symbols, self._kinds(observation)
        return "\n".join([self._place(kinds), *(" ".join([letters[kind] for kind in row]) for row in kinds)])

    def text_to_observation(self, text: str) -> np.ndarray:
        """Parse the letters below the first line.

        Raises:
            ValueError: If the text is not a rectangle of letters.
        """
        return self._parse([line.replace(" ", "") for line in text.split("\n")[1:]], text)
