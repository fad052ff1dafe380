"""A data set of prompts as an environment whose episodes last one turn.

Offline states then need no code of their own: whatever learns from episodes learns from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.factory import EnvFactory
from lrl.envs.rows import RowSource
from lrl.envs.text import AnyText
from lrl.functional.random import permutation
from lrl.prompts.response_format import get_response_format
from lrl.rewards.reward import Reward
from lrl.rewards.row import Row


class PromptEnvs(EnvFactory):
    """One-turn environments over a data set.

    Args:
        rows: the data set.
        rewards: what an answer is paid: the sum of the terms, each times its weight.
        seed: orders the rows, anew in each pass.
    """

    def __init__(self, rows: RowSource, rewards: Sequence[Reward], seed: int = 0) -> None:
        names = [reward.name for reward in rewards]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"env.rewards is {names}; it must hold at least one reward and none twice.")
        self.source, self.rewards, self.seed = rows, tuple(rewards), seed

    @property
    def codec(self) -> TextCodec:
        """The data set's text."""
        return self.source.codec

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The data set, made or read once.

        Raises:
            ValueError: it is empty.
        """
        rows = tuple(self.source.rows())
        if not rows:
            raise ValueError(f"env.rows is a {type(self.source).__name__} without rows; it must hold at least one.")
        return rows

    def make(self, num_envs: int, response_format: str | None) -> PromptEnv:
        """See :meth:`EnvFactory.make`; only text."""
        if response_format is None:
            raise ValueError("env is a PromptEnvs, which shows text only; the policy must be one that reads text.")
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
        return PromptEnv(self.rows, self.rewards, self.codec, response_format, num_envs, self.seed)


class PromptEnv(VectorEnv):
    """Shows a row, pays for the answer, ends.

    Which row an environment shows is no state of it but follows from a counter: row ``counter % length`` of the
    permutation of pass ``counter // length``. The counter comes with ``reset(options={"episode": ...})``, int64
    ``(env,)``: equal within a group, different between the groups of all ranks; counters without gaps visit every row
    once in a pass. Without it the seed takes its place, and without a seed a random number.

    ``infos`` of a step: ``reward/<name>`` before the weight, ``action_valid``, ``invalid_reason``, and ``success``: a
    best action was chosen.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        rewards: Sequence[Reward],
        codec: TextCodec,
        response_format: str,
        num_envs: int,
        seed: int = 0,
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = self.single_action_space = AnyText()
        self.observation_space = self.action_space = batch_space(AnyText(), num_envs)
        self.noise_seed: Any = None
        self._rows, self._rewards, self._codec, self._seed = tuple(rows), tuple(rewards), codec, seed
        self._extract = get_response_format(response_format).extract
        self._orders: dict[int, np.ndarray] = {}
        self._shown = [0] * num_envs

    @property
    def rows(self) -> list[Row]:
        """The row that each environment shows."""
        return [self._rows[index] for index in self._shown]

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute, as Gymnasium's vectorised environments do. One turn has no noise to seed."""
        setattr(self, name, values)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Show new rows, where ``options["reset_mask"]`` is given only in those environments.

        Raises:
            ValueError: ``episode`` or ``reset_mask`` is not of shape ``(env,)``.
        """
        options = options or {}
        mask = _checked("reset_mask", options.get("reset_mask", np.ones(self.num_envs, dtype=bool)), self.num_envs)
        given = options.get("episode")
        counters = _checked("episode", self._counters(seed) if given is None else given, self.num_envs)
        for index in np.flatnonzero(mask):
            self._shown[index] = self._row_of(int(counters[index]))
        return self._observations(), {}

    def step(
        self, actions: Sequence[str]
    ) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Pay for one answer in each environment; rewards are float64 ``(env,)``."""
        if len(actions) != self.num_envs:
            raise ValueError(f"step was given {len(actions)} actions; there are {self.num_envs} environments.")
        rows, parsed = self.rows, [self._parse(response) for response in actions]
        chosen = [action for action, _ in parsed]
        terms = {reward.name: reward(rows, actions, chosen) for reward in self._rewards}
        total = sum((reward.weight * terms[reward.name] for reward in self._rewards), np.zeros(self.num_envs))
        infos: dict[str, Any] = {f"reward/{name}": values for name, values in terms.items()}
        infos["action_valid"] = np.array([action is not None for action in chosen])
        infos["invalid_reason"] = np.array([reason for _, reason in parsed], dtype=object)
        infos["success"] = np.array([action in row.best_actions for row, action in zip(rows, chosen, strict=True)])
        ended = np.ones(self.num_envs, dtype=bool)
        return self._observations(), total, ended, np.zeros_like(ended), infos

    def _observations(self) -> tuple[str, ...]:
        return tuple(row.observation for row in self.rows)

    def _parse(self, response: str) -> tuple[int | None, str]:
        try:
            return self._codec.text_to_action(self._extract(response)), ""
        except InvalidActionError as error:
            return None, str(error)

    def _counters(self, seed: int | Sequence[int | None] | None) -> np.ndarray:
        if isinstance(seed, int):
            return seed + np.arange(self.num_envs)
        drawn = self.np_random.integers(2**31, size=self.num_envs)
        if seed is None:
            return drawn
        return np.array([random if given is None else given for given, random in zip(seed, drawn, strict=True)])

    def _row_of(self, counter: int) -> int:
        number, position = divmod(counter, len(self._rows))
        if number not in self._orders:
            if len(self._orders) >= 4:  # a batch spans few passes
                self._orders.clear()
            self._orders[number] = permutation(len(self._rows), "rows", self._seed, number)
        return int(self._orders[number][position])


def _checked(name: str, values: Any, num_envs: int) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (num_envs,):
        raise ValueError(f"options[{name!r}] has shape {array.shape}; it must be ({num_envs},).")
    return array
