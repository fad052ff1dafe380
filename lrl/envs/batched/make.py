"""The fastest way to play whole episodes of a native environment in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gymnasium.vector import VectorEnv

from lrl.envs.batched.classic_control import CartPole, MountainCar, MountainCarContinuous
from lrl.envs.batched.dynamics import Dynamics, DynamicsEnv, DynamicsVectorEnv
from lrl.envs.batched.tables import TableDynamics
from lrl.envs.boundary import CheckedEnv, close_env
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.separate import SeparateEnvs
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
        close_env(env)
        make = functools.partial(_make_checked, factory)
        return SeparateEnvs([make] * num_envs, factory.id, collects_infos=False)
    limit = None if env.spec is None else env.spec.max_episode_steps
    close_env(env)
    envs = DynamicsVectorEnv(dynamics, num_envs, limit)
    envs.name = factory.id
    return envs


def _make_checked(factory: GymnasiumEnvs) -> CheckedEnv:
    return CheckedEnv(factory.make_native(), factory.reset_options)


def _dynamics(native: Any, kwargs: dict[str, Any]) -> Dynamics | None:
    """Return the transitions of an environment; None where there are none, or arguments may have changed them."""
    if isinstance(native, DynamicsEnv):
        return native.dynamics
    kind = type(native)
    make = _DYNAMICS.get(f"{kind.__module__}:{kind.__qualname__}")
    return None if make is None or (kwargs and make not in _ANY_ARGUMENTS) else make(native)
