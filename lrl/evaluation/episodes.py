"""Evaluation on exactly N episodes, one seed each, all played to their end.

Using the first N episodes that finish would favour short ones. Here the index of an episode determines its seed and
random numbers, so the result does not depend on the number of parallel environments, except for rounding in batches of
different shapes, which changes 1.5e-8 of the tokens sampled from the embedded model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torchmetrics import Metric

from lrl.envs.factory import EnvFactory
from lrl.envs.native import SuccessAt
from lrl.evaluation.statistics import (
    bootstrap_interval,
    interquartile_mean,
    json_bounds,
    ratio_interval,
    wilson_interval,
)
from lrl.functional.distributed import all_gather_objects
from lrl.policies.actor import Actor
from lrl.policies.retrying import ResponseCache
from lrl.ranges import check_seed
from lrl.rollouts.runner import EnvRunner, Step
from lrl.types import RandomKeys, SamplingConfig

EpisodeStep = tuple[np.ndarray, Step]
"""A step of some episodes, with the position of each in the array of episode indices, int64 ``(row,)``."""


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
    """Whether the episode was a success, bool; False if the environment does not report success."""
    invalid_actions: np.ndarray
    """Number of turns without a legal action, int64."""
    seconds: float
    """Wall-clock time of acting and stepping."""
    has_success: bool = True
    """Whether the environment reports success; a data set without Q-values does not."""
    success_at: SuccessAt = "last_step"
    """Which step decided whether an episode is a success: the last one, or any."""

    @classmethod
    def of(
        cls, seed: int, index: np.ndarray, steps: Iterable[EpisodeStep], success_at: SuccessAt = "last_step"
    ) -> EpisodeResults:
        """Compute the results from the steps of episodes.

        Args:
            seed: seed of episode 0.
            index: indices of the episodes, int64 ``(episode,)``.
            steps: result of :func:`play_episodes`.
            success_at: which steps of an episode decide on success.
        """
        started, has_success = time.perf_counter(), False
        returns, lengths = np.zeros(len(index)), np.zeros(len(index), dtype=np.int64)
        successes, invalid_actions = np.zeros(len(index), dtype=bool), np.zeros(len(index), dtype=np.int64)
        for rows, step in steps:
            returns[rows], lengths[rows] = step.episode_return, step.turn + 1
            successes[rows] = step.infos.get("success", False)
            has_success |= "success" in step.infos
            invalid_actions[rows] += ~np.asarray(step.infos.get("action_valid", True), dtype=bool)
        # The episodes are played while the loop iterates over them, so the time below includes acting and stepping.
        return cls(
            seed=seed,
            index=index,
            returns=returns,
            lengths=lengths,
            successes=successes,
            invalid_actions=invalid_actions,
            seconds=time.perf_counter() - started,
            has_success=has_success,
            success_at=success_at,
        )

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        """Return the number of episodes and the means; the arrays have too many values to print."""
        return f"EpisodeResults(episodes={len(self)}, {', '.join(f'{k}={v:.4g}' for k, v in self.means().items())})"

    def to(self, device: torch.device | str) -> EpisodeResults:
        """Return the results unchanged; Lightning calls it on results of ``predict_step``."""
        return self

    @property
    def env_steps_per_second(self) -> float:
        """Turns per second of wall-clock time."""
        return float(self.lengths.sum() / max(self.seconds, 1e-9))

    @property
    def success_rule(self) -> str:
        """Description of which steps decided on success; empty if the environment does not report success."""
        return f"success at {'any' if self.success_at == 'any_step' else 'the last'} step" if self.has_success else ""

    def means(self) -> dict[str, float]:
        """Return the metrics of :class:`EpisodeMetrics` over these episodes."""
        metrics = EpisodeMetrics(sync_on_compute=False)
        metrics.update(self)
        return {name: float(value) for name, value in metrics.compute().items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95% intervals of :meth:`means`: Wilson's for success, a bootstrap over episodes for the others.

        A bootstrap interval stays within the range of the observed returns, whose bounds are not known in general.
        """
        success = {"success_rate": wilson_interval(int(self.successes.sum()), len(self))} if self.has_success else {}
        return {
            "return": bootstrap_interval(self.returns),
            "length": bootstrap_interval(self.lengths),
            **success,
            "invalid_action_rate": ratio_interval(self.invalid_actions, self.lengths),
        }

    def report(self, env_id: str, policy: str) -> dict[str, Any]:
        """Return all results with the keys of the JSON file; missing values are None, or ``[None, None]``."""
        means, intervals = self.means(), self.intervals()
        return {
            "env_id": env_id,
            "policy": policy,
            "episodes": len(self),
            "seed": self.seed,
            "return_mean": means["return"],
            "return_ci95": json_bounds(intervals["return"]),
            "return_iqm": float(interquartile_mean(self.returns)),
            "length_mean": means["length"],
            "success_at": self.success_at if self.has_success else None,
            "success_rate": means.get("success_rate"),
            "success_ci95": list(intervals.get("success_rate", (None, None))),
            "invalid_action_rate": means["invalid_action_rate"],
            "env_steps_per_second": self.env_steps_per_second,
            "per_episode": [self._episode(row) for row in range(len(self))],
        }

    def _episode(self, row: int) -> dict[str, Any]:
        metrics = self.returns[row], self.lengths[row], self.successes[row], self.invalid_actions[row]
        named = zip(("return", "length", "success", "invalid_actions"), metrics, strict=True)
        figures = {name: value.item() for name, value in named if name != "success" or self.has_success}
        return {"seed": int(self.seed + self.index[row])} | figures


class EpisodeMetrics(Metric):
    """Computes mean return and length, success rate, and the rate of turns without a legal action.

    Args:
        options: arguments of :class:`torchmetrics.Metric`; ``sync_on_compute=False`` uses this rank's episodes only.
    """

    full_state_update = False
    totals: Tensor
    """Number of episodes, returns, turns, episodes with a reported success, successes, invalid actions; ``(6,)``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("totals", torch.zeros(6, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, results: EpisodeResults) -> None:
        """Add episodes that were played to their end; there may be none."""
        sums = [array.sum() for array in (results.returns, results.lengths, results.successes, results.invalid_actions)]
        judged = len(results) * results.has_success
        self.totals = self.totals + self.totals.new_tensor([len(results), *sums[:2], judged, *sums[2:]])

    def compute(self) -> dict[str, Tensor]:
        """Return ``return``, ``length``, ``success_rate`` and ``invalid_action_rate``, each a float64 scalar ``()``.

        There is no ``success_rate`` if the environment does not report success.
        """
        episodes, returns, turns, judged, successes, invalid_actions = self.totals
        return {
            "return": returns / episodes,
            "length": turns / episodes,
            **({"success_rate": successes / judged} if judged else {}),
            "invalid_action_rate": invalid_actions / turns,
        }


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
        policy: configured policy that is connected to the environment's codec.
        env_factory: factory of the environments.
        episodes: number of episodes over all ranks.
        seed: seed of the first episode and of the policy's random numbers.
        num_envs: number of parallel environments, which affects only the speed.
        sampling: overrides the policy's sampling settings.
        rank: index of this process, which plays the episodes ``i`` with ``i % world_size == rank``.
        world_size: number of processes that evaluate together; see :func:`merge`.
        on_episode: called at the end of each episode.
        on_step: called after each step with the indices of its episodes, int64 ``(row,)``, and the step.

    Raises:
        ValueError: If ``episodes`` or ``num_envs`` is not positive, or ``seed`` is out of range.
    """
    for name, value in {"episodes": episodes, "num_envs": num_envs}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    check_seed("seed", seed, episodes)
    index = np.arange(rank, episodes, world_size)
    if not len(index):
        return EpisodeResults.of(seed, index, (), env_factory.success_at)
    envs = env_factory.make(min(num_envs, len(index)), policy.response_format)

    def steps() -> Iterator[EpisodeStep]:
        """Yield the steps of all episodes, and report each step and each finished episode."""
        for rows, step in play_episodes(policy, envs, index, seed, sampling):
            yield rows, step
            if on_step is not None:
                on_step(index[rows], step)
            if on_episode is not None:
                for _ in range(int(step.ended.sum())):
                    on_episode()

    try:
        return EpisodeResults.of(seed, index, steps(), env_factory.success_at)
    finally:
        policy.end_episodes()
        envs.close()


def play_episodes(
    policy: Actor, envs: VectorEnv, index: np.ndarray, seed: int, sampling: SamplingConfig | None = None
) -> Iterator[EpisodeStep]:
    """Play seeded episodes to their end, and yield each step.

    An environment whose episode has ended plays the next one of ``index``; when all have started, it is idle.

    Args:
        policy: policy that acts.
        envs: environments, at most as many as episodes.
        index: indices of the episodes, int64 ``(episode,)``.
        seed: seed of episode 0 and of the policy's random numbers.
        sampling: overrides the policy's sampling settings.
    """
    greedy = policy.greedy_is_reproducible and sampling is not None and sampling.temperature == 0
    runner = EnvRunner(ResponseCache(policy) if greedy else policy, envs)
    row, begun = np.arange(runner.num_envs), runner.num_envs  # row of `index` that each environment plays
    active = np.ones(runner.num_envs, dtype=bool)
    while active.any():
        runner.reset(seed + index[row], index[row], idle=~active)
        slots = np.flatnonzero(active)
        env, turn = index[row[slots]], runner.lengths[slots]
        keys = RandomKeys(seed=seed, purpose="evaluation", collection=0, env=env, turn=turn)
        step = runner.turn(keys, slots, sampling)
        yield row[slots], step
        for slot in slots[step.ended]:
            active[slot] = begun < len(index)
            if active[slot]:
                row[slot], begun = begun, begun + 1


def merge(parts: Sequence[EpisodeResults]) -> EpisodeResults:
    """Join the results of several ranks in the order of their seeds; the time is that of the slowest rank."""
    order = np.argsort(np.concatenate([part.index for part in parts]), kind="stable")
    names = ("index", "returns", "lengths", "successes", "invalid_actions")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}
    has_success, seconds = any(part.has_success for part in parts), max(part.seconds for part in parts)
    return replace(parts[0], seconds=seconds, has_success=has_success, **arrays)


def gather(results: EpisodeResults) -> EpisodeResults:
    """Return the results of all ranks on every rank."""
    parts = all_gather_objects(results)
    return merge(parts) if len(parts) > 1 else results
