"""Play exactly N episodes, one seed each, all to their end.

Taking the first N episodes that finish would favour short ones. Here the index of an episode determines its seed, and
with the turn its random numbers, so the result does not depend on how many environments run side by side, except for
rounding in batches of other shapes: with the embedded model that changes 1.5e-8 of the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from gymnasium.vector import VectorEnv

from lrl.envs.factory import EnvFactory
from lrl.evaluation.results import EpisodeResults, EpisodeStep
from lrl.policies.actor import Actor
from lrl.policies.response_cache import ResponseCache
from lrl.ranges import check_seed
from lrl.rollouts.runner import EnvRunner, Step
from lrl.types import RandomKeys, SamplingConfig


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
        ValueError: ``episodes`` or ``num_envs`` is not positive, or ``seed`` is out of range.
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
    has_success = any(part.has_success for part in parts)
    seconds = max(part.seconds for part in parts)
    first = parts[0]
    return EpisodeResults(
        seed=first.seed, seconds=seconds, has_success=has_success, success_at=first.success_at, **arrays
    )


def gather(results: EpisodeResults) -> EpisodeResults:
    """Return the results of all ranks on every rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return results
    parts: list[EpisodeResults] = [results] * dist.get_world_size()
    dist.all_gather_object(parts, results)
    return merge(parts)
