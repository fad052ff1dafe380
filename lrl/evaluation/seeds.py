"""Seeds of headline results, which follow from a fixed rule, so that none is chosen by its result."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def headline_seed(index: int) -> int:
    """Return the seed with this index: the first 32 bits of the SHA-256 of ``lrl-<index>``, in [0, 2**32)."""
    return int.from_bytes(hashlib.sha256(f"lrl-{index}".encode()).digest()[:4], "big")


def run_seeds(config: str, count: int, folder: Path, jobs: int = 1, options: Sequence[str] = ()) -> list[Path]:
    """Train one experiment on the first ``count`` headline seeds, each run in a process with one thread.

    Finished runs of this experiment are skipped, so that an interrupted series can be continued.

    Args:
        config: configuration file of the experiment.
        count: number of seeds, at least 1.
        folder: folder of the run directories, ``seed<number>`` for each seed.
        jobs: number of parallel processes, at least 1.
        options: further options of ``lrl fit``, in which ``{seed}`` is replaced by the seed; so each run can start from
            the weights of an earlier run on the same seed.

    Returns:
        The run directories, ordered by the index of their seeds.

    Raises:
        ValueError: ``count`` or ``jobs`` is below 1, a run directory holds another or an unfinished experiment, or a
            run failed; the other runs are finished first.
    """
    for name, value in (("count", count), ("jobs", jobs)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1.")
    seeds = [headline_seed(index) for index in range(count)]
    runs = [folder / f"seed{seed}" for seed in seeds]
    shared = [
        ["fit", "--config", config, *(option.replace("{seed}", str(seed)) for option in options)] for seed in seeds
    ]
    arguments = [
        [*command, "--seed_everything", str(seed), "--run_directory", str(run)]
        for command, seed, run in zip(shared, seeds, runs, strict=True)
    ]
    todo = [command for command, run in zip(arguments, runs, strict=True) if not _is_finished(run, command)]
    with ThreadPoolExecutor(jobs) as pool:
        errors = [error for error in pool.map(_fit, todo) if error]
    if errors:
        raise ValueError(f"{len(errors)} of {count} runs failed; the first error is: {errors[0]}")
    return runs


def _is_finished(run: Path, arguments: Sequence[str]) -> bool:
    """Return whether the run directory holds the finished run of this command.

    Raises:
        ValueError: it holds anything else, which is left unchanged.
    """
    if not run.exists():
        return False
    files = {name: run / name for name in ("command.txt", "run.log")}
    command, log = (file.read_text(encoding="utf-8") if file.is_file() else "" for file in files.values())
    written = shlex.join(arguments), " ".join(arguments)  # older versions wrote no quotes
    if command.strip().endswith(written) and "finished after" in log:
        return True
    raise ValueError(
        f"--folder holds {str(run)!r}, a run that has not finished or has another command; remove it or use another "
        "folder."
    )


def _fit(arguments: Sequence[str]) -> str:
    """Train with one seed; return the last line of the error output if it failed, else an empty text."""
    command = [sys.executable, "-m", "lrl", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "LRL_RUN_DIRECTORY"}
    environment["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not result.returncode:
        return ""
    return (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
