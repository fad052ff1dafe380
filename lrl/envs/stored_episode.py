"""One recorded episode, as columns of native observations, actions and rewards."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike

from lrl.envs.minari_spaces import Columns, columns_size, sample_at


class StoredEpisode:
    """Holds the native observations, actions and rewards of one episode, one of each per step, as columns.

    Args:
        observation_space: space of the observations, as Minari stores it.
        observations: one observation per step, or one more.
        action_space: space of the actions, as Minari stores it.
        actions: one action per step.
        length: number of steps.
        context: context of the codec as JSON values, whose lists become tuples; None if none was stored.
        rewards: one reward per step, ``(step,)``.
        terminated: whether the environment ended the episode, and not a time limit.
        advised: the actions that an advisor would have taken, one per step or one more; None without an advisor.

    Raises:
        ValueError: there is not one reward per step.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        observations: Columns,
        action_space: gym.Space,
        actions: Columns,
        length: int,
        context: Any,
        rewards: ArrayLike,
        terminated: bool,
        advised: Columns | None = None,
    ) -> None:
        self._observations, self._actions = (observation_space, observations), (action_space, actions)
        self._advised = None if advised is None else (action_space, advised)
        self._length, self.context, self.terminated = length, _lists_to_tuples(context), terminated
        self.rewards = np.asarray(rewards, dtype=np.float64)
        if len(self.rewards) != length:
            raise ValueError(f"{length} steps, but {len(self.rewards)} rewards")
        if length:
            self.observation(length - 1)  # raises here if a column is too short, and not later
            self.action(length - 1)
            if self._advised is not None:
                sample_at(*self._advised, length - 1)

    @cached_property
    def observations(self) -> list[Any]:
        """Native observations before each step."""
        return list(map(self.observation, range(self._length)))

    @cached_property
    def actions(self) -> list[Any]:
        """Native actions of each step."""
        return list(map(self.action, range(self._length)))

    @property
    def advised_actions(self) -> dict[int, Any]:
        """Native actions that an advisor would have taken, by step; empty without an advisor."""
        if self._advised is None:
            return {}
        return {step: sample_at(*self._advised, step) for step in range(self._length)}

    def observation(self, step: int) -> Any:
        """Return the native observation before a step."""
        return sample_at(*self._observations, step)

    def action(self, step: int) -> Any:
        """Return the native action of a step."""
        return sample_at(*self._actions, step)

    @property
    def bytes(self) -> int:
        """Size of the columns in memory."""
        columns = [part[1] for part in (self._observations, self._actions, self._advised) if part is not None]
        return sum(map(columns_size, columns)) + self.rewards.nbytes


def _lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples, of which contexts consist and which JSON does not have."""
    if isinstance(value, dict):
        return {key: _lists_to_tuples(part) for key, part in value.items()}
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value
