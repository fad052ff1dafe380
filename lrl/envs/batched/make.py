"""The fastest way to play whole episodes of a native environment in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from lrl.envs.batched.classic_control import CartPole, MountainCar, MountainCarContinuous
from lrl.envs.batched.dynamics import Dynamics, DynamicsEnv, DynamicsVectorEnv
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


class OneEnv(VectorEnv):
    """A single environment as a vectorised one, for environments that cannot step many copies at once.

    Unlike :class:`gymnasium.vector.SyncVectorEnv` it copies nothing and collects no ``info``.

    Args:
        env: The environment, with its time limit.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, env: gym.Env) -> None:
        self.env, self.num_envs = env, 1
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, 1)
        self.action_space = batch_space(env.action_space, 1)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; a list has one seed."""
        observation, _ = self.env.reset(seed=seed[0] if isinstance(seed, list) else seed)
        return np.asarray(observation)[None], {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step."""
        observation, reward, terminated, truncated, _ = self.env.step(actions[0])
        ends = np.array([[terminated], [truncated]], dtype=bool)
        return np.asarray(observation)[None], np.array([reward], dtype=np.float64), ends[0], ends[1], {}

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close()


def make_batched(factory: EnvFactory, num_envs: int) -> VectorEnv:
    """Create native environments for :func:`~lrl.rollouts.parameter_rollouts.play_parameters`.

    Those with transitions in :mod:`lrl.envs.batched` step ``num_envs`` copies at once; of all others there is one copy,
    which plays one episode after the other: stepping copies one by one is not faster, and short episodes would wait for
    long ones.

    Args:
        factory: Names the environment, its arguments and its time limit.
        num_envs: Number of copies, where many can be stepped at once.

    Raises:
        ValueError: If the factory does not make registered environments, or its settings are invalid.
    """
    if not isinstance(factory, GymnasiumEnvs):
        raise ValueError(f"env is a {type(factory).__name__}; a search plays registered environments (GymnasiumEnvs).")
    env = factory.make_native()
    dynamics = None if factory.reset_options else _dynamics(env.unwrapped, factory.kwargs)
    if dynamics is None:
        return OneEnv(env)
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
