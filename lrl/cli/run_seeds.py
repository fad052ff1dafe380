"""The command ``lrl run_seeds``."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

from lrl.cli.command import command
from lrl.files import lock_folder, replaced_name, resolve_config, unlock_folder, write_whole
from lrl.ranges import PositiveInt

_KEPT = ("*.ckpt", ".*.ckpt.old", "earlier", "proposals.jsonl")
"""Patterns of files with which an interrupted run is never started again: weights, files of earlier launches, and
replies of a language model."""

PLAN = ".planned_runs.txt"
"""Name of the file in a folder of runs that has the path of each planned run, one per line; ``FOLDER/*`` omits it."""


def run_seeds(
    *options: str, config: tuple[str, ...], folder: Path, count: PositiveInt = 10, jobs: PositiveInt = 1
) -> None:
    """Train once on each of several fixed seeds: seed i is the first 32 bits of the SHA-256 of "lrl-i", from i = 0.

    lrl run_seeds --config configs/frozen_lake/grpo.yaml --count 40 --folder runs/headline/grpo --jobs 2

    Options that are not listed here are passed on to `lrl fit`. In their values `{seed}` is replaced by the seed of the
    run. For example, `--model.init_args.init_from 'runs/weak/seed{seed}'` starts each run from the weights of an
    earlier run with the same seed. If the command is repeated, it skips the runs that have finished, and resumes those
    that were interrupted. If they have no checkpoint, it starts them again, and the former directory is renamed to
    `<name>-interrupted-<date>`. The file .planned_runs.txt of the folder lists the runs, so that `lrl table` can name
    those that are missing. `lrl sweep` does the same for several values of settings.

    Args:
        options: options of `lrl fit`.
        config: the experiment's file; further ones are overlays.
        folder: where to write one run directory per seed.
        count: number of seeds.
        jobs: number of runs at a time; each is a process with one thread.

    Raises:
        ValueError: If a key or value is not valid, if the folder is in use, if a run directory contains a
            run of another command or one that can neither be resumed nor started again, or if a run fails; in the last
            case the other runs are finished first.
    """
    from lrl.evaluation.statistics import headline_seed

    first, args = run_of_seed(folder, config, options, headline_seed(0))
    if not first.exists():
        check_commands([args])
    runs = dict(run_of_seed(folder, config, options, headline_seed(index)) for index in range(count))
    check_errors(train_all(runs, folder, jobs, "run_seeds"), count)


def write_plan(runs: Iterable[Path], folder: Path) -> None:
    """Add runs to the file :data:`PLAN` of their folder, from which `lrl table` knows which runs are missing.

    Args:
        runs: run directories in the folder.
        folder: the folder, which is created.
    """
    plan = folder / PLAN
    lines = plan.read_text(encoding="utf-8").splitlines() if plan.is_file() else []
    with write_whole(plan) as file:
        file.write(
            "".join(f"{line}\n" for line in dict.fromkeys([*lines, *(str(r.relative_to(folder)) for r in runs)]))
        )


def run_of_seed(folder: Path, config: Sequence[str], options: Sequence[str], seed: int) -> tuple[Path, list[str]]:
    """Return the run directory for a seed, and the arguments of ``lrl`` that train the run.

    Args:
        folder: the folder of the run directory.
        config: the experiment's file and overlays.
        options: options of `lrl fit`, in which ``{seed}`` is replaced by the seed.
        seed: the seed.
    """
    run = folder / f"seed{seed}"
    configs = [part for file in config for part in ("--config", file)]
    own = [option.replace("{seed}", str(seed)) for option in options]
    return run, ["fit", *configs, *own, "--seed_everything", str(seed), "--run_directory", str(run)]


def check_commands(commands: Sequence[Sequence[str]]) -> None:
    """Check the keys and values of commands without running them.

    Args:
        commands: arguments of ``lrl``.

    Raises:
        ValueError: If a key or value is not valid.
    """
    from lrl.cli.keys import check_keys

    for args in commands:
        check_keys(args)
    # The parser imports torch, whose memory this process would keep while the runs train.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        error = pool.submit(first_error, commands).result()
    if error:
        raise ValueError(error)


def first_error(commands: Sequence[Sequence[str]]) -> str:
    """Return the first error in the values of commands, as a sentence; empty if there is none.

    Args:
        commands: arguments of ``lrl``, which are parsed and not run.
    """
    from lrl.cli.error_messages import sentence_of
    from lrl.cli.main import LRLCLI
    from lrl.cli.quiet import silence_libraries

    silence_libraries()
    for args in commands:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                LRLCLI([*args, "--print_config"])
        except Exception as error:
            return sentence_of(error) or repr(error)
    return ""


def check_errors(errors: Sequence[str], count: int) -> None:
    """Raise a ValueError if some of ``count`` runs have failed.

    Raises:
        ValueError: If there is an error.
    """
    if errors:
        raise ValueError(f"{len(errors)} of {count} runs failed; the first error is: {errors[0]}")


def train_all(runs: Mapping[Path, list[str]], folder: Path, jobs: int, name: str) -> list[str]:
    """Train the runs that have not finished, and print a line about each of them when it ends.

    Args:
        runs: arguments of ``lrl`` by run directory.
        folder: a folder that contains the run directories, which only one such command may use at a time.
        jobs: number of runs at a time; each is a process with one thread.
        name: name of the command, for error messages.

    Returns:
        The error of each run that failed.

    Raises:
        ValueError: If the folder is in use, or a run directory contains a run of another command or one that can
            neither be resumed nor started again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(folder)  # held until this process and the runs that it has started have ended
    except BlockingIOError as error:
        raise ValueError(
            f"folder is {str(folder)!r}, in which another {name} is running; use another folder."
        ) from error
    todo = remaining_runs(runs)
    write_plan(runs, folder)
    for run, args in todo.items():
        if args[-1] == str(run) and run.exists():  # not resumed
            former = run.rename(replaced_name(run))
            logging.getLogger("lrl").warning(
                "%s was interrupted before its first checkpoint: starting it again; the former directory is now %s.",
                run,
                former,
            )
    finished = len(runs) - len(todo)
    if finished:
        _say(f"{finished} of {len(runs)} runs have finished before")
    errors = list[str]()
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(_fit, args, lock): run for run, args in todo.items()}
        try:
            for done, future in enumerate(as_completed(waiting), finished + 1):
                run, error = waiting[future], future.result()
                _say(f"[{done}/{len(runs)}] {run.relative_to(folder)}: {error or _result(run)}")
                errors += [error] if error else []
        except BaseException:  # such as Ctrl-C, which the runs receive as well
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if lock is not None:
        unlock_folder(lock)
    return errors


def _say(line: str) -> None:
    """Print a line about the progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def _result(run: Path) -> str:
    """Return the last and best value of the most important metric of a run, and its duration."""
    from lrl.evaluation.run_records import last_and_best, logged_metrics, minutes_of
    from lrl.evaluation.statistics import RESULT_METRICS

    logged = logged_metrics(run) if (run / "metrics.csv").is_file() else ()
    metric = next((name for name in RESULT_METRICS if name in logged), None)
    if metric is None:
        return "finished"
    last, best = last_and_best(run, metric)
    return f"{metric} {last:.4g}, best {best:.4g}, {minutes_of(run) or 0:.2f} minutes"


def remaining_runs(runs: Mapping[Path, list[str]]) -> dict[Path, list[str]]:
    """Return the arguments that start or resume each run that has not finished.

    Args:
        runs: arguments of ``lrl`` by run directory.

    Raises:
        ValueError: If a run directory contains a run of another command or one that can neither be resumed nor removed
            without loss.
    """
    remaining = {run: _remaining(run, args) for run, args in runs.items()}
    return {run: args for run, args in remaining.items() if args}


def _remaining(run: Path, args: list[str]) -> list[str]:
    """Return the arguments of the command that starts or resumes a run; they are empty if the run has finished.

    Raises:
        ValueError: If the folder contains anything else than a run of this command, or if the run has no checkpoint to
            resume from, but files that show that it had trained for long or was continued.
    """
    from lrl.evaluation.run_records import earlier_launches

    if not run.exists():
        return args
    checkpoint = run / "checkpoints" / "last.ckpt"
    resumed = [*args, "--ckpt_path", str(checkpoint)]
    launches = [*earlier_launches(run), run]  # a user may have resumed the run with another command
    first = next((folder for folder in launches if (folder / "command.txt").is_file()), run)
    files = first / "command.txt", run / "run.log"
    former, log = (file.read_text(encoding="utf-8") if file.is_file() else "" for file in files)
    if not any(_with_full_paths(shlex.split(former)[-len(one) :]) == _with_full_paths(one) for one in (args, resumed)):
        raise ValueError(
            f"folder contains {str(run)!r}, a run that was made by another command{_difference(former, args)}; remove "
            "it or use another folder."
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


def _difference(former: str, args: Sequence[str]) -> str:
    """Return the options that only the former command has, and those that only the new arguments have, as text.

    The text is in parentheses; it is empty if there are no such options. ``--ckpt_path`` is not compared.
    """
    before, now = _options(shlex.split(former)), _options(args)
    more, less = (
        " ".join(shlex.join(option) for option in one if option not in other and option[0] != "--ckpt_path")
        for one, other in ((before, now), (now, before))
    )
    parts = [f"with {more}"] * bool(more) + [f"without {less}"] * bool(less)
    return f" ({' and '.join(parts)})" if former and parts else ""


def _options(args: Sequence[str]) -> list[list[str]]:
    """Return each option of a command with its values, without what comes before the first one."""
    options = list[list[str]]()
    words = [word for arg in args for word in (arg.split("=", 1) if re.match(r"--[\w.]+=", arg) else [arg])]
    for word in _with_full_paths(words):
        if word.startswith("--"):
            options.append([word])
        elif options:
            options[-1].append(word)
    return options


def _with_full_paths(args: Sequence[str]) -> list[str]:
    """Return the arguments of a run with full paths, because the same file can be named in several ways."""
    paths = {"--config", "--run_directory", "--ckpt_path"}
    return [
        str(Path(resolve_config(arg)).resolve()) if before in paths else arg for before, arg in zip(("", *args), args)
    ]


def _fit(args: Sequence[str], lock: int | None) -> str:
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
        pass_fds=() if lock is None else (lock,),
    )
    if not result.returncode or "nothing was trained" in result.stderr:  # it was killed after its last checkpoint
        return ""
    return (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]


main = command(run_seeds)
