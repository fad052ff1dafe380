"""The only loop that plays vectorised environments, and the rollout of its steps.

Code that collects, evaluates, watches or records decides which environments take the next turn, which episodes they
play and which random numbers they use; :class:`EnvRunner` does everything else. :func:`stack_steps` makes a rollout of
its steps.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import iterate
from torch import Tensor

from lrl.envs.native import check_batch
from lrl.envs.text import text_of
from lrl.policies.actor import Actor
from lrl.types import Decisions, History, RandomKeys, Rollout, SamplingConfig

_EPISODE_METRICS = ("success", "episode_return", "episode_length")
"""Metrics of whole episodes, which are read at their last turn."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One turn in some environments; arrays have the shape ``(row,)``, one entry per environment, unless stated."""

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
    origin: np.ndarray
    """Seed, number and noise seed of the episode, see :attr:`EnvRunner.origin`, int64 ``(row, 3)``."""
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
        origin: seed, number and noise seed of each current episode, -1 without noise seed, int64 ``(env, 3)``.
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
        self.origin = np.zeros((self.num_envs, 3), dtype=np.int64)
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
        noise = np.full(self.num_envs, -1) if noise_seeds is None else noise_seeds
        self.origin = np.where(ended[:, None], np.stack([seeds, episodes, noise], axis=1), self.origin)
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
            origin=self.origin[rows],
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
        check_batch(space, self._name, self.origin[:, 0], self.lengths, observations, rewards)

    def _one_each(self, observations: Any) -> Sequence[Any]:
        """Return batched observations as a sequence with one element per environment."""
        if isinstance(self.envs.single_observation_space, (gym.spaces.Dict, gym.spaces.Tuple)):
            return list(iterate(self.envs.observation_space, observations))
        return observations


def _is_column(name: str, column: Any, num_envs: int) -> bool:
    """Return whether an entry of vectorised infos has one value per environment."""
    return not name.startswith("_") and isinstance(column, np.ndarray) and column.shape == (num_envs,)


def stack_steps(
    steps: Sequence[Step], group: np.ndarray, values: Sequence[Tensor] | None, states: bool = False
) -> Rollout:
    """Stack steps along the time axis.

    Args:
        steps: one step per turn of the rollout; at least one.
        group: global group index of each environment, int64 ``(env,)``.
        values: results of :func:`~lrl.training.collect.final_values` for each step; None without a critic.
        states: whether to number the observations by :func:`observation_key`.

    Returns:
        A rollout whose tensors are ``(time, env, ...)``, zero where an environment took no turn.
    """
    num_envs, decisions, rows = len(group), [step.decisions for step in steps], [step.rows for step in steps]
    cells = np.repeat(np.arange(len(steps)), [len(envs) for envs in rows]), np.concatenate(rows)

    def stack(tensors: Sequence[Tensor]) -> Tensor:
        """Stack tensors ``(row, ...)``, one per step, to one ``(time, env, ...)``."""
        return scatter(rows, tensors, num_envs)

    def stack_arrays(arrays: Sequence[np.ndarray]) -> Tensor:
        """Stack arrays ``(row,)``, one per step, to a tensor ``(time, env)``."""
        joined = np.concatenate(arrays)  # in the widest dtype of the steps
        out = np.zeros((len(steps), num_envs), joined.dtype)
        out[cells] = joined
        return torch.from_numpy(out)

    estimates = [decision.values for decision in decisions if decision.values is not None]
    sampled = [one.behaviour_logprobs for one in decisions if one.behaviour_logprobs is not None]
    return Rollout(
        inputs={name: stack([decision.inputs[name] for decision in decisions]) for name in decisions[0].inputs},
        response_mask=stack([decision.response_mask for decision in decisions]),
        logprobs=stack([decision.logprobs for decision in decisions]),
        behaviour_logprobs=stack(sampled) if sampled else None,
        values=stack(estimates) if estimates else None,
        rewards=stack_arrays([step.rewards for step in steps]).float(),
        terminated=stack_arrays([step.terminated for step in steps]),
        truncated=stack_arrays([step.truncated for step in steps]),
        active=stack_arrays([np.ones(len(envs), dtype=bool) for envs in rows]),
        turn=stack_arrays([step.turn for step in steps]),
        group=torch.from_numpy(group),
        observations=[_spread(step.rows, [text_of(seen) for seen in step.observations], num_envs) for step in steps],
        responses=[_spread(step.rows, step.decisions.actions, num_envs) for step in steps],
        metrics=turn_metrics(steps),
        final_values=None if values is None else stack(values),
        state=stack([_observation_keys(step.observations) for step in steps]) if states else None,
        origin=stack([torch.from_numpy(step.origin) for step in steps]),
    )


def scatter(rows: Sequence[np.ndarray], tensors: Sequence[Tensor], num_envs: int) -> Tensor:
    """Stack tensors ``(row, ...)`` to one ``(time, env, ...)``, zero where an environment has no row.

    Trailing axes of different length are padded on the right.

    Args:
        rows: environments of the rows at each time, int64 ``(row,)``.
        tensors: a tensor ``(row, ...)`` for each time.
        num_envs: size of the ``env`` axis.
    """
    first, times = tensors[0], list(zip(rows, tensors, strict=True))
    if all(len(envs) == num_envs and tensor.shape == first.shape for envs, tensor in times):
        return torch.stack(list(tensors))
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    out = torch.zeros(len(times), num_envs, *shape, dtype=first.dtype, device=first.device)
    for time, (envs, tensor) in enumerate(times):
        window = (time, torch.from_numpy(envs).to(first.device), *(slice(size) for size in tensor.shape[1:]))
        out[window] = tensor
    return out


def turn_metrics(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the metrics in the infos, each float32 ``(turn,)``, or ``(episode,)`` for metrics of whole episodes.

    Terms of a reward are NaN for turns that did not report them.
    """
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    terms = {name for step in steps for name in step.infos if name.startswith("reward/")}
    for step in steps:
        missing = np.full(len(step.rows), np.nan)
        reported = {name: column for name, column in step.infos.items() if column.dtype.kind in "bfiu"}
        reported = dict.fromkeys(terms, missing) | reported
        reported |= {"episode_return": step.episode_return, "episode_length": step.turn + 1}
        for name, column in reported.items():
            columns[name].append(column[step.ended] if name in _EPISODE_METRICS else column)
    return {name: torch.from_numpy(np.concatenate(columns[name])).float() for name in sorted(columns)}


def observation_key(observation: Any) -> int:
    """Return a 64-bit hash of an observation, which is the same in every process and on every machine.

    Args:
        observation: a text, a number, an array, or a dict or tuple of these.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(observation):
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _parts(observation: Any) -> Iterator[bytes]:
    """Yield the parts of an observation in a canonical order."""
    if isinstance(observation, str):
        yield text_of(observation).encode(errors="surrogatepass")
    elif isinstance(observation, Mapping):
        for name in sorted(observation):
            yield str(name).encode(errors="surrogatepass")
            yield from _parts(observation[name])
    elif isinstance(observation, tuple):
        for part in observation:
            yield from _parts(part)
    else:
        yield (np.asarray(observation) + 0).tobytes()  # -0.0 equals 0.0


def _observation_keys(observations: Sequence[Any]) -> Tensor:
    """Return the :func:`observation_key` of each observation, int64 ``(row,)``."""
    return torch.tensor([observation_key(observation) for observation in observations], dtype=torch.int64)


def _spread(rows: np.ndarray, items: Sequence[Any], num_envs: int) -> list[Any]:
    """Return one text or native action per environment; an empty text where it took no turn."""
    out: list[Any] = [""] * num_envs
    for row, item in zip(rows, items, strict=True):
        out[row] = item
    return out
