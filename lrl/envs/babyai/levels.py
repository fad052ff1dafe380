"""BabyAI-Text's levels on PyPI's MiniGrid: one room (two with a door between them), one task, many objects.

After GLAM (arXiv:2302.02662, ``MixedTrainLocal`` and ``MixedTestLocal``) and RL-LLM (one level per task). MiniGrid's
own ``BabyAI-GoTo-v0`` is a maze of nine rooms.

Departures from the original:

1. the task of a mixed level is drawn at each reset, from the reset's seed; there it is drawn once, when the environment
   is made, so a mixed level needs many environments to be mixed;
2. the action ``done``, which does nothing, is left out: the text has no word for it;
3. an episode that ends with a success at the time limit is terminated and not truncated as well.
"""

from __future__ import annotations

import contextlib
import string
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces
from minigrid.core.roomgrid import RoomGrid
from minigrid.core.world_object import Ball, Box, Key
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
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

from lrl.codecs.babyai import COLORS, VIEW_SIZE
from lrl.envs.babyai.placement import draw_agent_first, draw_agent_last
from lrl.envs.babyai.view import view

Task = Literal["goto", "pickup", "open", "putnext", "pickup_seq_goto"]
"""What has to be done: go to A; pick up A; open the locked door between two rooms with the key that lies about; put A
next to B; pick up A, then go to B."""
Split = Literal["train", "test"]
"""Whether missions name none of :data:`HELD_OUT`, or nothing else."""

HELD_OUT = frozenset({("yellow", "box"), ("red", "key"), ("red", "door"), ("green", "ball"), ("grey", "door")})
"""Colour and type of what no mission of a training level names; it lies about in all levels."""

_DOOR_COLORS: dict[str, list[str]] = {"train": ["yellow", "green", "blue", "purple"], "test": ["red", "grey"]}
_KIND_CLASSES = {"key": Key, "ball": Ball, "box": Box}
_KINDS = tuple(_KIND_CLASSES)
_TURN_LEFT = 0
_MISSION_LETTERS = string.ascii_lowercase + " ,"


class LocalLevel(RoomGridLevel):
    """One of the levels ``lrl/BabyAI-...Local-v0``.

    At most 64 steps per room and object to go to: 64 for ``goto`` and ``pickup``, else 128. The reward of a success is
    ``1 - 0.9 * steps / max_steps``, else 0. ``info["success"]`` says whether the mission is accomplished.

    Args:
        tasks: one of them is drawn at each reset.
        split: which objects missions name.
        num_distractors: objects beside those that the mission needs; some may look the same. Of several numbers one is
            drawn at each reset.
        room_size: cells per side, walls included.
        max_steps: None takes the number above.
        render_mode: as in MiniGrid; None draws nothing.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        tasks: Sequence[Task] = get_args(Task),
        split: Split = "train",
        num_distractors: int | Sequence[int] = 8,
        room_size: int = 8,
        max_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        distractors = (num_distractors,) if isinstance(num_distractors, int) else tuple(num_distractors)
        _check(tasks, split, distractors, room_size)
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1, or null.")
        self.tasks, self.split, self.distractors = tuple(tasks), split, distractors
        self.num_distractors = distractors[0]
        """Of the running episode."""
        self.task: Task = self.tasks[0]
        """Of the running episode."""
        super().__init__(room_size=room_size, num_rows=1, num_cols=1, max_steps=max_steps, render_mode=render_mode)
        self.action_space = spaces.Discrete(6)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (VIEW_SIZE, VIEW_SIZE, 3), np.uint8),
                "direction": spaces.Discrete(4),
                "mission": spaces.Text(max_length=128, charset=_MISSION_LETTERS),
            }
        )
        self._bot: BabyAIBot | None = None
        self._advice = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a task and a room; both follow from ``seed``."""
        self._bot = None
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take action 0 to 5."""
        action = int(action)
        observation, paid, terminated, truncated, _ = super().step(action)
        reward = float(paid)
        truncated = truncated and not terminated
        if self._bot is not None and not (terminated or truncated):
            self._advice = self._ask(action)
        return observation, reward, terminated, truncated, {"success": terminated and reward > 0}

    def gen_obs(self) -> dict[str, Any]:
        """MiniGrid's observation: ``image`` uint8 ``(7, 7, 3)``, ``direction`` 0 to 3, ``mission``."""
        return {"image": view(self), "direction": self.agent_dir, "mission": self.mission}

    def expert_action(self) -> int:
        """What MiniGrid's bot would do now: an action from 0 to 5.

        The bot plans from where it is first asked in an episode, so ask at its start; from then on it follows every
        action that is taken, its own or not. Where it can think of nothing, it turns left until time is up.
        """
        if self._bot is None:
            self._advice = self._ask(None)
        return self._advice

    def _ask(self, action: int | None) -> int:
        """The bot's advice after ``action``. Where its plan fails - somebody opened a box - it makes a new one."""
        for _ in range(2):
            if self._bot is None:
                self._bot, action = BabyAIBot(self), None
            with contextlib.suppress(AssertionError, DisappearedBoxError):
                advice: Any = self._bot.replan(action)
                if advice != self.actions.done:
                    return int(advice)
            self._bot = None
        return _TURN_LEFT

    # -- how a level is made ----------------------------------------------------------------------------------------

    def _gen_grid(self, width: int, height: int) -> None:
        """Draw the task, then rooms until one will do.

        MiniGrid's own loop prints each one that does not: it may not ask to put things together that already are.
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
        """Fill the rooms and name the task."""
        makers = {
            "goto": self._goto,
            "pickup": self._pickup,
            "open": self._open,
            "putnext": self._putnext,
            "pickup_seq_goto": self._pickup_seq_goto,
        }
        self.instrs: Instr = makers[self.task]()

    def _goto(self) -> Instr:
        (named,) = self._scatter(1)
        return GoToInstr(named)

    def _pickup(self) -> Instr:
        (named,) = self._scatter(1)
        return PickupInstr(named)

    def _putnext(self) -> Instr:
        first, second = self._scatter(2)
        return PutNextInstr(first, second)

    def _pickup_seq_goto(self) -> Instr:
        first, second = self._scatter(2)
        if self._rand_elem(["before", "after"]) == "before":
            return BeforeInstr(PickupInstr(first), GoToInstr(second))
        return AfterInstr(GoToInstr(second), PickupInstr(first))

    def _open(self) -> Instr:
        color = self._rand_elem(_DOOR_COLORS[self.split])
        locked, size = int(self._rand_int(0, 2)), self.room_size
        own = 1 - locked
        _, (x, y) = self.add_door(locked, 0, 2 * locked, color, locked=True)
        left = own * (size - 1)
        # MiniGrid, and so the original, keeps objects away from where the agent stands before it is placed.
        shunned = size // 2 * (size + 1) if own else None
        number = self.num_distractors + 1
        cell, self.agent_dir, spots = draw_agent_last(
            self.np_random, size, number, int(y) * size + int(x) - left, shunned
        )
        self._put(own, cell, spots, [(color, "key"), *self._looks(self.num_distractors)])
        named = color if self.split == "test" else self._rand_elem([None, color])
        return OpenInstr(ObjDesc("door", named))

    def _scatter(self, needed: int) -> list[ObjDesc]:
        """Place the agent and the objects, and name ``needed`` of them.

        What stands where and what looks how are drawn apart, each until it will do: neither asks for the other.
        """
        number = self.num_distractors + needed
        while True:
            looks = self._looks(number)
            named = self._named(looks, needed)
            if all((look in HELD_OUT) == (self.split == "test") for look in named):
                break
        cell, spots = draw_agent_first(self.np_random, self.room_size, number)
        self.agent_dir = int(self._rand_int(0, 4))
        self._put(0, cell, spots, looks)
        return [ObjDesc(kind, color) for color, kind in named]

    def _looks(self, number: int) -> list[tuple[str, str]]:
        colors = self.np_random.integers(len(COLORS), size=number).tolist()
        kinds = self.np_random.integers(len(_KINDS), size=number).tolist()
        return [(COLORS[color], _KINDS[kind]) for color, kind in zip(colors, kinds, strict=True)]

    def _named(self, looks: list[tuple[str, str]], needed: int) -> list[tuple[str, str]]:
        """One or two of the objects; the same look twice only where two objects have it."""
        first = self._rand_elem(looks)
        if needed == 1:
            return [first]
        second = self._rand_elem(looks)
        while second == first and looks.count(first) == 1:
            second = self._rand_elem(looks)
        return [first, second]

    def _put(self, room: int, agent: int, spots: list[int], looks: list[tuple[str, str]]) -> None:
        """Set agent and objects down in a room, in cells of :mod:`lrl.envs.babyai.placement`."""
        left, size = room * (self.room_size - 1), self.room_size
        self.agent_pos = (left + agent % size, agent // size)
        for spot, (color, kind) in zip(spots, looks, strict=True):
            thing = _KIND_CLASSES[kind](color)
            self.put_obj(thing, left + spot % size, spot // size)
            self.get_room(room, 0).objs.append(thing)


def _check(tasks: Sequence[str], split: str, distractors: Sequence[int], room_size: int) -> None:
    known = get_args(Task)
    if isinstance(tasks, str) or not tasks or set(tasks) - set(known):
        raise ValueError(f"tasks is {tasks!r}; it must be a list of some of {', '.join(known)}.")
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(get_args(Split))}.")
    if room_size < 5:
        raise ValueError(f"room_size is {room_size}; it must be at least 5.")
    most = (room_size - 2) ** 2 // 2 - 2
    if not distractors:
        raise ValueError("num_distractors is []; it must be a number or a list of some.")
    for number in distractors:
        if not 0 <= number <= most:
            raise ValueError(f"num_distractors is {number}; it must be from 0 to {most} in a room this small.")
