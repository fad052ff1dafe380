"""Collect whole episodes, in groups that start from the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from gymnasium.vector import VectorEnv
from torch import Tensor

from lrl.functional.random import seeds
from lrl.policies.policy import Policy
from lrl.rollouts.runner import EnvRunner, Step
from lrl.rollouts.stacking import final_values, stack_steps
from lrl.types import RandomKeys, Rollout


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """Describes one collection on one rank; all its random numbers follow from it."""

    seed: int
    """Seed of the run."""
    collection: int
    """Index of the collection in the run."""
    num_groups: int
    """Number of groups on this rank."""
    group_size: int
    """Number of episodes that start from the same state."""
    rank: int = 0
    share_noise: bool = False
    """Whether the episodes of a group also share the environment's transition noise."""
    max_turns: int | None = None
    """Truncates episodes after this many turns; None leaves it to the environment."""
    num_steps: int | None = None
    """Turns per environment, where episodes continue in the next collection; None plays whole episodes."""
    states: bool = False
    """Whether whole episodes number their observations, as :attr:`Rollout.state <lrl.types.Rollout.state>`."""

    @property
    def num_envs(self) -> int:
        """Number of environments on this rank."""
        return self.num_groups * self.group_size

    @property
    def env(self) -> np.ndarray:
        """Global environment indices, int64 ``(env,)``."""
        return self.rank * self.num_envs + np.arange(self.num_envs)

    @property
    def group(self) -> np.ndarray:
        """Global group indices, int64 ``(env,)``."""
        return self.env // self.group_size

    def episode(self, world_size: int) -> np.ndarray:
        """Return a number for each group that no other group of the run has, int64 ``(env,)``."""
        return self.collection * self.num_groups * world_size + self.group

    def keys(self, env: np.ndarray, turn: int) -> RandomKeys:
        """Name the random numbers of one turn of this collection.

        Args:
            env: global indices of the environments that take it, int64 ``(row,)``.
            turn: index of the turn in the collection.
        """
        turns = np.full(len(env), turn)
        return RandomKeys(seed=self.seed, purpose="rollout", collection=self.collection, env=env, turn=turns)


@final
class EpisodeCollector:
    """Collects one whole episode from each environment.

    Args:
        policy: decides in the environments whose episode is still running.
        envs: vectorised environments with ``AutoresetMode.DISABLED``.
        world_size: number of ranks that collect at the same time.
    """

    def __init__(self, policy: Policy, envs: VectorEnv, world_size: int = 1) -> None:
        self.policy, self.envs, self.world_size = policy, envs, world_size

    def collect(self, plan: CollectionPlan) -> Rollout:
        """Play until every episode has ended; an environment whose episode has ended is no longer active."""
        runner, active = EnvRunner(self.policy, self.envs), np.ones(plan.num_envs, dtype=bool)
        reset_seeds = seeds("reset", plan.seed, plan.collection, plan.group)
        noise_seeds = seeds("noise", plan.seed, plan.collection, plan.group if plan.share_noise else plan.env)
        steps: list[Step] = []
        values: list[Tensor] = []
        while active.any():
            runner.reset(reset_seeds, plan.episode(self.world_size), noise_seeds, idle=~active)
            rows = np.flatnonzero(active)
            step = runner.turn(plan.keys(plan.env[rows], len(steps)), rows, max_turns=plan.max_turns)
            steps.append(step)
            values.append(final_values(self.policy, runner, step))
            active[rows] = ~step.ended
        return stack_steps(steps, plan.group, values if self.policy.has_critic else None, plan.states)
