"""The command ``lrl run_seeds``."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lrl.cli.command import command
from lrl.ranges import PositiveInt

_KEPT = ("*.ckpt", ".*.ckpt.old", "earlier", "proposals.jsonl")
"""Patterns of files with which an interrupted run is never removed: weights, files of earlier launches, and replies of
a language model."""


def run_seeds(*options: str, config: str, folder: Path, count: PositiveInt = 10, jobs: PositiveInt = 1) -> None:
    """Train once on each of several fixed seeds: seed i is the first 32 bits of the SHA-256 of "lrl-i", from i = 0.

    lrl run_seeds --config configs/frozen_lake/grpo.yaml --count 40 --folder runs/headline/grpo --jobs 2

    Options that are not listed here are passed on to `lrl fit`. In their values `{seed}` is replaced by the seed of the
    run. For example, `--model.init_args.init_from 'runs/weak/seed{seed}'` starts each run from the weights of an
    earlier run with the same seed. If the command is repeated, it skips the runs that have finished, and resumes those
    that were interrupted, or starts them again if they have no checkpoint.

    Args:
        options: options of `lrl fit`.
        config: the experiment's file.
        folder: where to write one run directory per seed.
        count: number of seeds.
        jobs: number of runs at a time; each is a process with one thread.

    Raises:
        ValueError: If the folder is in use, if a run directory contains a run of another command or one that can
            neither be resumed nor removed without loss, or if a run fails; in the last case the other runs are finished
            first.
    """
    from lrl.evaluation.statistics import headline_seed

    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)  # held until this process and the runs that it has started have ended
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"folder is {str(folder)!r}, in which another run_seeds is running; use another folder."
        ) from error
    todo: dict[Path, list[str]] = {}
    for seed in map(headline_seed, range(count)):
        run = folder / f"seed{seed}"
        own = [option.replace("{seed}", str(seed)) for option in options]
        args = ["fit", "--config", config, *own, "--seed_everything", str(seed), "--run_directory", str(run)]
        todo[run] = _remaining(run, args)
    for run, args in todo.items():
        if args and args[-1] == str(run) and run.exists():  # not resumed
            logging.getLogger("lrl").warning("%s was interrupted before its first checkpoint: starting it again.", run)
            shutil.rmtree(run)
    with ThreadPoolExecutor(jobs) as pool:
        errors = [error for error in pool.map(lambda args: _fit(args, lock), filter(None, todo.values())) if error]
    os.close(lock)
    if errors:
        raise ValueError(f"{len(errors)} of {count} runs failed; the first error is: {errors[0]}")


def _remaining(run: Path, args: list[str]) -> list[str]:
    """Return the arguments of the command that starts or resumes a run; they are empty if the run has finished.

    Raises:
        ValueError: If the folder contains anything else than a run of this command, or if the run has no checkpoint to
            resume from, but files that would be lost if it were started again.
    """
    if not run.exists():
        return args
    checkpoint = run / "checkpoints" / "last.ckpt"
    resumed = [*args, "--ckpt_path", str(checkpoint)]
    files = run / "command.txt", run / "run.log"
    former, log = (file.read_text(encoding="utf-8") if file.is_file() else "" for file in files)
    if not former.strip().endswith((shlex.join(args), shlex.join(resumed))):
        raise ValueError(
            f"folder contains {str(run)!r}, a run that was made by another command; remove it or use another folder."
        )
    if "finished after" in log:
        return []
    if checkpoint.exists():
        return resumed
    kept = sorted(str(file.relative_to(run)) for pattern in _KEPT for file in run.rglob(pattern))
    if kept:
        raise ValueError(
            f"folder contains {str(run)!r}, an interrupted run that has {kept[0]} but no last.ckpt to resume from; "
            "remove it or use another folder."
        )
    return args


def _fit(args: Sequence[str], lock: int) -> str:
    """Train with one seed, in a process that shares a file descriptor.

    Returns:
        The last line of the error output if the run failed, otherwise an empty string.
    """
    environment = {name: value for name, value in os.environ.items() if name != "LRL_RUN_DIRECTORY"}
    environment["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        [sys.executable, "-m", "lrl", *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=(lock,),
    )
    if not result.returncode or "nothing was trained" in result.stderr:  # it was killed after its last checkpoint
        return ""
    return (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]


main = command(run_seeds)
