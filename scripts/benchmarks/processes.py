"""Rollouts with environments in several processes against one process, in environments that take most of the time.

A small network acts. Both sides take the same turns, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.timing import compare, compared

from lrl.envs.factory import GymnasiumEnvs
from lrl.policies.mlp import MLPPolicy
from lrl.training.collect import CollectionPlan, FixedHorizonCollector
from lrl.types import Rollout


class Side:
    """Collects rollouts with a number of processes, and measures the CPU time of each.

    Args:
        options: options of the benchmark.
        env: name and keyword arguments of the environment.
        settings: settings of the factory of environments.
    """

    def __init__(self, options: argparse.Namespace, env: tuple[str, dict[str, Any]], **settings: Any) -> None:
        self.options, factory = options, GymnasiumEnvs(*env, **settings)
        torch.manual_seed(0)
        policy = MLPPolicy(hidden_sizes=(64, 64), init_seed=0)
        policy.connect_spaces(*factory.spaces)
        policy.configure()
        self.envs: Any = factory.make(options.num_envs, None)
        self.collector = FixedHorizonCollector(policy, self.envs, 0, np.arange(options.num_envs), options.num_envs)
        self.pids: list[int] = [os.getpid(), *(process.pid for process in getattr(self.envs, "processes", ()))]
        self.rollouts: list[Rollout] = []
        self.seconds = np.zeros(len(self.pids))
        """CPU seconds of the main process and of the processes of the environments, without the first rollout."""

    def measure(self) -> float:
        """Collect a rollout, and return env steps per second."""
        sizes = {"num_groups": self.options.num_envs, "group_size": 1, "num_steps": self.options.num_steps}
        before, started = cpu_seconds(self.pids), time.perf_counter()
        with torch.no_grad():
            rollout = self.collector.collect(CollectionPlan(seed=0, collection=len(self.rollouts), **sizes))
        seconds = time.perf_counter() - started
        if self.rollouts:
            self.seconds += cpu_seconds(self.pids) - before
        self.rollouts.append(rollout)
        return rollout.num_turns / seconds


def cpu_seconds(pids: Sequence[int]) -> np.ndarray:
    """Return the CPU seconds that each process has used, float64 ``(process,)``."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return np.array([(int(one[11]) + int(one[12])) / os.sysconf("SC_CLK_TCK") for one in fields])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``benchmark.py processes``."""
    parser.add_argument("--env_id", nargs="+", default=["Humanoid-v5", "Ant-v5", "HalfCheetah-v5"])
    parser.add_argument("--env_kwargs", nargs="+", type=json.loads, default=[{}, {}, {}])
    parser.add_argument("--num_envs", type=int, default=64)
    parser.add_argument("--num_steps", type=int, default=50)
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare all environments."""
    rows = []
    for env in zip(options.env_id, options.env_kwargs, strict=True):
        several = Side(options, env, vectorization="async", num_processes=options.num_processes)
        one = Side(options, env)
        row = compare(env[0], "env steps", several.measure, one.measure, options.repeats)
        for ours, theirs in zip(several.rollouts, one.rollouts, strict=True):
            assert torch.equal(ours.rewards, theirs.rewards), "both sides must take the same turns"
        seconds = {"cpu_seconds": several.seconds.tolist(), "cpu_seconds_one_process": one.seconds.tolist()}
        print(seconds)
        rows.append(row | seconds)
        several.envs.close()
        one.envs.close()
    yield compared(f"rollouts with environments in {options.num_processes} processes", 1.5, rows)
