"""The fastest way to play whole episodes of a native environment in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from lrl.envs.batched.classic_control import CartPole, MountainCar, MountainCarContinuous
from lrl.envs.batched.dynamics import Dynamics, DynamicsEnv, DynamicsVectorEnv, reset_arguments
from lrl.envs.batched.tables import TableDynamics
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.tabular import TransitionTable


def _table(native: Any) -> Dynamics:
    return TableDynamics(TransitionTable.from_gymnasium(native.P), native.initial_state_distrib)


_DYNAMICS: dict[str, Callable[[Any], Dynamics]] = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": lambda native: CartPole(),
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": lambda native: MountainCar(),
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": (
        lambda native: MountainCarContinuous()
    ),
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": _table,
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": _table,
}
"""Transitions by the ``module:class`` of the native environment, of which subclasses may differ."""
_ANY_ARGUMENTS = (_table,)


class SeparateEnvs(VectorEnv):
    """Copies that are stepped one after the other, for environments that cannot step many at once.

    Copies whose episode has ended are left out until their reset. Unlike :class:`gymnasium.vector.SyncVectorEnv` it
    collects no ``info``.

    Args:
        envs: The copies, with their time limit.
        reset_options: Options of every reset.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    steps_ended_copies = True

    def __init__(self, envs: Sequence[gym.Env], reset_options: Mapping[str, Any] | None = None) -> None:
        self.envs, self.num_envs, self._reset_options = envs, len(envs), dict(reset_options or {})
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        space = self.single_observation_space
        self._observations = np.zeros((self.num_envs, *(space.shape or ())), dtype=space.dtype)
        self._active = np.zeros(self.num_envs, dtype=bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin episodes; arguments are those of :meth:`DynamicsVectorEnv.reset`."""
        mask, seeds = reset_arguments(self.num_envs, seed, options)
        for row in np.flatnonzero(mask).tolist():
            self._observations[row], _ = self.envs[row].reset(seed=seeds[row], options=self._reset_options)
        self._active = self._active | mask
        return self._observations.copy(), {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step in each copy whose episode has not ended."""
        rewards, ends = np.zeros(self.num_envs), np.zeros((2, self.num_envs), dtype=bool)
        for row in np.flatnonzero(self._active).tolist():
            observation, reward, terminated, truncated, _ = self.envs[row].step(actions[row])
            self._observations[row], rewards[row] = observation, reward
            if terminated or truncated:
                ends[:, row], self._active[row] = (terminated, truncated), False
        return self._observations.copy(), rewards, ends[0], ends[1], {}

    def close_extras(self, **kwargs: Any) -> None:
        """Close the copies."""
        for env in self.envs:
            env.close()


def make_batched(factory: EnvFactory, num_envs: int) -> VectorEnv:
    """Create native environments for :func:`~lrl.rollouts.parameter_rollouts.play_parameters`.

    Those with transitions in :mod:`lrl.envs.batched` step all copies in NumPy; all others step one after the other.

    Args:
        factory: Names the environment, its arguments and its time limit.
        num_envs: Number of copies.

    Raises:
        ValueError: If the factory does not make registered environments, or its settings are invalid.
    """
    if not isinstance(factory, GymnasiumEnvs):
        raise ValueError(f"env is a {type(factory).__name__}; a search plays registered environments (GymnasiumEnvs).")
    env = factory.make_native()
    dynamics = None if factory.reset_options else _dynamics(env.unwrapped, factory.kwargs)
    if dynamics is None:
        envs = [env, *(factory.make_native() for _ in range(num_envs - 1))]
        return SeparateEnvs(envs, factory.reset_options)
    limit = None if env.spec is None else env.spec.max_episode_steps
    env.close()
    return DynamicsVectorEnv(dynamics, num_envs, limit)


def _dynamics(native: Any, kwargs: dict[str, Any]) -> Dynamics | None:
    """Return the transitions of an environment; None where there are none, or arguments may have changed them."""
    if isinstance(native, DynamicsEnv):
        return native.dynamics
    kind = type(native)
    make = _DYNAMICS.get(f"{kind.__module__}:{kind.__qualname__}")
    return None if make is None or (kwargs and make not in _ANY_ARGUMENTS) else make(native)
