"""Functions that play whole episodes with a small policy, in NumPy only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from lrl.codecs.registry import class_names
from lrl.envs.factory import EnvFactory, GymnasiumEnvs
from lrl.envs.native import CheckedEnv, check_batch, close_env
from lrl.envs.processes import SeparateEnvs
from lrl.envs.tabular import TransitionTable
from lrl.functional.random import seeds as hashed_seeds
from lrl.search.batched import (
    CartPole,
    Dynamics,
    DynamicsEnv,
    DynamicsVectorEnv,
    MountainCar,
    MountainCarContinuous,
    TableDynamics,
)
from lrl.search.policies import Decide, SearchedPolicy
from lrl.search.searchers import Trial


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
"""Dynamics by the ``module:class`` of the native environment; subclasses are not included, because they may differ."""


def make_batched(factory: EnvFactory, num_envs: int) -> VectorEnv:
    """Create native environments for :func:`play_parameters`.

    Environments with :class:`~lrl.search.batched.Dynamics` step all copies at once, all others one copy at a time.

    Args:
        factory: factory of the environments.
        num_envs: number of copies.

    Raises:
        ValueError: If the factory does not create registered environments, or its settings are invalid.
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
    """Return the dynamics of an environment; None if there are none, or if its arguments may have changed them."""
    if isinstance(native, DynamicsEnv):
        return native.dynamics
    make = _DYNAMICS.get(class_names(native)[0])
    return None if make is None or (kwargs and make is not _table) else make(native)


TrajectorySteps = list[tuple[str, str, float]]
"""Observation, action and reward of each step, see :attr:`~lrl.search.searchers.Trial.trajectory`."""


def proposal_seeds(seed: int, proposal: int, num_rollouts: int) -> np.ndarray:
    """Return the seeds of the episodes of a proposal, int64 ``(episode,)``, which differ from those of all others.

    Args:
        seed: seed of the search.
        proposal: index of the proposal; warm-up policies have negative ones.
        num_rollouts: number of episodes.
    """
    return hashed_seeds("proposal", seed, proposal, np.arange(num_rollouts))


def fresh_seeds(seed: int, num_episodes: int) -> np.ndarray:
    """Return the seeds of episodes that are not used to select a proposal, int64 ``(episode,)``.

    Args:
        seed: seed of the search.
        num_episodes: number of episodes.
    """
    return hashed_seeds("fresh episode", seed, np.arange(num_episodes))


def play_parameters(
    policy: SearchedPolicy,
    envs: VectorEnv,
    parameters: np.ndarray,
    seeds: Sequence[int] | np.ndarray,
    max_steps: int,
    trajectory: bool = False,
) -> Trial:
    """Play one whole episode for each seed, in batches of as many episodes as there are environments.

    An episode depends on its seed and the parameters only.

    Args:
        policy: policy that is connected to the spaces; its own parameters are neither used nor changed.
        envs: environments from :func:`make_batched`, which can be used for many calls.
        parameters: parameters ``(parameter,)``.
        seeds: seed of each episode.
        max_steps: number of steps after which episodes are truncated; the environment's own limit may be lower.
        trajectory: whether to return the steps of the first episode as text.

    Raises:
        ValueError: If there is no seed, or if an environment fails or returns a number that is not finite.
    """
    if not len(seeds):
        raise ValueError("seeds is empty; there must be one for each episode.")
    described: TrajectorySteps = []
    decide = policy.decider(parameters)
    returns, env_steps = play_seeds(decide, envs, seeds, max_steps, described if trajectory else None)
    return Trial(
        parameters=np.asarray(parameters, dtype=np.float64), returns=returns, env_steps=env_steps, trajectory=described
    )


def play_seeds(
    decide: Decide,
    envs: VectorEnv,
    seeds: Sequence[int] | np.ndarray,
    max_steps: int,
    described: TrajectorySteps | None = None,
) -> tuple[np.ndarray, int]:
    """Play one whole episode for each seed, and return their returns ``(episode,)`` and the number of their steps.

    Args:
        decide: function from the observations of all environments to their actions.
        envs: environments from :func:`make_batched`, which may be stepped after the end of an episode.
        seeds: seed of each episode, at least one.
        max_steps: number of steps after which episodes are truncated; the environment's own limit may be lower.
        described: list to which the steps of the first episode are appended as text.

    Raises:
        ValueError: If an environment fails, or returns a number that is not finite.
    """
    returns, env_steps = np.zeros(len(seeds)), 0
    space, name = envs.single_observation_space, getattr(envs, "name", type(envs).__name__)
    for first in range(0, len(seeds), envs.num_envs):
        given = [int(seed) for seed in seeds[first : first + envs.num_envs]]
        all_seeds: Any = given + given[-1:] * (envs.num_envs - len(given))  # also for idle environments
        active = np.arange(envs.num_envs) < len(given)  # steps after the end of an episode do not count
        observations, _ = envs.reset(seed=all_seeds, options={"reset_mask": active.copy()})
        sums, lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, dtype=np.int64)
        check_batch(space, name, all_seeds, lengths, observations)
        for _ in range(max_steps):
            actions, before = decide(observations), observations[0]
            observations, rewards, terminated, truncated, _ = envs.step(actions)
            lengths += active
            rewards = np.where(active, rewards, 0.0)
            check_batch(space, name, all_seeds, lengths, observations, rewards)
            if described is not None and first == 0 and active[0]:
                described.append((describe(before), describe(actions[0]), float(rewards[0])))
            sums += rewards
            active &= ~(terminated | truncated)
            if not active.any():
                break
        env_steps += int(lengths.sum())
        returns[first : first + len(given)] = sums[: len(given)]
    return returns, env_steps


def describe(value: Any) -> str:
    """Return an observation or action as text: an integer, or numbers with four significant digits."""
    numbers = np.asarray(value).ravel().tolist()
    return ", ".join(str(one) if isinstance(one, int) else f"{one:.4g}" for one in numbers)
