"""Levels of BabyAI-Text with one task and many objects in one room, or in two rooms with a door between them.

They follow GLAM (arXiv:2302.02662, ``MixedTrainLocal`` and ``MixedTestLocal``) and RL-LLM (one level per task), and use
MiniGrid from PyPI. They are not MiniGrid's own levels: its ``BabyAI-GoTo-v0`` is a maze of nine rooms.

Departures from the original:

1. The task of a mixed level is sampled at each reset, from the seed of the reset. The original samples it once per
   environment, so a mixed level needs many environments.
2. The action ``done``, which has no effect, is omitted.
3. An episode that ends with a success at the time limit is terminated but not truncated.
"""

from __future__ import annotations

import contextlib
import functools
import string
from collections.abc import Sequence
from typing import Any, Literal, SupportsInt, get_args

import numpy as np
from gymnasium import spaces
from minigrid.core.roomgrid import RoomGrid
from minigrid.core.world_object import Ball, Box, Key, WorldObj
from minigrid.envs.babyai.core.roomgrid_level import RejectSampling, RoomGridLevel
from minigrid.envs.babyai.core.verifier import (
    AfterInstr,
    BeforeInstr,
    GoToInstr,
    Instr,
    ObjDesc,
    OpenInstr,
    PickupInstr,
    PutNextInstr,
)
from minigrid.minigrid_env import MiniGridEnv
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

from lrl.codecs.babyai import COLORS, HELD_OUT, NO_ACTION, SYMBOLIC_SIZE, VIEW_SIZE, symbolic_view

# The partial view of a MiniGrid agent. ``MiniGridEnv.gen_obs`` copies a grid of objects, rotates it up to four times
# and visits each cell several times. The code below visits each cell once, which takes a quarter of the time of
# ``gen_obs`` and halves the time of a step.

FORWARD = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Step forward in directions 0 to 3, as ``(column, row)``."""

_EMPTY, _WALL = bytes((1, 0, 0)), bytes((2, 5, 0))
_MIDDLE, _LAST = VIEW_SIZE // 2, VIEW_SIZE - 1
_ALL = (1 << VIEW_SIZE) - 1

Cell = WorldObj | bytes | None
"""An object, None for an empty cell, or :data:`_WALL` for a cell outside of the grid."""


def _offsets(forward: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Return the grid offsets of the visible cells, one list per row from near to far, each from left to right."""
    (fx, fy), (rx, ry) = forward, (-forward[1], forward[0])
    sides = range(-_MIDDLE, VIEW_SIZE - _MIDDLE)
    return [[(ahead * fx + side * rx, ahead * fy + side * ry) for side in sides] for ahead in range(VIEW_SIZE)]


_OFFSETS = [_offsets(forward) for forward in FORWARD]
"""Grid offsets of the visible cells by the agent's direction."""


def agent_view(env: MiniGridEnv) -> np.ndarray:
    """Compute the image of a MiniGrid environment with view size 7 and opaque walls.

    Returns:
        Object, colour and state of each visible cell, uint8 ``(column, row, 3)``, as ``observation["image"]``.
    """
    grid, x, y = env.grid, int(env.agent_pos[0]), int(env.agent_pos[1])
    width, height, cells = grid.width, grid.height, grid.grid
    image = bytearray(VIEW_SIZE * VIEW_SIZE * 3)
    visible = 1 << _MIDDLE  # bit i: whether cell i of the current row is visible
    for ahead, offsets in enumerate(_OFFSETS[env.agent_dir]):
        row: list[Cell] = [
            cells[(y + dy) * width + x + dx] if 0 <= x + dx < width and 0 <= y + dy < height else _WALL
            for dx, dy in offsets
        ]
        visible, transparent = _spread_sideways(row, visible)
        for side, cell in enumerate(row):
            if visible >> side & 1:
                start = 3 * (side * VIEW_SIZE + _LAST - ahead)
                image[start : start + 3] = _encode(cell)
        visible = (transparent | transparent << 1 | transparent >> 1) & _ALL
    carried = 3 * (_MIDDLE * VIEW_SIZE + _LAST)
    image[carried : carried + 3] = _encode(env.carrying)
    return np.frombuffer(image, dtype=np.uint8).reshape(VIEW_SIZE, VIEW_SIZE, 3)


def _spread_sideways(row: list[Cell], visible: int) -> tuple[int, int]:
    """Extend the visible cells of a row to both sides, up to and including the first opaque cell.

    Args:
        row: cells of a row from left to right.
        visible: bit ``i`` is whether cell ``i`` is visible from the previous row.

    Returns:
        Bits of all visible cells, and of the visible cells that are transparent.
    """
    clear = sum(1 << side for side, cell in enumerate(row) if _is_transparent(cell))
    while True:
        transparent = visible & clear
        extended = (visible | transparent << 1 | transparent >> 1) & _ALL
        if extended == visible:
            return visible, transparent
        visible = extended


def _is_transparent(cell: Cell) -> bool:
    return cell is None or (not isinstance(cell, bytes) and cell.see_behind())


def _encode(cell: Cell) -> bytes:
    if cell is None:
        return _EMPTY
    return cell if isinstance(cell, bytes) else bytes(cell.encode())


# Placement of the agent and objects, by sampling until the agent can reach all objects. A cell of a room is the integer
# ``y * size + x``, and a set of cells is an integer with one bit per cell. MiniGrid builds a grid of objects for each
# attempt, which is slow: with 16 objects in a room of 8 x 8 only one attempt in a thousand succeeds.


def place_agent_first(rng: np.random.Generator, size: int, num_objects: int) -> tuple[int, list[int]]:
    """Sample the agent's cell, then cells of objects that are not next to it.

    Args:
        rng: random number generator.
        size: side length of the room in cells.
        num_objects: number of objects.

    Returns:
        The agent's cell and the cells of the objects.
    """
    floor = _floor(size)
    while True:
        agent = int(floor[rng.integers(len(floor))])
        objects = rng.permutation(_distant_floor(size, agent))[:num_objects].tolist()
        if all_reachable(size, agent, objects):
            return agent, objects


def place_agent_last(
    rng: np.random.Generator, size: int, num_objects: int, door: int, avoided: int | None
) -> tuple[int, int, list[int]]:
    """Sample cells of objects, then the agent's cell and direction such that no object is in front of it.

    Args:
        rng: random number generator.
        size: side length of the room in cells.
        num_objects: number of objects.
        door: cell of a door in the wall that must be reachable.
        avoided: cell that has no object on it or next to it; None for no such cell.

    Returns:
        The agent's cell, its direction and the cells of the objects.
    """
    floor = _floor(size)
    while True:
        candidates = floor if avoided is None else _distant_floor(size, avoided)
        objects = rng.permutation(candidates)[:num_objects].tolist()
        occupied = {door, *objects}
        agent, direction = int(floor[rng.integers(len(floor))]), int(rng.integers(4))
        while agent in occupied or agent + FORWARD[direction][0] + size * FORWARD[direction][1] in occupied:
            agent, direction = int(floor[rng.integers(len(floor))]), int(rng.integers(4))
        if all_reachable(size, agent, [door, *objects]):
            return agent, direction, objects


def all_reachable(size: int, agent: int, objects: list[int]) -> bool:
    """Return whether the agent can move next to all objects, without moving over any of them.

    Args:
        size: side length of the room in cells.
        agent: the agent's cell.
        objects: the cells of the objects.
    """
    occupied = sum(1 << cell for cell in objects)
    free = _floor_bits(size) & ~occupied
    reached, extended = 0, 1 << agent
    while extended != reached:
        reached = extended
        extended = (reached | _neighbours(reached, size)) & free
    return not occupied & ~_neighbours(reached, size)


def _neighbours(cells: int, size: int) -> int:
    return cells << 1 | cells >> 1 | cells << size | cells >> size


@functools.cache
def _floor(size: int) -> np.ndarray:
    """Return the cells that are not walls, int64 ``(cell,)``."""
    return np.array([y * size + x for y in range(1, size - 1) for x in range(1, size - 1)])


@functools.cache
def _floor_bits(size: int) -> int:
    return sum(1 << cell for cell in _floor(size).tolist())


@functools.cache
def _distant_floor(size: int, cell: int) -> np.ndarray:
    """Return the floor cells that are neither ``cell`` nor next to it, int64 ``(cell,)``."""
    floor = _floor(size)
    distance = abs(floor // size - cell // size) + abs(floor % size - cell % size)
    return floor[distance > 1]


Task = Literal["goto", "pickup", "open", "putnext", "pickup_seq_goto"]
"""Task of a mission: go to A; pick up A; open the locked door between two rooms with its key; put A next to B; or pick
up A, then go to B."""
Split = Literal["train", "test"]
"""Objects that missions name: none of :data:`HELD_OUT` for ``train``, only those for ``test``."""

_DOOR_COLORS: dict[str, list[str]] = {"train": ["yellow", "green", "blue", "purple"], "test": ["red", "grey"]}
_OBJECT_CLASSES = {"key": Key, "ball": Ball, "box": Box}
_OBJECT_TYPES = tuple(_OBJECT_CLASSES)
_TURN_LEFT = 0
_MISSION_CHARACTERS = string.ascii_lowercase + " ,"


class LocalLevel(RoomGridLevel):
    """Environment of the levels ``lrl/BabyAI-...Local-v0``.

    The reward of a success is ``1 - 0.9 * steps / max_steps``, all other rewards are 0. ``info["success"]`` is whether
    the mission is accomplished.

    Args:
        tasks: tasks, one of which is sampled at each reset.
        split: the objects that missions name.
        num_distractors: number of objects that the mission does not name; objects may have the same colour and type.
            If it is a list, one of its numbers is sampled at each reset.
        room_size: side length of a room in cells, including walls; at least 5.
        max_steps: time limit; None selects ``room_size**2`` steps for ``goto`` and ``pickup``, and twice as many for
            other tasks: 64 and 128 in rooms of size 8.
        symbolic: observations are the vectors of :func:`symbolic_view`, for networks, instead of MiniGrid's dicts.
        last_actions: number of last actions that observations contain, as a memory for policies without one.
        render_mode: render mode of MiniGrid; None disables rendering.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        tasks: Sequence[Task] = get_args(Task),
        split: Split = "train",
        num_distractors: int | Sequence[int] = 8,
        room_size: int = 8,
        max_steps: int | None = None,
        symbolic: bool = False,
        last_actions: int = 0,
        render_mode: str | None = None,
    ) -> None:
        distractors = (num_distractors,) if isinstance(num_distractors, int) else tuple(num_distractors)
        _validate(tasks, split, distractors, room_size, last_actions)
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1, or null.")
        self.tasks, self.split, self.distractors = tuple(tasks), split, distractors
        self.num_distractors = distractors[0]
        """Number of distractors in the current episode."""
        self.task: Task = self.tasks[0]
        """Task of the current episode."""
        super().__init__(room_size=room_size, num_rows=1, num_cols=1, max_steps=max_steps, render_mode=render_mode)
        self.action_space = spaces.Discrete(6)
        self.symbolic = symbolic
        self._last_actions = np.full(last_actions, NO_ACTION)
        """The last actions, the newest one last."""
        parts: dict[str, spaces.Space[Any]] = {
            "image": spaces.Box(0, 255, (VIEW_SIZE, VIEW_SIZE, 3), np.uint8),
            "direction": spaces.Discrete(4),
            "mission": spaces.Text(max_length=128, charset=_MISSION_CHARACTERS),
        }
        if last_actions:
            parts["last_actions"] = spaces.MultiDiscrete([NO_ACTION + 1] * last_actions)
        size = SYMBOLIC_SIZE + last_actions * NO_ACTION
        self.observation_space = spaces.Box(0, 1, (size,), np.uint8) if symbolic else spaces.Dict(parts)
        self._bot: BabyAIBot | None = None
        self._bot_action = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sample a task and a room, both determined by ``seed``, and start an episode."""
        self._bot = None
        self._last_actions = np.full(len(self._last_actions), NO_ACTION)
        return super().reset(seed=seed, options=options)

    def step(self, action: SupportsInt) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take an action from 0 to 5."""
        action = int(action)
        self._last_actions = np.append(self._last_actions, action)[1:]
        observation, native_reward, terminated, truncated, _ = super().step(action)
        reward = float(native_reward)
        truncated = truncated and not terminated
        if self._bot is not None and not (terminated or truncated):
            self._bot_action = self._query_bot(action)
        return observation, reward, terminated, truncated, {"success": terminated and reward > 0}

    def gen_obs(self) -> Any:
        """Return MiniGrid's dict of ``image``, uint8 ``(7, 7, 3)``, ``direction`` and ``mission``, or a vector."""
        image, last = agent_view(self), self._last_actions.copy()
        if self.symbolic:
            return symbolic_view(image, self.mission, last)
        observation = {"image": image, "direction": self.agent_dir, "mission": self.mission}
        return observation | {"last_actions": last} if len(last) else observation

    def expert_action(self) -> int:
        """Return the action, from 0 to 5, of MiniGrid's bot in the current state.

        The first call in an episode creates the bot, so it should be made before the first step. From then on the bot
        takes account of every action, including those that it did not suggest. If it finds no plan, the action is to
        turn left.
        """
        if self._bot is None:
            self._bot_action = self._query_bot(None)
        return self._bot_action

    def _query_bot(self, action: int | None) -> int:
        """Return the bot's action after ``action``.

        If the bot's plan fails, for example because a box was opened, a new bot plans once.
        """
        for _ in range(2):
            if self._bot is None:
                self._bot, action = BabyAIBot(self), None
            with contextlib.suppress(AssertionError, DisappearedBoxError):
                bot_action: Any = self._bot.replan(action)
                if bot_action != self.actions.done:
                    return int(bot_action)
            self._bot = None
        return _TURN_LEFT

    def _gen_grid(self, width: int, height: int) -> None:
        """Sample the task, then rooms until the mission is valid.

        A mission is invalid, for example, if two objects that must be put next to each other already are. This loop
        replaces MiniGrid's, which prints a line for each attempt.
        """
        self.task = self._rand_elem(self.tasks)
        if len(self.distractors) > 1:
            self.num_distractors = self._rand_elem(self.distractors)
        self.num_cols = 2 if self.task == "open" else 1
        self.width = (self.room_size - 1) * self.num_cols + 1
        while True:
            try:
                RoomGrid._gen_grid(self, self.width, self.height)
                self.gen_mission()
                self.validate_instrs(self.instrs)
                break
            except RejectSampling:
                continue
        self.surface = self.mission = self.instrs.surface(self)

    def gen_mission(self) -> None:
        """Place the agent and the objects, and create the instruction."""
        if self.task == "open":
            self.instrs: Instr = self._open()
            return
        first, *others = self._place_objects(1 if self.task in ("goto", "pickup") else 2)
        if self.task == "goto":
            self.instrs = GoToInstr(first)
        elif self.task == "pickup":
            self.instrs = PickupInstr(first)
        elif self.task == "putnext":
            self.instrs = PutNextInstr(first, others[0])
        elif self._rand_elem(["before", "after"]) == "before":
            self.instrs = BeforeInstr(PickupInstr(first), GoToInstr(others[0]))
        else:
            self.instrs = AfterInstr(GoToInstr(others[0]), PickupInstr(first))

    def _open(self) -> Instr:
        color = self._rand_elem(_DOOR_COLORS[self.split])
        locked_room, size = int(self._rand_int(0, 2)), self.room_size
        room = 1 - locked_room
        _, (x, y) = self.add_door(locked_room, 0, 2 * locked_room, color, locked=True)
        door = int(y) * size + int(x) - room * (size - 1)
        # MiniGrid, and therefore the original, samples objects while the agent is still at its initial cell, the centre
        # of the right room, and places no object on or next to that cell.
        avoided = size // 2 * (size + 1) if room else None
        agent, self.agent_dir, cells = place_agent_last(self.np_random, size, self.num_distractors + 1, door, avoided)
        self._put_objects(room, agent, cells, [(color, "key"), *self._sample_objects(self.num_distractors)])
        named_color = color if self.split == "test" else self._rand_elem([None, color])
        return OpenInstr(ObjDesc("door", named_color))

    def _place_objects(self, num_targets: int) -> list[ObjDesc]:
        """Place the agent and the objects, and return ``num_targets`` of them as targets.

        Colours and types are independent of positions, so the two are sampled separately, each until it is valid.
        """
        num_objects = self.num_distractors + num_targets
        while True:
            objects = self._sample_objects(num_objects)
            targets = self._sample_targets(objects, num_targets)
            if all((target in HELD_OUT) == (self.split == "test") for target in targets):
                break
        agent, cells = place_agent_first(self.np_random, self.room_size, num_objects)
        self.agent_dir = int(self._rand_int(0, 4))
        self._put_objects(0, agent, cells, objects)
        return [ObjDesc(kind, color) for color, kind in targets]

    def _sample_objects(self, num_objects: int) -> list[tuple[str, str]]:
        """Sample the colour and type of each object."""
        colors = self.np_random.integers(len(COLORS), size=num_objects).tolist()
        kinds = self.np_random.integers(len(_OBJECT_TYPES), size=num_objects).tolist()
        return [(COLORS[color], _OBJECT_TYPES[kind]) for color, kind in zip(colors, kinds, strict=True)]

    def _sample_targets(self, objects: list[tuple[str, str]], num_targets: int) -> list[tuple[str, str]]:
        """Sample one or two objects; both have the same colour and type only if two such objects exist."""
        first = self._rand_elem(objects)
        if num_targets == 1:
            return [first]
        second = self._rand_elem(objects)
        while second == first and objects.count(first) == 1:
            second = self._rand_elem(objects)
        return [first, second]

    def _put_objects(self, room: int, agent: int, cells: list[int], objects: list[tuple[str, str]]) -> None:
        """Put the agent and the objects on cells of a room, where a cell is ``y * room_size + x``."""
        left, size = room * (self.room_size - 1), self.room_size
        self.agent_pos = (left + agent % size, agent // size)
        for cell, (color, kind) in zip(cells, objects, strict=True):
            world_object = _OBJECT_CLASSES[kind](color)
            self.put_obj(world_object, left + cell % size, cell // size)
            self.get_room(room, 0).objs.append(world_object)


def _validate(tasks: Sequence[str], split: str, distractors: Sequence[int], room_size: int, last_actions: int) -> None:
    known = get_args(Task)
    if isinstance(tasks, str) or not tasks or set(tasks) - set(known):
        raise ValueError(f"tasks is {tasks!r}; it must be a non-empty list of {', '.join(known)}.")
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(get_args(Split))}.")
    if room_size < 5:
        raise ValueError(f"room_size is {room_size}; it must be at least 5.")
    if type(last_actions) is not int or last_actions < 0:
        raise ValueError(f"last_actions is {last_actions}; it must be an integer of at least 0.")
    most = (room_size - 2) ** 2 // 2 - 2
    if not distractors:
        raise ValueError("num_distractors is []; it must be a number or a non-empty list of numbers.")
    for number in distractors:
        if type(number) is not int or not 0 <= number <= most:
            raise ValueError(
                f"num_distractors is {number}; it must be an integer from 0 to {most} in a room of size {room_size}."
            )
