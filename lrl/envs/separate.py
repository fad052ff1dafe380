"""Vectorized copies of an environment in this process, which are stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from lrl.envs.boundary import empty_observation


class SeparateEnvs(SyncVectorEnv):
    """Version of Gymnasium's ``SyncVectorEnv`` that neither steps nor resets copies that play no episode.

    ``infos`` has one array for each name, without Gymnasium's masks ``_<name>``; it is 0 or None where a copy does not
    report it.

    Args:
        env_fns: Functions that each create one copy.
        name: Name of the environment, for error messages.
        collects_infos: Whether to return infos.

    Attributes:
        idle: Copies that :meth:`step` leaves out, bool ``(env,)``: their observation stays the same and their reward is
            0. A copy is idle until its first reset, and from the end of its episode to the next reset.

    Raises:
        ValueError: If the copies have different spaces.
    """

    steps_ended_copies = True

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]], name: str, collects_infos: bool = True) -> None:
        try:
            super().__init__(env_fns, autoreset_mode=AutoresetMode.DISABLED)
        except RuntimeError as error:  # Gymnasium compares the spaces.
            raise ValueError(f"env is {name!r}, whose copies have different spaces: {error}") from error
        self.name, self._collects_infos = name, collects_infos
        self.idle = np.ones(self.num_envs, dtype=bool)
        self._env_obs: list[Any] = [None] * self.num_envs

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes and return the observations of all copies.

        Args:
            seed: One for each copy, or the first of successive ones.
            options: ``reset_mask``, bool ``(env,)``, selects the copies; all other options are passed to them.
        """
        mask, seeds = reset_arguments(self.num_envs, seed, options)
        infos: list[Mapping[str, Any]] = [{}] * self.num_envs
        for row in np.flatnonzero(mask).tolist():
            self._env_obs[row], infos[row] = self.envs[row].reset(seed=seeds[row], options=options)
        if not mask.all():
            self._env_obs = [self._empty() if one is None else one for one in self._env_obs]
        self.idle = self.idle & ~mask
        return self._batch(), self._infos(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step in each copy that is not idle."""
        rewards, terminated, truncated = [0.0] * self.num_envs, [False] * self.num_envs, [False] * self.num_envs
        infos: list[Mapping[str, Any]] = [{}] * self.num_envs
        each = zip(self.envs, iterate(self.action_space, actions), self.idle.tolist(), strict=True)
        for row, (env, action, idle) in enumerate(each):
            if not idle:
                outcome: Any = env.step(action)
                self._env_obs[row], rewards[row], terminated[row], truncated[row], infos[row] = outcome
        ends = np.array((terminated, truncated), dtype=bool)
        self.idle = self.idle | ends[0] | ends[1]
        return self._batch(), np.array(rewards, dtype=np.float64), ends[0], ends[1], self._infos(infos)

    def _batch(self) -> Any:
        """Return the current observations in arrays of their own, which later steps do not change."""
        space = self.single_observation_space
        with np.errstate(over="ignore"):  # What float32 cannot represent becomes infinite, and is reported.
            return concatenate(space, self._env_obs, create_empty_array(space, self.num_envs, fn=np.empty))

    def _empty(self) -> Any:
        return empty_observation(self.single_observation_space)

    def _infos(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Return one array ``(env,)`` for each name in the infos of the copies."""
        if not self._collects_infos:
            return {}
        names = dict.fromkeys(name for info in infos for name in info)
        return {name: _column([info.get(name) for info in infos]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    kinds = {value.__class__ for value in values} - {type(None)}
    if kinds <= {bool} or kinds <= {int} or kinds <= {float}:
        zero = next(iter(kinds))(0) if kinds else None
        return np.array([zero if value is None else value for value in values])
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def reset_arguments(
    num_envs: int, seed: int | list[int | None] | None, options: dict[str, Any] | None
) -> tuple[np.ndarray, list[int | None]]:
    """Return which copies are reset, bool ``(copy,)``, and the seed of each.

    Args:
        num_envs: Number of copies.
        seed: See :meth:`DynamicsVectorEnv.reset`.
        options: See :meth:`DynamicsVectorEnv.reset`.

    Raises:
        ValueError: If there is a list of seeds of another length.
    """
    if seed is None or isinstance(seed, (int, np.integer)):
        seeds = [None if seed is None else int(seed) + row for row in range(num_envs)]
    else:
        seeds = [None if one is None else int(one) for one in seed]
    if len(seeds) != num_envs:
        raise ValueError(f"seed is a list of {len(seeds)} numbers; there must be one for each of {num_envs}.")
    mask = (options or {}).get("reset_mask")
    return np.ones(num_envs, dtype=bool) if mask is None else mask, seeds
