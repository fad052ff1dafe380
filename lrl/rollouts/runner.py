"""The one loop that plays vectorised environments: reset, act, step.

Whoever collects, evaluates, watches or records decides which environments take the next turn, which episode each of
them plays and what names its random numbers; everything else is done by :class:`EnvRunner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import iterate

from lrl.envs.boundary import check_batch
from lrl.policies.actor import Actor
from lrl.types import Decisions, History, RandomKeys, SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Step:
    """Holds one turn of some of the environments; arrays are ``(row,)``."""

    rows: np.ndarray
    """The environments that took the turn, int64, ascending."""
    observations: Sequence[Any]
    """What each of them observed before the turn."""
    decisions: Decisions
    rewards: np.ndarray
    """float64."""
    terminated: np.ndarray
    """bool."""
    truncated: np.ndarray
    """bool, by the environment or by ``max_turns``."""
    turn: np.ndarray
    """Index of the turn in its episode, int64."""
    episode_return: np.ndarray
    """Undiscounted return of the episode up to and with this turn, float64."""
    infos: Mapping[str, np.ndarray]
    """What the environments report, by name."""

    @property
    def ended(self) -> np.ndarray:
        """Return whether the turn ended its episode, bool ``(row,)``."""
        return self.terminated | self.truncated


@final
class EnvRunner:
    """Plays vectorised environments and keeps what belongs to their current episodes.

    Args:
        actor: decides.
        envs: vectorised environments with ``AutoresetMode.DISABLED``. A reset with a mask returns the current
            observations of the other environments unchanged, as Gymnasium's own vectorised environments do. Those that
            have an attribute ``idle`` leave out the environments that it marks; others with ``steps_ended_copies`` may
            be stepped after the end of an episode; the rest, such as Gymnasium's, must all be reset.

    Attributes:
        observations: the current observation of each environment.
        memory: what the actor remembers of each current episode.
        lengths: turns of each current episode, int64 ``(env,)``.
        seeds: seed of each current episode, int64 ``(env,)``.
        returns: undiscounted return of each current episode, float64 ``(env,)``.
        ended: environments whose episode has ended, bool ``(env,)``; at first all of them.

    Raises:
        EnvironmentFailedError: by :meth:`reset` and :meth:`step`, if an environment returns a number that is not finite
            or fails in another way.
    """

    def __init__(self, actor: Actor, envs: VectorEnv) -> None:
        self.actor, self.envs, self.num_envs = actor, envs, envs.num_envs
        self.observations: Sequence[Any] = ()
        self.memory: list[History] = [()] * self.num_envs
        self.lengths, self.returns = np.zeros(self.num_envs, dtype=np.int64), np.zeros(self.num_envs)
        self.seeds = np.zeros(self.num_envs, dtype=np.int64)
        self.ended = np.ones(self.num_envs, dtype=bool)
        self._can_idle = bool(getattr(envs, "steps_ended_copies", False))
        spec = getattr(envs, "spec", None)
        self._name = getattr(envs, "name", None) or (type(envs).__name__ if spec is None else spec.id)
        actor.prepare(envs)

    def reset(
        self,
        seeds: np.ndarray,
        episodes: np.ndarray,
        noise_seeds: np.ndarray | None = None,
        idle: np.ndarray | None = None,
    ) -> None:
        """Begin a new episode in every environment whose episode has ended; do nothing if there is none.

        Args:
            seeds: one for each environment, int64 ``(env,)``.
            episodes: number of the episode that each environment plays, int64 ``(env,)``; environments find it under
                ``options["episode"]``.
            noise_seeds: seeds of the transitions, int64 ``(env,)``; None derives them from ``seeds``.
            idle: environments that begin no episode, bool ``(env,)``, where ``envs`` can leave them out; None: none.
        """
        ended = self.ended if idle is None or not self._can_idle else self.ended & ~idle
        if not ended.any():
            return
        envs: Any = self.envs  # Gymnasium types neither set_attr nor one seed for each environment
        if noise_seeds is not None:
            envs.set_attr("noise_seed", noise_seeds.tolist())
        options = {"episode": episodes} if ended.all() else {"episode": episodes, "reset_mask": ended}
        observations, infos = envs.reset(seed=seeds.tolist(), options=options)
        self.seeds = np.where(ended, seeds, self.seeds)
        self.lengths, self.returns = np.where(ended, 0, self.lengths), np.where(ended, 0.0, self.returns)
        self._check(observations)
        self.observations = self._one_each(observations)
        past_turns = infos.get("past_turns", [()] * self.num_envs)  # an episode may begin at a later turn
        known = zip(self.memory, past_turns, ended, strict=True)
        self.memory = [past if new else history for history, past, new in known]
        self.ended = self.ended & ~ended

    def seen(self, rows: np.ndarray) -> tuple[Sequence[Any], list[History]]:
        """Return the current observations and the memories of some environments.

        Args:
            rows: indices of the environments, int64 ``(row,)``, ascending.
        """
        if len(rows) == self.num_envs:
            return self.observations, list(self.memory)
        return [self.observations[row] for row in rows], [self.memory[row] for row in rows]

    def turn(
        self,
        keys: RandomKeys,
        rows: np.ndarray | None = None,
        sampling: SamplingConfig | None = None,
        max_turns: int | None = None,
    ) -> Step:
        """Let the actor decide once in some environments, and step.

        Args:
            keys: name the random numbers of the rows.
            rows: the environments that take the turn, int64 ``(row,)``, ascending; None takes all. Others whose episode
                is running are stepped as well, and what they return is ignored.
            sampling: overrides the actor's own.
            max_turns: truncates episodes after this many turns; None leaves it to the environment.
        """
        rows = np.arange(self.num_envs) if rows is None else rows
        turn, (observations, memory) = self.lengths[rows], self.seen(rows)
        decisions = self.actor.act(observations, memory, keys, sampling)
        rewards, terminated, truncated, infos = self.step(decisions.actions, rows, max_turns)
        for row, history in zip(rows, decisions.memory, strict=True):
            self.memory[row] = history
        return Step(
            rows=rows,
            observations=observations,
            decisions=decisions,
            rewards=rewards[rows],
            terminated=terminated[rows],
            truncated=truncated[rows],
            turn=turn,
            episode_return=self.returns[rows],
            infos={name: column[rows] for name, column in infos.items() if _is_column(name, column, self.num_envs)},
        )

    def step(
        self, actions: Sequence[Any], rows: np.ndarray, max_turns: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Mapping[str, Any]]:
        """Step all environments whose episode is running, with actions for some; the others take the first action.

        Args:
            actions: one per row, texts or native actions.
            rows: the environments that the actions are for, int64 ``(row,)``.
            max_turns: truncates episodes after this many turns.

        Returns:
            Rewards, terminated and truncated, each ``(env,)``, and infos.
        """
        given = actions
        if len(rows) < self.num_envs:
            given = [actions[0]] * self.num_envs
            for row, action in zip(rows, actions, strict=True):
                given[row] = action
        batched = tuple(given) if isinstance(given[0], str) else np.asarray(given)
        envs: Any = self.envs
        if hasattr(envs, "idle"):
            envs.idle = self.ended.copy()  # includes episodes that max_turns has cut
        observations, rewards, terminated, truncated, infos = envs.step(batched)
        running = ~self.ended
        self.returns, self.lengths = self.returns + np.where(running, rewards, 0.0), self.lengths + running
        self._check(observations, rewards)
        self.observations = self._one_each(observations)
        if max_turns is not None:
            truncated = truncated | ((self.lengths >= max_turns) & ~terminated)
        self.ended = self.ended | terminated | truncated
        return rewards, terminated, truncated, infos

    def _check(self, observations: Any, rewards: np.ndarray | None = None) -> None:
        """Raise if a number is not finite."""
        space = self.envs.single_observation_space
        check_batch(space, self._name, self.seeds, self.lengths, observations, rewards)

    def _one_each(self, observations: Any) -> Sequence[Any]:
        """Return batched observations as a sequence with one element for each environment."""
        if isinstance(self.envs.single_observation_space, (gym.spaces.Dict, gym.spaces.Tuple)):
            return list(iterate(self.envs.observation_space, observations))
        return observations


def _is_column(name: str, column: Any, num_envs: int) -> bool:
    """Return whether an entry of vectorised infos has one value for each environment."""
    return not name.startswith("_") and isinstance(column, np.ndarray) and column.shape == (num_envs,)
