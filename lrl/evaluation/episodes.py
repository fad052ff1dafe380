"""Exactly N episodes, one seed each, all played to their end.

Taking the first N episodes that finish would favour short ones. Here episode ``i`` is named by its seed, and its
random numbers by ``i`` and the turn, so the result does not depend on how many environments run side by side, but for
the rounding of batches of other shapes: of the embedded model it changes 1.5e-8 of the sampled tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from lrl.envs.factory import EnvFactory
from lrl.evaluation.metrics import EpisodeMetrics
from lrl.evaluation.statistics import bootstrap_interval, interquartile_mean, ratio_interval, wilson_interval
from lrl.policies.actor import Actor
from lrl.rollouts.episodes import rows_of
from lrl.types import History, RandomKeys, SamplingConfig

Answer = tuple[Any, History]
"""An action, and what the episode's policy remembers from now on."""

_REMEMBERED = 20_000
"""Answers of a greedy policy after which all are forgotten."""


@dataclass(frozen=True, kw_only=True)
class EpisodeResults:
    """What N episodes gave, in the order of their seeds; arrays are ``(episode,)``."""

    seed: int
    """Seed of episode 0; episode ``i`` was reset with ``seed + i``."""
    index: np.ndarray
    """Which episodes these are, int64."""
    returns: np.ndarray
    """Undiscounted returns, penalties for invalid actions included, float64."""
    lengths: np.ndarray
    """Turns, int64."""
    successes: np.ndarray
    """bool."""
    invalid_actions: np.ndarray
    """Turns that were no legal action, int64."""
    seconds: float
    """Wall-clock time of acting and stepping."""

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: Any) -> EpisodeResults:
        """Return itself: Lightning moves what ``predict_step`` returns, and these arrays live on the CPU."""
        return self

    @property
    def env_steps_per_second(self) -> float:
        """Turns per second of wall-clock time."""
        return float(self.lengths.sum() / max(self.seconds, 1e-9))

    def means(self) -> dict[str, float]:
        """The figures of :class:`~lrl.evaluation.metrics.EpisodeMetrics` over these episodes."""
        metrics = EpisodeMetrics(sync_on_compute=False)
        metrics.update(self)
        return {name: float(value) for name, value in metrics.compute().items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% intervals of :meth:`means`: Wilson's for success, bootstrap over episodes for everything else.

        An environment does not say how its returns are bounded, and a bootstrap stays within what was seen.
        """
        return {
            "return": bootstrap_interval(self.returns),
            "length": bootstrap_interval(self.lengths),
            "success_rate": wilson_interval(int(self.successes.sum()), len(self)),
            "invalid_action_rate": ratio_interval(self.invalid_actions, self.lengths),
        }

    def report(self, env_id: str, policy: str) -> dict[str, Any]:
        """All figures under the names of the JSON file; an interval that does not exist is ``[None, None]``."""
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
        figures = self.returns[row], self.lengths[row], self.successes[row], self.invalid_actions[row]
        named = zip(("return", "length", "success", "invalid_actions"), figures, strict=True)
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
) -> EpisodeResults:
    """Play episodes ``0 .. episodes - 1``; episode ``i`` is reset with ``seed + i``.

    Args:
        policy: connected to the environment's codec, and configured.
        env_factory: where to play.
        episodes: how many, over all ranks.
        seed: of the first episode, and of the policy's random numbers.
        num_envs: environments side by side; it changes the speed and nothing else.
        sampling: how the policy decides; None takes its own way.
        rank: this process plays the episodes ``i`` with ``i % world_size == rank``.
        world_size: processes that evaluate together; see :func:`merge`.
        on_episode: called at the end of each episode.

    Raises:
        ValueError: ``episodes`` or ``num_envs`` is not positive.
    """
    for name, value in {"episodes": episodes, "num_envs": num_envs}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    index = np.arange(rank, episodes, world_size)
    if not len(index):
        return _Table(index).results(seed, 0.0)
    envs = env_factory.make(min(num_envs, len(index)), policy.response_format)
    try:
        policy.prepare(envs)
        return _Play(policy, envs, index, seed, sampling, on_episode).run()
    finally:
        envs.close()


def merge(parts: Sequence[EpisodeResults]) -> EpisodeResults:
    """What several ranks played, as one rank would have; the time is that of the slowest."""
    order = np.argsort(np.concatenate([part.index for part in parts]), kind="stable")
    names = ("index", "returns", "lengths", "successes", "invalid_actions")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in names}
    return EpisodeResults(seed=parts[0].seed, seconds=max(part.seconds for part in parts), **arrays)


def gather(results: EpisodeResults) -> EpisodeResults:
    """The results of all ranks, on every rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return results
    parts: list[EpisodeResults] = [results] * dist.get_world_size()
    dist.all_gather_object(parts, results)
    return merge(parts)


def sampling_at(policy: Actor, temperature: float) -> SamplingConfig:
    """A policy's own limits at another temperature, without truncation."""
    return policy.sampling_at(temperature)


class _Table:
    """One row per episode, filled while they are played."""

    def __init__(self, index: np.ndarray) -> None:
        self.index = index
        self.returns = np.zeros(len(index))
        self.lengths = np.zeros(len(index), dtype=np.int64)
        self.successes = np.zeros(len(index), dtype=bool)
        self.invalid_actions = np.zeros(len(index), dtype=np.int64)

    def add(self, rows: np.ndarray, rewards: np.ndarray, valid: np.ndarray) -> None:
        """One more turn of the episodes in ``rows``."""
        self.returns[rows] += rewards
        self.lengths[rows] += 1
        self.invalid_actions[rows] += ~valid

    def results(self, seed: int, seconds: float) -> EpisodeResults:
        """The filled table."""
        return EpisodeResults(
            seed=seed,
            index=self.index,
            returns=self.returns,
            lengths=self.lengths,
            successes=self.successes,
            invalid_actions=self.invalid_actions,
            seconds=seconds,
        )


class _Play:
    """Environments as slots: a slot that ends an episode takes the next one that nobody has begun."""

    def __init__(
        self,
        policy: Actor,
        envs: gym.vector.VectorEnv,
        index: np.ndarray,
        seed: int,
        sampling: SamplingConfig | None,
        on_episode: Callable[[], None] | None,
    ) -> None:
        self.policy, self.envs, self.sampling, self.on_episode = policy, envs, sampling, on_episode
        self.table, self.seed = _Table(index), seed
        self.row = np.arange(envs.num_envs)
        """Row of the table that each slot plays, int64 ``(slot,)``."""
        self.active = np.ones(envs.num_envs, dtype=bool)
        """Whether a slot plays; the others are kept alive and nobody looks at them."""
        self.begun = envs.num_envs
        self.memory: list[History] = [()] * envs.num_envs
        self.observations: Sequence[Any] = ()
        self.greedy = policy.greedy_is_reproducible and sampling is not None and sampling.temperature == 0
        self.answers: dict[tuple[str, History], Answer] = {}

    def run(self) -> EpisodeResults:
        """Play every episode to its end."""
        started = time.perf_counter()
        self._reset(np.ones(self.envs.num_envs, dtype=bool))
        while self.active.any():
            finished = self._turn()
            self._finish(np.flatnonzero(finished & self.active))
            if finished.any() and self.active.any():
                self._reset(finished)
        return self.table.results(self.seed, time.perf_counter() - started)

    def _reset(self, mask: np.ndarray) -> None:
        episode = self.table.index[self.row]
        options: dict[str, Any] = {"episode": episode}
        if not mask.all():
            options["reset_mask"] = mask
        seeds: Any = [int(self.seed + i) for i in episode]
        observations, _ = self.envs.reset(seed=seeds, options=options)
        new = rows_of(observations, self.envs)
        whole = mask.all()
        self.observations = new if whole else [n if m else o for n, o, m in zip(new, self.observations, mask)]

    def _turn(self) -> np.ndarray:
        """Decide and step; which slots have ended, bool ``(slot,)``."""
        slots = np.flatnonzero(self.active).tolist()
        rows = self.row[slots]
        answers = self._answer(slots)
        for slot, (_, history) in zip(slots, answers, strict=True):
            self.memory[slot] = history
        actions = self._spread([action for action, _ in answers], slots)
        observations, rewards, terminated, truncated, infos = self.envs.step(actions)
        self.observations = rows_of(observations, self.envs)
        valid = np.asarray(infos.get("action_valid", np.ones(len(self.row), dtype=bool)), dtype=bool)
        self.table.add(rows, rewards[slots], valid[slots])
        self.table.successes[rows] = np.asarray(infos.get("success", np.zeros(len(self.row))), dtype=bool)[slots]
        return terminated | truncated

    def _answer(self, slots: list[int]) -> list[Answer]:
        """What each slot does; greedily, a question that was asked before is not asked again."""
        if not self.greedy:
            return self._decide(slots)
        if len(self.answers) > _REMEMBERED:
            self.answers.clear()
        questions = [(self.observations[slot], self.memory[slot]) for slot in slots]
        new = {question: slot for question, slot in zip(questions, slots, strict=True) if question not in self.answers}
        self.answers.update(zip(new, self._decide(list(new.values())) if new else (), strict=True))
        return [self.answers[question] for question in questions]

    def _decide(self, slots: list[int]) -> list[Answer]:
        rows = self.row[slots]
        index, turn = self.table.index[rows], self.table.lengths[rows]
        keys = RandomKeys(seed=self.seed, purpose="evaluation", collection=0, env=index, turn=turn)
        observations = [self.observations[slot] for slot in slots]
        decisions = self.policy.act(observations, [self.memory[slot] for slot in slots], keys, self.sampling)
        return list(zip(decisions.actions, decisions.memory, strict=True))

    def _spread(self, actions: Sequence[Any], slots: Sequence[int]) -> Any:
        """Actions for all slots; those that do not play get an empty answer, or the first native action."""
        text = isinstance(actions[0], str)
        spread = ["" if text else actions[0]] * len(self.row)
        for slot, action in zip(slots, actions, strict=True):
            spread[slot] = action
        return tuple(spread) if text else np.asarray(spread)

    def _finish(self, slots: np.ndarray) -> None:
        """Hand each slot that ended its episode the next one, or let it rest."""
        for slot in slots:
            self.memory[slot] = ()
            self.active[slot] = self.begun < len(self.table.index)
            if self.active[slot]:
                self.row[slot] = self.begun
                self.begun += 1
            if self.on_episode is not None:
                self.on_episode()
