"""Codec for BabyAI: MiniGrid's partial view in sentences, as in GLAM (arXiv:2302.02662), and six named actions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lrl.codecs.codec import NamedActionsCodec
from lrl.registry import register

VIEW_SIZE = 7
"""Side length of the visible area in cells. The agent is in the middle of the last row and faces the first row."""
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
"""Names of MiniGrid's colours 0 to 5."""
OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
"""Names of MiniGrid's objects 0 to 10."""
DOOR_STATES = ("open", "closed", "locked")
"""Names of MiniGrid's door states 0 to 2."""
HELD_OUT = frozenset({("yellow", "box"), ("red", "key"), ("red", "door"), ("green", "ball"), ("grey", "door")})
"""Combinations of colour and type that missions of training levels do not name.

Keys, balls and boxes with these combinations still appear in training levels, as distractors; such doors do not.
"""

_WORDS = ("go", "pick", "up", "to", "open", "put", "next", "after", "then", "you", "the", "a")
MISSION_WORDS = (*_WORDS, *COLORS, *OBJECTS[4:8])
"""Words of missions. Missions with one object differ in their sets of words."""
_CELL_SIZES = (len(OBJECTS), len(COLORS), len(DOOR_STATES))
_CELL_ENDS = (len(OBJECTS), len(OBJECTS) + len(COLORS))
SYMBOLIC_SIZE = VIEW_SIZE * VIEW_SIZE * sum(_CELL_SIZES) + len(MISSION_WORDS)
"""Length of :func:`symbolic_view` without last actions."""
NO_ACTION = 6
"""Number of actions. In ``last_actions`` it stands for a turn before the start of the episode."""

_GOAL_OBJECT = re.compile(rf"((?:(?:{'|'.join(COLORS)}) )?(?:{'|'.join(OBJECTS[4:8])}))\b")
"""Matches an object in a goal, with its colour if there is one."""
_AHEAD = re.compile(r"^You see a (?:[a-z ]+ )?([a-z]+) 1 step forward$", re.MULTILINE)
"""Matches the sentence of an object directly ahead; the sentence of a place to a side contains a second number."""
_EMPTY, _WALL, _DOOR = OBJECTS.index("empty"), OBJECTS.index("wall"), OBJECTS.index("door")
_MIDDLE, _LAST = VIEW_SIZE // 2, VIEW_SIZE - 1
_AGENT = _MIDDLE * VIEW_SIZE + _LAST


@register
class BabyAICodec(NamedActionsCodec):
    """Codec for BabyAI: ``Goal: go to the red ball``, followed by one sentence per line.

    The sentences and their order are those of GLAM, see :func:`describe_view`. Each observation repeats the goal (about
    eight tokens), because the system message is fixed for a run while the goal changes with each episode. So a model,
    an expert or a data set can interpret a single observation.

    As in RL-LLM, names of actions are case-sensitive. The response format strips surrounding blanks.

    Args:
        has_expert: whether the environment has a method ``expert_action()``.
    """

    _actions = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")

    def __init__(self, has_expert: bool = True) -> None:
        self.has_expert = has_expert

    @property
    def description(self) -> str:
        """Situation of the agent and its six actions, without the goal."""
        return f"You are an agent in a room and see only what is ahead. Actions: {', '.join(self._actions)}."

    def observation_to_text(self, observation: Mapping[str, Any] | np.ndarray, context: Any = None) -> str:
        """Describe the goal and the visible objects.

        Args:
            observation: MiniGrid's dict with ``image``, uint8 ``(7, 7, 3)``, and ``mission``, a string; or a vector of
                :func:`symbolic_view`, whose mission is shown as its set of words. ``last_actions``, or their one-hot
                codes, add ``You chose turn left, go forward`` after the goal, with the newest action last.
            context: unused.

        Raises:
            ValueError: If ``image`` is not an image of MiniGrid.
        """
        if isinstance(observation, np.ndarray):
            parts = np.split(observation, [SYMBOLIC_SIZE - len(MISSION_WORDS), SYMBOLIC_SIZE])
            cells = np.split(parts[0].reshape(VIEW_SIZE, VIEW_SIZE, -1), _CELL_ENDS, axis=2)
            words = [word for word, used in zip(MISSION_WORDS, parts[1], strict=True) if used]
            image = np.stack([kind.argmax(2) for kind in cells], axis=2).astype(np.uint8)
            codes = parts[2].reshape(-1, NO_ACTION)
            last = np.where(codes.any(1), codes.argmax(1), NO_ACTION)
            observation = {"image": image, "mission": " ".join(words), "last_actions": last}
        chosen = [self._actions[last] for last in observation.get("last_actions", ()) if last != NO_ACTION]
        memory = [f"You chose {', '.join(chosen)}"] if chosen else []
        return "\n".join([f"Goal: {observation['mission']}", *memory, *describe_view(observation["image"])])

    def summary(self, text: str) -> str:
        """Summarize where the first object of the goal is: ``red ball 2 left 1 forward``.

        The summary is ``carry red ball`` if the agent carries it, and ``no red ball`` if it is not visible. If several
        objects match, the nearest one counts. A summary has at most seven words, which leaves three of the ten words
        of a short reasoning to the action.
        """
        goal, *lines = text.split("\n")
        match = _GOAL_OBJECT.search(goal)
        if match is None:
            return lines[0] if lines else goal
        name = match.group(1)
        if any(re.fullmatch(rf"You carry a (?:.*\b)?{name}", line) for line in lines):
            return f"carry {name}"
        places = [found.group(1) for line in lines if (found := re.fullmatch(rf"You see a .*\b{name} (.+)", line))]
        if not places:
            return f"no {name}"
        steps = [re.findall(r"(\d+) steps? (\w+)", place) for place in places]
        nearest = min(steps, key=lambda place: sum(int(number) for number, _ in place))
        return " ".join([name, *(f"{number} {direction}" for number, direction in nearest)])

    def ahead(self, text: str) -> str:
        """Name the object in the cell directly ahead, without its colour: ``ball``, ``wall`` or ``nothing``."""
        match = _AHEAD.search(text)
        return match.group(1) if match else "nothing"


def symbolic_view(image: np.ndarray, mission: str, last_actions: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """Encode an observation of MiniGrid for networks.

    Args:
        image: object, colour and state of each cell, uint8 ``(column, row, 3)``.
        mission: the task in words.
        last_actions: the last actions, each :data:`NO_ACTION` before the first turn of the episode.

    Returns:
        Object, colour and state of each cell, each one-hot, then for each of :data:`MISSION_WORDS` whether the mission
        contains it, then each of the last actions, one-hot; uint8 ``(SYMBOLIC_SIZE + 6 * len(last_actions),)``.
    """
    cells = [np.eye(size, dtype=np.uint8)[image[:, :, index]] for index, size in enumerate(_CELL_SIZES)]
    words = np.isin(MISSION_WORDS, mission.replace(",", "").split())
    last = np.asarray(last_actions).reshape(-1, 1) == np.arange(NO_ACTION)
    return np.concatenate([np.concatenate(cells, axis=2).ravel(), words, last.ravel()]).astype(np.uint8)


def describe_view(image: np.ndarray) -> list[str]:
    """Describe the carried object and all visible objects in sentences, in the order of GLAM.

    1. The carried object, which MiniGrid draws on the agent's own cell.
    2. Walls straight ahead, to the left and to the right, unless another object is in between.
    3. All other visible objects, column by column from left to right, each from far to near. A door includes its
       state. GLAM writes ``a open red door``, because its branch for ``an`` is never reached.

    Args:
        image: object, colour and state of each cell, uint8 ``(column, row, 3)``, where ``(3, 6)`` is the agent's cell.

    Raises:
        ValueError: If the shape is different or a cell contains an unknown object.
    """
    if image.shape != (VIEW_SIZE, VIEW_SIZE, 3):
        raise ValueError(f"observation.image has shape {image.shape}; it must be {(VIEW_SIZE, VIEW_SIZE, 3)}.")
    cells = image.tobytes()
    kinds = cells[::3]
    try:
        texts = [] if kinds[_AGENT] <= _EMPTY else [f"You carry a {_OBJECT_TEXTS[cells[3 * _AGENT : 3 * _AGENT + 3]]}"]
        texts += [text for line in _WALL_LINES if (text := _describe_wall(kinds, line))]
        texts += [
            f"You see a {_OBJECT_TEXTS[cells[3 * index : 3 * index + 3]]} {_PLACE_TEXTS[index]}"
            for index, kind in enumerate(kinds)
            if kind > _WALL and index != _AGENT
        ]
    except KeyError as error:
        cell = list(error.args[0])
        raise ValueError(f"observation.image contains the cell {cell}, which is not an object of MiniGrid.") from None
    return texts


def _describe_wall(kinds: bytes, line: tuple[tuple[int, str], ...]) -> str:
    """Return the sentence of a wall that is the first object in a line of cells; empty for any other object."""
    for index, sentence in line:
        if kinds[index] > _EMPTY:
            return sentence if kinds[index] == _WALL else ""
    return ""


def _describe_place(column: int, row: int) -> str:
    """Describe a cell relative to the agent's: sideways first, then forward, without zeros."""
    side, forward = column - _MIDDLE, _LAST - row
    steps = ((abs(side), "right" if side > 0 else "left"), (forward, "forward"))
    return " and ".join(
        f"{number} step{'s' if number > 1 else ''} {direction}" for number, direction in steps if number
    )


def _describe_object(kind: int, color: int, state: int) -> str:
    text = f"{COLORS[color]} {OBJECTS[kind]}"
    return f"{DOOR_STATES[state]} {text}" if kind == _DOOR else text


_PLACE_TEXTS = [_describe_place(column, row) for column in range(VIEW_SIZE) for row in range(VIEW_SIZE)]
"""Text of each cell by its index ``column * 7 + row``."""
_OBJECT_TEXTS = {
    bytes((kind, color, state)): _describe_object(kind, color, state)
    for kind in range(_WALL + 1, len(OBJECTS))
    for color in range(len(COLORS))
    for state in range(len(DOOR_STATES) if kind == _DOOR else 1)
}
"""Text of each object by the three bytes of its cell."""
_WALL_LINES = [
    tuple((index, f"You see a wall {_PLACE_TEXTS[index]}") for index in line)
    for line in (
        [_MIDDLE * VIEW_SIZE + row for row in reversed(range(_LAST))],
        [column * VIEW_SIZE + _LAST for column in reversed(range(_MIDDLE))],
        [column * VIEW_SIZE + _LAST for column in range(_MIDDLE + 1, VIEW_SIZE)],
    )
]
"""Cells ahead, to the left and to the right, from near to far, each with the sentence of a wall there."""
