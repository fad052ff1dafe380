"""Play exactly N episodes, one seed each, all to their end.

Taking the first N episodes that finish would favour short ones. Here the index of an episode determines its seed, and
with the turn its random numbers, so the result does not depend on how many environments run side by side, except for
rounding in batches of other shapes: with the embedded model that changes 1.5e-8 of the sampled tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from lrl.envs.factory import EnvFactory
from lrl.evaluation.metrics import EpisodeMetrics
from lrl.evaluation.statistics import bootstrap_interval, interquartile_mean, ratio_interval, wilson_interval
from lrl.policies.actor import Actor
from lrl.rollouts.runner import EnvRunner, Step
from lrl.types import Decisions, History, RandomKeys, SamplingConfig

EpisodeStep = tuple[np.ndarray, Step]
"""A step, and the row of each of its episodes in the evaluation's index, int64 ``(row,)``."""

_CACHED = 20_000
"""Greedy responses after which the cache is emptied."""


@dataclass(frozen=True, kw_only=True)
class EpisodeResults:
    """Holds the results of N episodes in the order of their seeds; arrays are ``(episode,)``."""

    seed: int
    """Seed of episode 0; episode ``i`` was reset with ``seed + i``."""
    index: np.ndarray
    """Indices of the episodes, int64."""
    returns: np.ndarray
    """Undiscounted returns, penalties for invalid actions included, float64."""
    lengths: np.ndarray
    """Number of turns, int64."""
    successes: np.ndarray
    """Whether the environment called the episode a success, bool."""
    invalid_actions: np.ndarray
    """Number of turns without a legal action, int64."""
    seconds: float
    """Wall-clock time of acting and stepping."""

    @classmethod
    def of(cls, seed: int, index: np.ndarray, steps: Iterable[EpisodeStep]) -> EpisodeResults:
        """Add up the steps of episodes.

        Args:
            seed: seed of episode 0.
            index: indices of the episodes, int64 ``(episode,)``.
            steps: see :func:`play_episodes`.
        """
        started = time.perf_counter()
        returns, lengths = np.zeros(len(index)), np.zeros(len(index), dtype=np.int64)
        successes, invalid_actions = np.zeros(len(index), dtype=bool), np.zeros(len(index), dtype=np.int64)
        for rows, step in steps:
            returns[rows], lengths[rows] = step.episode_return, step.turn + 1
            successes[rows] = step.infos.get("success", False)
            invalid_actions[rows] += ~np.asarray(step.infos.get("action_valid", True), dtype=bool)
        return cls(
            seed=seed,
            index=index,
            returns=returns,
            lengths=lengths,
            successes=successes,
            invalid_actions=invalid_actions,
            seconds=time.perf_counter() - started,
        )

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device | str) -> EpisodeResults:
        """Return itself: Lightning moves what ``predict_step`` returns, and these arrays live on the CPU."""
        return self

    @property
    def env_steps_per_second(self) -> float:
        """Turns per second of wall-clock time."""
        return float(self.lengths.sum() / max(self.seconds, 1e-9))

    def means(self) -> dict[str, float]:
        """Return the metrics of :class:`~lrl.evaluation.metrics.EpisodeMetrics` over these episodes."""
        metrics = EpisodeMetrics(sync_on_compute=False)
        metrics.update(self)
        return {name: float(value) for name, value in metrics.compute().items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95% intervals of :meth:`means`: Wilson's for success, a bootstrap over episodes for the others.

        The bounds of an environment's returns are not known, and a bootstrap stays within the observed returns.
        """
        return {
            "return": bootstrap_interval(self.returns),
            "length": bootstrap_interval(self.lengths),
            "success_rate": wilson_interval(int(self.successes.sum()), len(self)),
            "invalid_action_rate": ratio_interval(self.invalid_actions, self.lengths),
        }

    def report(self, env_id: str, policy: str) -> dict[str, Any]:
        """Return everything under the names of the JSON file; an interval that does not exist is ``[None, None]``."""
        means, intervals = self.means(), self.intervals()
        return {
            "env_id": env_id,
            "policy": policy,
            "episodes": len(self),
            "seed": self.seed,
            "return_mean": means["return"],
            "return_ci95": [None if np.isnan(bound) else bound for bound in intervals["return"]],
            "return_iqm": float(interquartile_mean(self.returns)),
            "length_mean": means["length"],
            "success_rate": means["success_rate"],
            "success_ci95": list(intervals["success_rate"]),
            "invalid_action_rate": means["invalid_action_rate"],
            "env_steps_per_second": self.env_steps_per_second,
            "per_episode": [self._episode(row) for row in range(len(self))],
        }

    def _episode(self, row: int) -> dict[str, Any]:
        metrics = self.returns[row], self.lengths[row], self.successes[row], self.invalid_actions[row]
        named = zip(("return", "length", "success", "invalid_actions"), metrics, strict=True)
        return {"seed": int(self.seed + self.index[row])} | {name: value.item() for name, value in named}


def evaluate_policy(
    policy: Actor,
    env_factory: EnvFactory,
    episodes: int,
    seed: int,
    num_envs: int,
    sampling: SamplingConfig | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    on_episode: Callable[[], None] | None = None,
    on_step: Callable[[np.ndarray, Step], None] | None = None,
) -> EpisodeResults:
    """Play episodes ``0 .. episodes - 1``; episode ``i`` is reset with ``seed + i``.

    Args:
        policy: connected to the environment's codec, and configured.
        env_factory: makes the environments.
        episodes: number of episodes over all ranks.
        seed: seed of the first episode, and of the policy's random numbers.
        num_envs: environments side by side; changes the speed and nothing else.
        sampling: overrides the policy's own.
        rank: this process plays the episodes ``i`` with ``i % world_size == rank``.
        world_size: number of processes that evaluate together; see :func:`merge`.
        on_episode: called at the end of each episode.
        on_step: called after each step with the indices of its episodes, int64 ``(row,)``.

    Raises:
        ValueError: ``episodes`` or ``num_envs`` is not positive.
    """
    for name, value in {"episodes": episodes, "num_envs": num_envs}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    index = np.arange(rank, episodes, world_size)
    if not len(index):
        return EpisodeResults.of(seed, index, ())
    envs = env_factory.make(min(num_envs, len(index)), policy.response_format)

    def steps() -> Iterator[EpisodeStep]:
        for rows, step in play_episodes(policy, envs, index, seed, sampling):
            yield rows, step
            if on_step is not None:
                on_step(index[rows], step)
            if on_episode is not None:
                for _ in range(int(step.ended.sum())):
                    on_episode()

    try:
        return EpisodeResults.of(seed, index, steps())
    finally:
        envs.close()


def play_episodes(
    policy: Actor, envs: VectorEnv, index: np.ndarray, seed: int, sampling: SamplingConfig | None = None
) -> Iterator[EpisodeStep]:
    """Play seeded episodes to their end, and yield each step.

    An environment whose episode has ended plays the next one of ``index``; when all have begun, it idles.

    Args:
        policy: decides.
        envs: not more environments than episodes.
        index: indices of the episodes, int64 ``(episode,)``.
        seed: seed of episode 0, and of the policy's random numbers.
        sampling: overrides the policy's own.
    """
    greedy = policy.greedy_is_reproducible and sampling is not None and sampling.temperature == 0
    runner = EnvRunner(ResponseCache(policy) if greedy else policy, envs)
    row, begun = np.arange(runner.num_envs), runner.num_envs  # row of `index` that each environment plays
    active = np.ones(runner.num_envs, dtype=bool)
    while active.any():
        runner.reset(seed + index[row], index[row])
        slots = np.flatnonzero(active)
        env, turn = index[row[slots]], runner.lengths[slots]
        keys = RandomKeys(seed=seed, purpose="evaluation", collection=0, env=env, turn=turn)
        step = runner.turn(keys, slots, sampling)
        yield row[slots], step
        for slot in slots[step.ended]:
            active[slot] = begun < len(index)
            if active[slot]:
                row[slot], begun = begun, begun + 1


@final
class ResponseCache(Actor):
    """Acts as a greedy policy does, but asks it only once for the same observation and history.

    Args:
        actor: its actions at temperature 0 depend on nothing else (``greedy_is_reproducible``).
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor = actor
        self._responses: dict[tuple[Any, History], tuple[Any, History]] = {}

    @property
    def response_format(self) -> str | None:
        """The response format of the other actor."""
        return self.actor.response_format

    def prepare(self, envs: VectorEnv) -> None:
        """Prepare the environments for the other actor."""
        self.actor.prepare(envs)

    def act(
        self,
        observations: Sequence[Any],
        memory: list[History],
        keys: RandomKeys,
        sampling: SamplingConfig | None = None,
    ) -> Decisions:
        """Return the greedy responses; no token counts as sampled."""
        if len(self._responses) > _CACHED:
            self._responses.clear()
        states = list(zip(observations, memory, strict=True))
        new = {state: row for row, state in enumerate(states) if state not in self._responses}
        if new:
            rows = list(new.values())
            some = replace(keys, env=keys.env[rows], turn=keys.turn[rows])
            decisions = self.actor.act([seen for seen, _ in new], [history for _, history in new], some, sampling)
            self._responses.update(zip(new, zip(decisions.actions, decisions.memory, strict=True), strict=True))
        responses, histories = zip(*(self._responses[state] for state in states), strict=True)
        none = torch.zeros(len(states), 0)
        return Decisions(actions=responses, inputs={}, response_mask=none.bool(), logprobs=none, memory=list(histories))


def merge(parts: Sequence[EpisodeResults]) -> EpisodeResults:
    """Join the results of several ranks in the order of their seeds; the time is that of the slowest rank."""
    order = np.argsort(np.concatenate([part.index for part in parts]), kind="stable")
    names = ("index", "returns", "lengths", "successes", "invalid_actions")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}
    return EpisodeResults(seed=parts[0].seed, seconds=max(part.seconds for part in parts), **arrays)


def gather(results: EpisodeResults) -> EpisodeResults:
    """Return the results of all ranks on every rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return results
    parts: list[EpisodeResults] = [results] * dist.get_world_size()
    dist.all_gather_object(parts, results)
    return merge(parts)
