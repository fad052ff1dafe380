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
from minigrid.core.world_object import WorldObj
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
    SeqInstr,
)
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

from lrl.codecs.babyai import VIEW
from lrl.envs.babyai_view import view

Task = Literal["goto", "pickup", "open", "putnext", "pickup_seq_goto"]
"""What has to be done: go to A; pick up A; open the locked door between two rooms with the key that lies about; put A
next to B; pick up A, then go to B."""
Split = Literal["train", "test"]
"""Whether missions name none of :data:`HELD_OUT`, or nothing else."""

HELD_OUT = frozenset({("yellow", "box"), ("red", "key"), ("red", "door"), ("green", "ball"), ("grey", "door")})
"""Colour and type of what no mission of a training level names; it lies about in all levels."""

_DOOR_COLORS: dict[str, list[str]] = {"train": ["yellow", "green", "blue", "purple"], "test": ["red", "grey"]}
_TURN_LEFT = 0
_MISSION_LETTERS = string.ascii_lowercase + " ,"


class LocalLevel(RoomGridLevel):
    """One of the levels ``lrl/BabyAI-...Local-v0``.

    At most 64 steps per room and object to go to: 64 for ``goto`` and ``pickup``, else 128. The reward of a success is
    ``1 - 0.9 * steps / max_steps``, else 0. ``info["success"]`` says whether the mission is accomplished.

    Args:
        tasks: one of them is drawn at each reset.
        split: which objects missions name.
        num_distractors: objects beside those that the mission needs; some may look the same.
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
        num_distractors: int = 8,
        room_size: int = 8,
        max_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        _check(tasks, split, num_distractors, room_size)
        self.tasks, self.split, self.num_distractors = tuple(tasks), split, num_distractors
        self.task: Task = self.tasks[0]
        """Of the running episode."""
        super().__init__(room_size=room_size, num_rows=1, num_cols=1, max_steps=max_steps, render_mode=render_mode)
        self.action_space = spaces.Discrete(6)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (VIEW, VIEW, 3), np.uint8),
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
        """Draw the task, then rooms until one will do. MiniGrid's own loop prints each one that does not."""
        self.task = self._rand_elem(self.tasks)
        self.num_cols = 2 if self.task == "open" else 1
        self.width = (self.room_size - 1) * self.num_cols + 1
        while True:
            try:
                RoomGrid._gen_grid(self, self.width, self.height)
                self.gen_mission()
                self.validate_instrs(self.instrs)
                break
            except (RecursionError, RejectSampling):
                continue
        self.surface = self.mission = self.instrs.surface(self)

    def gen_mission(self) -> None:
        """Fill the rooms and name the task.

        Raises:
            RejectSampling: something cannot be reached, or the mission belongs to the other split.
        """
        makers = {
            "goto": self._goto,
            "pickup": self._pickup,
            "open": self._open,
            "putnext": self._putnext,
            "pickup_seq_goto": self._pickup_seq_goto,
        }
        self.instrs: Instr = makers[self.task]()
        if not self.check_objs_reachable(raise_exc=False):
            raise RejectSampling("an object cannot be reached")
        if any(((target.color, target.type) in HELD_OUT) != (self.split == "test") for target in targets(self.instrs)):
            raise RejectSampling(f"the mission does not belong to the {self.split} split")

    def _goto(self) -> Instr:
        return GoToInstr(_described(self._rand_elem(self._scatter(1))))

    def _pickup(self) -> Instr:
        return PickupInstr(_described(self._rand_elem(self._scatter(1))))

    def _putnext(self) -> Instr:
        return PutNextInstr(*self._pair())

    def _pickup_seq_goto(self) -> Instr:
        first, second = self._pair()
        if self._rand_elem(["before", "after"]) == "before":
            return BeforeInstr(PickupInstr(first), GoToInstr(second))
        return AfterInstr(GoToInstr(second), PickupInstr(first))

    def _open(self) -> Instr:
        color = self._rand_elem(_DOOR_COLORS[self.split])
        locked = self._rand_int(0, 2)
        own = 1 - locked
        self.add_door(locked, 0, 2 * locked, color, locked=True)
        self.add_object(own, 0, "key", color)
        self.add_distractors(own, 0, num_distractors=self.num_distractors, all_unique=False)
        self.place_agent(own, 0)
        named = color if self.split == "test" else self._rand_elem([None, color])
        return OpenInstr(ObjDesc("door", named))

    def _scatter(self, needed: int) -> list[WorldObj]:
        """Place the agent, then the objects, none beside it."""
        self.place_agent()
        return self.add_distractors(num_distractors=self.num_distractors + needed, all_unique=False)

    def _pair(self) -> tuple[ObjDesc, ObjDesc]:
        """Two objects; the same description twice only where two objects answer to it."""
        objects = self._scatter(2)
        looks = [(thing.color, thing.type) for thing in objects]
        first, second = self._rand_elem(objects), self._rand_elem(objects)
        look = (first.color, first.type)
        while looks.count(look) == 1 and (second.color, second.type) == look:
            second = self._rand_elem(objects)
        return _described(first), _described(second)


def targets(instruction: Instr) -> list[ObjDesc]:
    """The objects that a mission names."""
    if isinstance(instruction, SeqInstr):
        return targets(instruction.instr_a) + targets(instruction.instr_b)
    return [getattr(instruction, name) for name in ("desc", "desc_move", "desc_fixed") if hasattr(instruction, name)]


def _described(thing: WorldObj) -> ObjDesc:
    return ObjDesc(thing.type, thing.color)


def _check(tasks: Sequence[str], split: str, num_distractors: int, room_size: int) -> None:
    known = get_args(Task)
    if isinstance(tasks, str) or not tasks or set(tasks) - set(known):
        raise ValueError(f"tasks is {tasks!r}; it must be a list of some of {', '.join(known)}.")
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(get_args(Split))}.")
    if room_size < 5:
        raise ValueError(f"room_size is {room_size}; it must be at least 5.")
    most = (room_size - 2) ** 2 // 2 - 2
    if not 0 <= num_distractors <= most:
        raise ValueError(f"num_distractors is {num_distractors}; it must be from 0 to {most} in a room this small.")
