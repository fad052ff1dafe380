"""Environment steps per second in the episodes of one proposal of a policy search, as ``lrl search_table`` plays them.

Random proposals and the best of them are measured separately, because their episodes may differ in length. All episodes
are played in one process with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from lrl.search.experiments import make_policy
from lrl.search.policies import SearchedPolicy
from lrl.search.rollouts import make_batched, play_parameters, proposal_seeds
from lrl.search.tasks import TASKS, SearchTask

BAR = 100_000
"""Env steps per second that CartPole should reach."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py search_rollouts``."""
    parser.add_argument("--tasks", nargs="+", default=["cart_pole"], choices=list(TASKS), metavar="TASK")
    parser.add_argument("--rollouts", type=int, default=20, help="episodes of a proposal, side by side")
    parser.add_argument("--proposals", type=int, default=400, help="random policies")
    parser.add_argument("--best_proposals", type=int, default=20, help="how often the best of them is played")
    parser.add_argument("--repeats", type=int, default=3)


def timed(
    task: SearchTask, policy: SearchedPolicy, envs: VectorEnv, proposals: Sequence[np.ndarray]
) -> tuple[float, float, int]:
    """Play proposals once each and return env steps per second, env steps per CPU second, and env steps."""
    seconds, cpu_seconds, env_steps = time.perf_counter(), time.process_time(), 0
    for index, parameters in enumerate(proposals):
        seeds = proposal_seeds(0, index, envs.num_envs)
        env_steps += play_parameters(policy, envs, parameters, seeds, task.max_steps).env_steps
    seconds, cpu_seconds = time.perf_counter() - seconds, time.process_time() - cpu_seconds
    return env_steps / seconds, env_steps / cpu_seconds, env_steps


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one task and print a line for random proposals and one for the best of them."""
    task = TASKS[name]
    policy, envs = make_policy(task), make_batched(task.env_factory(), options.rollouts)
    rng, space = np.random.default_rng(0), policy.parameter_space()
    random = [space.sample(rng) for _ in range(options.proposals)]
    values = [
        play_parameters(policy, envs, one, proposal_seeds(0, index, options.rollouts), task.max_steps).value
        for index, one in enumerate(random)
    ]
    kinds = {"random": random, "best": [random[int(np.argmax(values))]] * options.best_proposals}
    rates: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
    for _ in range(options.repeats):
        for kind, proposals in kinds.items():
            rates[kind].append(timed(task, policy, envs, proposals))
    envs.close()
    return [
        _figures(name, kind, len(kinds[kind]) * options.rollouts, each) | {"rollouts": options.rollouts}
        for kind, each in rates.items()
    ]


def _figures(name: str, kind: str, episodes: int, rates: Sequence[tuple[float, float, int]]) -> dict[str, Any]:
    """Print one line, and return its numbers."""
    per_second, per_cpu_second = [rate[0] for rate in rates], [rate[1] for rate in rates]
    length = rates[0][2] / episodes
    print(
        f"{name:26s} {kind:8s} {length:10.1f} {statistics.median(per_second):14,.0f} "
        f"({min(per_second):,.0f} to {max(per_second):,.0f}) {statistics.median(per_cpu_second):14,.0f}"
    )
    rated = {"env_steps_per_second": per_second, "env_steps_per_cpu_second": per_cpu_second}
    return {"task": name, "policies": kind, "episode_length": length, **rated}


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each task."""
    print(f"{'task':26s} {'policies':8s} {'steps':>10s} {'env steps/s':>14s} (of repeats) {'per CPU second':>14s}")
    figures = [line for name in options.tasks for line in measure(name, options)]
    print(f"bar for cart_pole: {BAR:,} env steps/s")
    yield {"bar": BAR, "search_rollouts": figures}
