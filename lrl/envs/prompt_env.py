"""A data set of prompts as an environment whose episodes last one turn.

Algorithms that learn from episodes can therefore learn from offline states without additional code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import ArrayLike

from lrl.codecs.codec import InvalidActionError, TextCodec, clip_to_space
from lrl.envs.factory import EnvFactory
from lrl.envs.text import AnyText
from lrl.functional.random import permutation
from lrl.prompts import get_response_format
from lrl.registry import register
from lrl.rewards.reward import Reward, Row, check_rewards, compute_reward
from lrl.types import History, LazySequence, PastTurn


class RowSource(ABC):
    """Abstract data set of states with an expert's actions and optionally its Q-values."""

    @property
    @abstractmethod
    def codec(self) -> TextCodec:
        """Codec of the environment that the states belong to."""

    @property
    def spaces(self) -> tuple[gym.Space, gym.Space] | None:
        """Native observation and action space; None if the rows contain only texts, which networks cannot read."""
        return None

    def prepare_data(self) -> None:  # noqa: B027 (most sources have nothing to download)
        """Download the data set if needed. Called once per machine, before all other methods.

        A failed download raises no error here; :meth:`rows` raises one.
        """

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return all rows, in the same order at each call; a large data set returns a lazy sequence."""


class EnvRows(RowSource):
    """Abstract data set that was recorded in an environment and has its codec and spaces."""

    env: EnvFactory
    """The environment."""

    @property
    def codec(self) -> TextCodec:
        """Codec of the environment."""
        return self.env.codec

    @cached_property
    def spaces(self) -> tuple[gym.Space, gym.Space]:
        """Native observation and action space of the environment."""
        return self.env.spaces


class EpisodeRows(LazySequence[Row]):
    """Abstract lazy sequence of rows that are steps of recorded episodes."""

    @abstractmethod
    def past_turns(self, index: int, length: int) -> tuple[tuple[str, str], ...]:
        """Return the turns before a row in its episode, oldest first.

        Args:
            index: index of the row.
            length: maximum number of turns.

        Returns:
            The texts of observation and action of each turn.
        """


@register
class PromptEnvs(EnvFactory):
    """Factory of vectorized one-turn environments on a data set.

    Policies that write text observe the rows as text; networks observe the native observations of rows that have them.

    Args:
        rows: the data set.
        rewards: reward functions; the reward of a response is their weighted sum.
        seed: seed of the order of the rows, which differs between passes.

    Raises:
        ValueError: If there is no reward function, two have the same name, or one is not a :class:`Reward`.
    """

    def __init__(self, rows: RowSource, rewards: Sequence[Reward], seed: int = 0) -> None:
        self.rows_source, self.rewards, self.seed = rows, check_rewards(rewards), seed

    @property
    def codec(self) -> TextCodec:
        """Codec of the data set."""
        return self.rows_source.codec

    @property
    def spaces(self) -> tuple[gym.Space, gym.Space]:
        """Native observation and action space of the data set.

        Raises:
            ValueError: If the spaces of the data set are not known.
        """
        return self.rows_source.spaces or super().spaces

    def prepare_data(self) -> None:
        """Download the data set if it is not local."""
        self.rows_source.prepare_data()

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Rows of the data set, created once or read on demand.

        Raises:
            ValueError: If the data set is empty.
        """
        rows = self.rows_source.rows()
        if not len(rows):
            raise ValueError(
                f"env.rows is an empty {type(self.rows_source).__name__}; it must contain at least one row."
            )
        return rows

    def make(self, num_envs: int, response_format: str | None) -> PromptEnv:
        """Create a vectorized environment; see :meth:`EnvFactory.make`.

        Raises:
            ValueError: If ``num_envs`` is less than 1, a reward cannot be computed for the rows, or ``response_format``
                is None and the rows have no native observations.
        """
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; it must be at least 1.")
        codec, spaces = self.codec, self.rows_source.spaces
        if response_format is None and (spaces is None or self.rows[0].native_observation is None):
            raise ValueError(
                f"env.rows is a {type(self.rows_source).__name__}, which has text observations only; model.policy must "
                "be a policy that writes or chooses texts."
            )
        for reward in self.rewards:
            reward.connect(codec, response_format, self.rows[0])
        return PromptEnv(self.rows, self.rewards, codec, response_format, num_envs, self.seed, spaces)


class PromptEnv(VectorEnv):
    """Vectorized environment that shows a row, rewards the response and terminates.

    The row follows from a counter: it is row ``counter % length`` in the permutation of pass ``counter // length``. The
    counter is passed to :meth:`reset` as ``options={"episode": ...}``, int64 ``(env,)``. It is equal within a group and
    differs between the groups of all ranks, so consecutive counters visit every row once per pass. Without
    ``options["episode"]`` the seed is the counter, and without a seed it is a random number.

    ``infos`` of a step contains ``reward/<name>`` (unweighted), ``action_valid`` and ``invalid_reason``. If the rows
    have Q-values, it contains ``success`` (whether a best action was chosen). If the action space contains a Box, it
    contains ``clipped_numbers`` (the number of values that were clipped to its bounds). Each has shape ``(env,)``.

    Args:
        rows: rows of the data set.
        rewards: reward functions, which are connected.
        codec: codec of the data set.
        response_format: name of the format of responses; None shows native observations and takes native actions.
        num_envs: number of environments.
        seed: seed of the order of the rows.
        spaces: native observation and action space; None if they are not known, and texts are shown.

    Attributes:
        steps_ended_copies: always True, because a row accepts several responses without a reset.
        max_past_turns: maximum number of past turns in ``infos["past_turns"]`` of a reset: those before a row that is a
            step of a recorded episode, written in the response format. Set it before a reset.
    """

    steps_ended_copies = True

    def __init__(
        self,
        rows: Sequence[Row],
        rewards: Sequence[Reward],
        codec: TextCodec,
        response_format: str | None,
        num_envs: int,
        seed: int = 0,
        spaces: tuple[gym.Space, gym.Space] | None = None,
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self._format = None if response_format is None else get_response_format(response_format)
        single = spaces if self._format is None else (AnyText(),) * 2
        assert single is not None, "native observations need their spaces"
        self.single_observation_space, self.single_action_space = single
        self.observation_space = self.action_space = batch_space(single[0], num_envs)
        if self._format is None:
            self.action_space = batch_space(single[1], num_envs)
        self.noise_seed: Any = None
        self.max_past_turns = 0
        self._rows, self._rewards, self._codec = rows, tuple(rewards), codec
        self._native_action_space = None if spaces is None else spaces[1]
        # A batch spans few passes, so older permutations are not needed.
        self._permutation = lru_cache(4)(partial(permutation, len(rows), "rows", seed))
        self._current: list[Row] = [rows[0]] * num_envs

    @property
    def rows(self) -> list[Row]:
        """Current row of each environment, ``(env,)``."""
        return list(self._current)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute, as other vectorized environments do. ``noise_seed`` has no effect on single turns."""
        setattr(self, name, values)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Show new rows in all environments, or in those selected by ``options["reset_mask"]``.

        Args:
            seed: one seed for all environments or one per environment, used if there is no ``episode``.
            options: ``episode``, the counters, int64 ``(env,)``; ``reset_mask``, bool ``(env,)``.

        Returns:
            The observations of all environments, and infos: if :attr:`max_past_turns` is positive
            ``past_turns``, a history for each environment.

        Raises:
            ValueError: If ``episode`` or ``reset_mask`` has a wrong shape.
        """
        options = options or {}
        mask = self._validated("reset_mask", options.get("reset_mask", np.ones(self.num_envs, dtype=bool)))
        episode = options.get("episode")
        counters = self._validated("episode", self._counters(seed) if episode is None else episode)
        shown: dict[int, tuple[Row, History]] = {}  # the environments of a group show the same row, read once
        past_turns: list[History] = [()] * self.num_envs
        for env in np.flatnonzero(mask):
            index = self._row_index(int(counters[env]))
            if index not in shown:
                shown[index] = self._rows[index], self._past_turns(index)
            self._current[env], past_turns[env] = shown[index]
        return self._observations(), {"past_turns": past_turns} if self.max_past_turns else {}

    def step(
        self, actions: Sequence[Any] | np.ndarray
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Reward one response per environment and terminate all episodes.

        Args:
            actions: responses or native actions, ``(env,)``.

        Returns:
            Observations; rewards, float64 ``(env,)``; ``terminated`` and ``truncated``, bool ``(env,)``; and infos.

        Raises:
            ValueError: If the number of actions is not the number of environments, or a reward function raises an error
                or does not return one finite number for each response.
        """
        if len(actions) != self.num_envs:
            raise ValueError(
                f"step received {len(actions)} actions; there must be one for each of {self.num_envs} environments."
            )
        rows = self.rows
        chosen, reasons, clipped = zip(*map(self._parse, actions), strict=True)
        responses = [""] * self.num_envs if self._format is None else tuple(actions)
        terms = {reward.name: compute_reward(reward, rows, responses, chosen) for reward in self._rewards}
        total = sum((reward.weight * terms[reward.name] for reward in self._rewards), np.zeros(self.num_envs))
        infos: dict[str, Any] = {f"reward/{name}": values for name, values in terms.items()}
        infos["action_valid"] = np.array([action is not None for action in chosen])
        infos["invalid_reason"] = np.array(reasons, dtype=object)
        if all(row.q_values for row in rows):
            infos["success"] = np.array([action in row.best_actions for row, action in zip(rows, chosen, strict=True)])
        if any(count is not None for count in clipped):
            infos["clipped_numbers"] = np.array([count or 0 for count in clipped])
        terminated = np.ones(self.num_envs, dtype=bool)
        return self._observations(), total, terminated, np.zeros_like(terminated), infos

    def _observations(self) -> Any:
        """Return the texts of the current rows, ``(env,)``, or an element of the native observation space."""
        if self._format is not None:
            return tuple(row.observation for row in self._current)
        space = self.single_observation_space
        batch = create_empty_array(space, self.num_envs)
        return concatenate(space, [row.native_observation for row in self._current], batch)

    def _parse(self, action: Any) -> tuple[Any, str, int | None]:
        """Parse and clip one response or native action.

        Returns:
            The native action, or None if it is invalid; the reason why it is invalid, or an empty text; and the number
            of values that were clipped, or None if the action is invalid or the action space contains no Box.
        """
        space = self._native_action_space
        try:
            native = action if self._format is None else self._codec.text_to_action(self._format.extract(action))
        except InvalidActionError as error:
            return None, str(error), None
        if isinstance(space, gym.spaces.Discrete):
            return int(native), "", None
        if space is None:
            return native, "", None
        native, clipped = clip_to_space(space, native)
        return native, "", clipped

    def _past_turns(self, index: int) -> History:
        """Return the turns before a row, in the response format; none if the rows are not steps of episodes."""
        if self._format is None or not self.max_past_turns or not isinstance(self._rows, EpisodeRows):
            return ()
        turns = self._rows.past_turns(index, self.max_past_turns)
        return tuple(PastTurn(observation, self._format.render(action)) for observation, action in turns)

    def _counters(self, seed: int | Sequence[int | None] | None) -> np.ndarray:
        if isinstance(seed, int):
            return seed + np.arange(self.num_envs)
        random = self.np_random.integers(2**31, size=self.num_envs)
        if seed is None:
            return random
        return np.array([number if given is None else given for given, number in zip(seed, random, strict=True)])

    def _row_index(self, counter: int) -> int:
        number, position = divmod(counter, len(self._rows))
        return int(self._permutation(number)[position])

    def _validated(self, name: str, values: ArrayLike) -> np.ndarray:
        array = np.asarray(values)
        if array.shape != (self.num_envs,):
            raise ValueError(f"options[{name!r}] has shape {array.shape}; it must be ({self.num_envs},).")
        return array
