"""A data set of prompts as an environment whose episodes last one turn.

Algorithms that learn from episodes can thereby learn from offline states without additional code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike

from lrl.codecs.codec import InvalidActionError, TextCodec
from lrl.envs.factory import EnvFactory
from lrl.envs.rows import RowSource
from lrl.envs.text import AnyText
from lrl.functional.random import permutation
from lrl.prompts.response_format import get_response_format
from lrl.rewards.reward import Reward
from lrl.rewards.row import Row


class PromptEnvs(EnvFactory):
    """Factory of vectorized one-turn environments on a data set.

    Args:
        rows: The data set.
        rewards: Reward functions; the reward of a response is their weighted sum.
        seed: Seed of the order of the rows, which differs between passes.

    Raises:
        ValueError: If there are no rewards or two have the same name.
    """

    def __init__(self, rows: RowSource, rewards: Sequence[Reward], seed: int = 0) -> None:
        names = [reward.name for reward in rewards]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"env.rewards is {names}; it must contain at least one reward and no duplicates.")
        self.source, self.rewards, self.seed = rows, tuple(rewards), seed

    @property
    def codec(self) -> TextCodec:
        """Codec of the data set."""
        return self.source.codec

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the data set, created or read once.

        Raises:
            ValueError: If the data set is empty.
        """
        rows = tuple(self.source.rows())
        if not rows:
            raise ValueError(f"env.rows is an empty {type(self.source).__name__}; it must contain at least one row.")
        return rows

    def make(self, num_envs: int, response_format: str | None) -> PromptEnv:
        """Create a vectorized environment; see :meth:`EnvFactory.make`.

        Raises:
            ValueError: If ``num_envs`` is less than 1 or ``response_format`` is None.
        """
        if response_format is None:
            raise ValueError("env is a PromptEnvs, which has text observations only; it needs a text policy.")
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
        return PromptEnv(self.rows, self.rewards, self.codec, response_format, num_envs, self.seed)


class PromptEnv(VectorEnv):
    """Vectorized environment that shows a row, rewards the response and terminates.

    The row follows from a counter: it is row ``counter % length`` in the permutation of pass ``counter // length``. The
    counter is passed to :meth:`reset` as ``options={"episode": ...}``, int64 ``(env,)``. It is equal within a group and
    differs between the groups of all ranks, so consecutive counters visit every row once per pass. Without
    ``options["episode"]`` the seed is the counter, and without a seed it is a random number.

    ``infos`` of a step contains ``reward/<name>`` (unweighted), ``action_valid``, ``invalid_reason`` and ``success``
    (whether a best action was chosen), each of shape ``(env,)``.

    Args:
        rows: Rows of the data set.
        rewards: Reward functions.
        codec: Codec of the data set.
        response_format: Name of the format of responses.
        num_envs: Number of environments.
        seed: Seed of the order of the rows.
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
        self._permutations: dict[int, np.ndarray] = {}
        self._current = [0] * num_envs

    @property
    def rows(self) -> list[Row]:
        """Current row of each environment, ``(env,)``."""
        return [self._rows[index] for index in self._current]

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute, as other vectorized environments do. ``noise_seed`` has no effect on single turns."""
        setattr(self, name, values)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Show new rows in all environments, or in those selected by ``options["reset_mask"]``.

        Args:
            seed: One seed for all environments or one per environment, used if there is no ``episode``.
            options: ``episode``, the counters, int64 ``(env,)``; ``reset_mask``, bool ``(env,)``.

        Returns:
            The observations of all environments and an empty dict.

        Raises:
            ValueError: If ``episode`` or ``reset_mask`` has a wrong shape.
        """
        options = options or {}
        mask = self._validated("reset_mask", options.get("reset_mask", np.ones(self.num_envs, dtype=bool)))
        episode = options.get("episode")
        counters = self._validated("episode", self._counters(seed) if episode is None else episode)
        for index in np.flatnonzero(mask):
            self._current[index] = self._row_index(int(counters[index]))
        return self._observations(), {}

    def step(
        self, actions: Sequence[str]
    ) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Reward one response per environment and terminate all episodes.

        Args:
            actions: Responses, ``(env,)``.

        Returns:
            Observations; rewards, float64 ``(env,)``; ``terminated`` and ``truncated``, bool ``(env,)``; and infos.
        """
        if len(actions) != self.num_envs:
            raise ValueError(f"step received {len(actions)} actions; there are {self.num_envs} environments.")
        rows, parsed = self.rows, [self._parse(response) for response in actions]
        chosen = [action for action, _ in parsed]
        terms = {reward.name: reward(rows, actions, chosen) for reward in self._rewards}
        total = sum((reward.weight * terms[reward.name] for reward in self._rewards), np.zeros(self.num_envs))
        infos: dict[str, Any] = {f"reward/{name}": values for name, values in terms.items()}
        infos["action_valid"] = np.array([action is not None for action in chosen])
        infos["invalid_reason"] = np.array([reason for _, reason in parsed], dtype=object)
        infos["success"] = np.array([action in row.best_actions for row, action in zip(rows, chosen, strict=True)])
        terminated = np.ones(self.num_envs, dtype=bool)
        return self._observations(), total, terminated, np.zeros_like(terminated), infos

    def _observations(self) -> tuple[str, ...]:
        return tuple(row.observation for row in self.rows)

    def _parse(self, response: str) -> tuple[int | None, str]:
        """Return the action, or None and the reason why the response is invalid."""
        try:
            return self._codec.text_to_action(self._extract(response)), ""
        except InvalidActionError as error:
            return None, str(error)

    def _counters(self, seed: int | Sequence[int | None] | None) -> np.ndarray:
        if isinstance(seed, int):
            return seed + np.arange(self.num_envs)
        random = self.np_random.integers(2**31, size=self.num_envs)
        if seed is None:
            return random
        return np.array([number if given is None else given for given, number in zip(seed, random, strict=True)])

    def _row_index(self, counter: int) -> int:
        number, position = divmod(counter, len(self._rows))
        if number not in self._permutations:
            if len(self._permutations) >= 4:  # A batch spans few passes, so older permutations are not needed.
                self._permutations.clear()
            self._permutations[number] = permutation(len(self._rows), "rows", self._seed, number)
        return int(self._permutations[number][position])

    def _validated(self, name: str, values: ArrayLike) -> np.ndarray:
        array = np.asarray(values)
        if array.shape != (self.num_envs,):
            raise ValueError(f"options[{name!r}] has shape {array.shape}; it must be ({self.num_envs},).")
        return array
