"""Environment steps per second in the episodes of one proposal of a policy search, as ``lrl search_table`` plays them.

Random proposals and the best of them are measured separately, because their episodes may differ in length. All episodes
are played in one process with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from lrl.search.experiments import make_policy
from lrl.search.rollouts import make_batched, play_parameters, proposal_seeds
from lrl.search.searchers import Trial
from lrl.search.tasks import TASKS

BAR = 100_000
"""Env steps per second that CartPole should reach."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py search_rollouts``."""
    parser.add_argument("--tasks", nargs="+", default=["cart_pole"], choices=list(TASKS), metavar="TASK")
    parser.add_argument("--rollouts", type=int, default=20, help="episodes of a proposal, played in parallel")
    parser.add_argument("--proposals", type=int, default=400, help="number of random policies")
    parser.add_argument(
        "--best_proposals", type=int, default=20, help="number of times that the best of them is played"
    )
    parser.add_argument("--repeats", type=int, default=3)


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one task and print a line for random proposals and one for the best of them."""
    task = TASKS[name]
    policy, envs = make_policy(task), make_batched(task.env_factory(), options.rollouts)

    def play(parameters: np.ndarray, index: int) -> Trial:
        return play_parameters(policy, envs, parameters, proposal_seeds(0, index, envs.num_envs), task.max_steps)

    rng, space = np.random.default_rng(0), policy.parameter_space()
    random = [space.sample(rng) for _ in range(options.proposals)]
    best = int(np.argmax([play(parameters, index).value for index, parameters in enumerate(random)]))
    figures: list[dict[str, Any]] = []
    for kind, proposals in {"random": random, "best": [random[best]] * options.best_proposals}.items():
        rates, cpu_rates, env_steps = list[float](), list[float](), 0
        for _ in range(options.repeats):
            seconds, cpu_seconds = time.perf_counter(), time.process_time()
            env_steps = sum(play(parameters, index).env_steps for index, parameters in enumerate(proposals))
            rates.append(env_steps / (time.perf_counter() - seconds))
            cpu_rates.append(env_steps / (time.process_time() - cpu_seconds))
        length = env_steps / (len(proposals) * options.rollouts)
        print(
            f"{name:26s} {kind:8s} {length:10.1f} {statistics.median(rates):14,.0f} "
            f"({min(rates):,.0f} to {max(rates):,.0f}) {statistics.median(cpu_rates):14,.0f}"
        )
        rated = {"env_steps_per_second": rates, "env_steps_per_cpu_second": cpu_rates}
        figures.append(
            {"task": name, "policies": kind, "episode_length": length, **rated, "rollouts": options.rollouts}
        )
    envs.close()
    return figures


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each task."""
    print(f"{'task':26s} {'policies':8s} {'steps':>10s} {'env steps/s':>14s} (of repeats) {'per CPU second':>14s}")
    figures = [line for name in options.tasks for line in measure(name, options)]
    print(f"bar for cart_pole: {BAR:,} env steps/s")
    yield {"bar": BAR, "search_rollouts": figures}
