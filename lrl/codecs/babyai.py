"""BabyAI-Text: MiniGrid's view of a room in sentences, after GLAM (arXiv:2302.02662), and six actions by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lrl.codecs.codec import InvalidActionError, TextCodec

VIEW = 7
"""Cells per side of what the agent sees; it stands in the middle of the last row and looks towards the first."""
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
"""MiniGrid's colours 0 to 5."""
OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
"""MiniGrid's objects 0 to 10."""
DOOR_STATES = ("open", "closed", "locked")
"""MiniGrid's states 0 to 2 of a door."""

_NAMED = re.compile(rf"((?:(?:{'|'.join(COLORS)}) )?(?:{'|'.join(OBJECTS[4:8])}))\b")
"""An object in a goal, with its colour where it has one."""
_EMPTY, _WALL, _DOOR = OBJECTS.index("empty"), OBJECTS.index("wall"), OBJECTS.index("door")
_MIDDLE, _LAST = VIEW // 2, VIEW - 1
_AGENT = _MIDDLE * VIEW + _LAST


class BabyAICodec(TextCodec):
    """``Goal: go to the red ball``, then one sentence per line; ``turn left`` and five other actions.

    The sentences and their order are GLAM's, see :func:`sentences`. The goal is part of each observation: the system
    text belongs to a run, and a goal to an episode; whoever reads one observation - a model, an expert, a data set -
    knows what is to be done, for about eight tokens a turn.

    Actions are matched exactly and with their case, as in RL-LLM; blanks around them are the response format's.

    Args:
        has_expert: whether the environment can be asked what an expert would do (``expert_action()``).
    """

    _actions = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")
    _index = {text: index for index, text in enumerate(_actions)}

    def __init__(self, has_expert: bool = True) -> None:
        self.has_expert = has_expert

    @property
    def description(self) -> str:
        """Where the agent is, and the six actions; the goal stands in each observation."""
        return f"You are an agent in a room and see only what is ahead. Actions: {', '.join(self._actions)}."

    @property
    def action_texts(self) -> tuple[str, ...]:
        """turn left, turn right, go forward, pick up, drop, toggle: actions 0 to 5."""
        return self._actions

    def observation_to_text(self, observation: Any, context: Any = None) -> str:
        """The goal and what is seen.

        Args:
            observation: MiniGrid's dict; ``image`` is uint8 ``(7, 7, 3)``, ``mission`` a string.
            context: not needed.

        Raises:
            ValueError: the image is not one of MiniGrid's.
        """
        return "\n".join((f"Goal: {observation['mission']}", *sentences(observation["image"])))

    def gist(self, text: str) -> str:
        """Where the object is that the goal names first: ``red ball 2 left 1 forward``.

        ``carry red ball`` where it is carried, ``no red ball`` where it is not in sight. At most seven words, so that
        there are three left for the action. Of several that look the same, the nearest counts.
        """
        goal, *lines = text.split("\n")
        named = _NAMED.search(goal)
        if named is None:
            return lines[0] if lines else goal
        name = named.group(1)
        if any(re.fullmatch(rf"You carry a .*\b{name}", line) or line == f"You carry a {name}" for line in lines):
            return f"carry {name}"
        places = [found.group(1) for line in lines if (found := re.fullmatch(rf"You see a .*\b{name} (.+)", line))]
        if not places:
            return f"no {name}"
        parts = [re.findall(r"(\d+) steps? (\w+)", place) for place in places]
        nearest = min(parts, key=lambda part: sum(int(number) for number, _ in part))
        return " ".join([name, *(f"{number} {direction}" for number, direction in nearest)])

    def text_to_action(self, text: str) -> int:
        """The index of an action's name; nothing but the exact name counts."""
        action = self._index.get(text)
        if action is None:
            raise InvalidActionError(f"the action must be one of {', '.join(self._actions)}")
        return action

    def action_to_text(self, action: Any) -> str:
        """The name of action 0 to 5."""
        return self._actions[int(action)]


def sentences(image: np.ndarray) -> list[str]:
    """What an agent carries and sees, one sentence each, in GLAM's order.

    1. what it carries: MiniGrid draws it into the agent's own cell;
    2. walls, only straight forward, left and right, and only if nothing lies between;
    3. everything else that is visible, column by column from left to right, each from far to near. A door has its
       state: ``a open red door`` is the original's spelling (its branch with ``an`` is never reached).

    Args:
        image: uint8 ``(column, row, 3)`` of object, colour and state; ``(3, 6)`` is the agent's cell.

    Raises:
        ValueError: another shape, or a cell that means nothing.
    """
    if image.shape != (VIEW, VIEW, 3):
        raise ValueError(f"observation.image has shape {image.shape}; it must be {(VIEW, VIEW, 3)}.")
    cells = image.tobytes()
    kinds = cells[::3]
    try:
        texts = [] if kinds[_AGENT] <= _EMPTY else [f"You carry a {_THINGS[cells[3 * _AGENT : 3 * _AGENT + 3]]}"]
        texts += [text for line in _LINES if (text := _wall(kinds, line))]
        texts += [
            f"You see a {_THINGS[cells[3 * index : 3 * index + 3]]} {_PLACES[index]}"
            for index, kind in enumerate(kinds)
            if kind > _WALL and index != _AGENT
        ]
    except KeyError as error:
        cell = list(error.args[0])
        raise ValueError(f"observation.image holds the cell {cell}, which is no object of MiniGrid.") from None
    return texts


def _wall(kinds: bytes, line: tuple[tuple[int, str], ...]) -> str:
    """The sentence of the wall that is the first thing in a line of cells; empty where something else is."""
    for index, sentence in line:
        if kinds[index] > _EMPTY:
            return sentence if kinds[index] == _WALL else ""
    return ""


def _steps(number: int, direction: str) -> str:
    return f"{number} step{'s' if number > 1 else ''} {direction}"


def _place(column: int, row: int) -> str:
    """Where a cell is, seen from the agent's: to the side first, then forward; what is zero is left out."""
    side, forward = column - _MIDDLE, _LAST - row
    parts = [_steps(abs(side), "right" if side > 0 else "left")] if side else []
    return " and ".join([*parts, _steps(forward, "forward")] if forward else parts)


def _thing(kind: int, color: int, state: int) -> str:
    thing = f"{COLORS[color]} {OBJECTS[kind]}"
    return f"{DOOR_STATES[state]} {thing}" if kind == _DOOR else thing


_PLACES = [_place(column, row) for column in range(VIEW) for row in range(VIEW)]
"""By index of a cell, which is ``column * 7 + row``."""
_THINGS = {
    bytes((kind, color, state)): _thing(kind, color, state)
    for kind in range(_WALL + 1, len(OBJECTS))
    for color in range(len(COLORS))
    for state in range(len(DOOR_STATES) if kind == _DOOR else 1)
}
"""By the three bytes of a cell."""
_LINES = [
    tuple((index, f"You see a wall {_PLACES[index]}") for index in line)
    for line in (
        [_MIDDLE * VIEW + row for row in reversed(range(_LAST))],
        [column * VIEW + _LAST for column in reversed(range(_MIDDLE))],
        [column * VIEW + _LAST for column in range(_MIDDLE + 1, VIEW)],
    )
]
"""Forward, left, right: the cells from near to far, with the sentence of a wall in each."""
