"""The only loop that plays vectorised environments.

Code that collects, evaluates, watches or records decides which environments take the next turn, which episodes they
play and which random numbers they use; :class:`EnvRunner` does everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import iterate

from lrl.envs.native import check_batch
from lrl.policies.actor import Actor
from lrl.types import Decisions, History, RandomKeys, SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Step:
    """One turn in some environments; all arrays have the shape ``(row,)``, one entry per environment."""

    rows: np.ndarray
    """Indices of the environments that took the turn, int64, ascending."""
    observations: Sequence[Any]
    """Observations before the turn, one per row."""
    decisions: Decisions
    """Actions of the rows, and what the actor recorded with them."""
    rewards: np.ndarray
    """Rewards of the turn, float64."""
    terminated: np.ndarray
    """Whether the environment terminated the episode, bool."""
    truncated: np.ndarray
    """Whether the environment or ``max_turns`` truncated the episode, bool."""
    turn: np.ndarray
    """Index of the turn in its episode, int64."""
    episode_return: np.ndarray
    """Undiscounted return of the episode up to and including this turn, float64."""
    infos: Mapping[str, np.ndarray]
    """Infos of the environments after the turn, by name."""

    @property
    def ended(self) -> np.ndarray:
        """Return whether the turn ended its episode, bool ``(row,)``."""
        return self.terminated | self.truncated


@final
class EnvRunner:
    """Plays vectorised environments and stores the state of their current episodes.

    Args:
        actor: actor that chooses the actions.
        envs: vectorised environments with ``AutoresetMode.DISABLED``. A reset with a mask must return the current
            observations of the other environments unchanged, as Gymnasium's own vectorised environments do. If ``envs``
            has an attribute ``idle``, environments marked there are not stepped. If it has a true attribute
            ``steps_ended_copies``, environments may be stepped after the end of an episode. Otherwise, as for those of
            Gymnasium, all ended environments must be reset.

    Attributes:
        observations: the current observation of each environment.
        memory: the actor's history of each current episode.
        lengths: number of turns so far in each current episode, int64 ``(env,)``.
        seeds: seed of each current episode, int64 ``(env,)``.
        returns: undiscounted return so far of each current episode, float64 ``(env,)``.
        ended: environments whose episode has ended, bool ``(env,)``; at first all of them.

    Raises:
        EnvironmentFailedError: If an environment returns a number that is not finite, or fails in another way, in
            :meth:`reset` or :meth:`step`.
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
        """Start a new episode in every environment whose episode has ended, if there are any.

        Args:
            seeds: seed for each environment, int64 ``(env,)``.
            episodes: number of the episode that each environment plays, int64 ``(env,)``, which is passed as
                ``options["episode"]``.
            noise_seeds: seeds of the random transitions, int64 ``(env,)``; None lets the environments derive them from
                ``seeds``.
            idle: environments that are not reset if ``envs`` supports it, bool ``(env,)``; None resets all.
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
        past_turns = infos.get("past_turns", [()] * self.num_envs)  # if an episode starts at a later turn
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
        """Let the actor choose one action for each of some environments, and step these environments.

        Args:
            keys: keys of the random numbers of the rows.
            rows: indices of the environments that take the turn, int64 ``(row,)``, ascending; None selects all. Other
                environments whose episode has not ended are stepped as well, and their results are ignored.
            sampling: overrides the actor's sampling settings.
            max_turns: number of turns after which episodes are truncated; None uses only the limit of the environment.
        """
        rows = np.arange(self.num_envs) if rows is None else rows
        turn, (observations, memory) = self.lengths[rows], self.seen(rows)
        decisions = self.actor.act(observations, memory, keys, sampling or self.actor.sampling)
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
        """Step all environments whose episode has not ended; those not in ``rows`` take the first action.

        Args:
            actions: one text or native action per row.
            rows: indices of the environments of the actions, int64 ``(row,)``.
            max_turns: number of turns after which episodes are truncated; None uses only the limit of the environment.

        Returns:
            Rewards, terminated and truncated, each ``(env,)``, and the infos of the environments by name.
        """
        given = actions
        if len(rows) < self.num_envs:
            given = [actions[0]] * self.num_envs
            for row, action in zip(rows, actions, strict=True):
                given[row] = action
        batched = tuple(given) if isinstance(given[0], str) else np.asarray(given)
        envs: Any = self.envs
        if hasattr(envs, "idle"):
            envs.idle = self.ended.copy()  # includes episodes that max_turns truncated
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
        """Check that all numbers are finite.

        Raises:
            EnvironmentFailedError: If one is not.
        """
        space = self.envs.single_observation_space
        check_batch(space, self._name, self.seeds, self.lengths, observations, rewards)

    def _one_each(self, observations: Any) -> Sequence[Any]:
        """Return batched observations as a sequence with one element per environment."""
        if isinstance(self.envs.single_observation_space, (gym.spaces.Dict, gym.spaces.Tuple)):
            return list(iterate(self.envs.observation_space, observations))
        return observations


def _is_column(name: str, column: Any, num_envs: int) -> bool:
    """Return whether an entry of vectorised infos has one value per environment."""
    return not name.startswith("_") and isinstance(column, np.ndarray) and column.shape == (num_envs,)
