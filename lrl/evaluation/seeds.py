"""Seeds of a headline result: drawn by a rule that is written down before the runs, and run without looking."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_LOGGER = logging.getLogger("lrl")


def headline_seed(index: int) -> int:
    """Return the seed with this index: the first 32 bits of the SHA-256 of ``lrl-<index>``, in [0, 2**32)."""
    return int.from_bytes(hashlib.sha256(f"lrl-{index}".encode()).digest()[:4], "big")


def run_seeds(config: str, count: int, folder: Path, jobs: int = 1, options: Sequence[str] = ()) -> list[Path]:
    """Train one experiment on the first ``count`` headline seeds, each run in a process with one thread.

    Runs that have finished are left alone; those that were broken off are started again.

    Args:
        config: the experiment's file.
        count: number of seeds; at least 1.
        folder: holds one run directory per seed, ``seed<number>``.
        jobs: number of processes at a time; at least 1.
        options: further options of ``lrl fit``.

    Returns:
        The run directories, in the order of the rule.

    Raises:
        ValueError: ``count`` or ``jobs`` is below 1, or a run failed; the other runs are finished first.
    """
    for name, value in (("count", count), ("jobs", jobs)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1.")
    seeds = [headline_seed(index) for index in range(count)]
    runs = [folder / f"seed{seed}" for seed in seeds]
    todo = [(seed, run) for seed, run in zip(seeds, runs, strict=True) if not _is_finished(run)]
    with ThreadPoolExecutor(jobs) as pool:
        codes = list(pool.map(lambda job: _fit(config, job[0], job[1], options), todo))
    failed = [str(run) for (_, run), code in zip(todo, codes, strict=True) if code]
    if failed:
        raise ValueError(f"{len(failed)} of {count} runs failed, the first is {failed[0]}; its run.log says why.")
    return runs


def _is_finished(run: Path) -> bool:
    log = run / "run.log"
    return log.is_file() and "finished after" in log.read_text(encoding="utf-8")


def _fit(config: str, seed: int, run: Path, options: Sequence[str]) -> int:
    """Run one seed from its start and return the exit status."""
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "lrl", "fit", "--config", config, *options]
    command += ["--seed_everything", str(seed), "--run_directory", str(run)]
    environment = {name: value for name, value in os.environ.items() if name != "LRL_RUN_DIRECTORY"}
    result = subprocess.run(command, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    _LOGGER.info("seed %d: exit status %d", seed, result.returncode)
    return result.returncode
