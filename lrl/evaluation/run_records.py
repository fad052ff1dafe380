"""Read the records of a run: configuration, metrics and duration; and name the commands that use the run."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lrl.evaluation.statistics import RESULT_METRICS, best_of, without_run
from lrl.files import from_yaml, is_replaced

_FINISHED = re.compile(r"finished after ([\d.]+) minutes")
_LAUNCHED = " INFO run directory "
"""First message of each launch in ``run.log``."""
_UNREADABLE = (OSError, ValueError, KeyError, csv.Error)
"""Errors of missing and damaged files."""

_PRESENTATION = ("codec", "numbers", "vectorization")
"""Settings of an environment that change neither its states nor its rewards."""


def metrics_file(run: Path) -> Path:
    """Return the path of the ``metrics.csv`` in a run directory or below it; a path of a file is returned unchanged.

    Raises:
        ValueError: If there is no such file, or more than one.
    """
    if run.is_file():
        return run
    found = [run / "metrics.csv"] if (run / "metrics.csv").exists() else sorted(run.rglob("metrics.csv"))
    found = [file for file in found if not any(map(is_replaced, file.relative_to(run).parents))]
    if len(found) != 1:
        raise ValueError(f"run is {str(run)!r}, which holds {len(found)} files metrics.csv; it must hold one.")
    return found[0]


def logged_metrics(run: Path) -> set[str]:
    """Return the metrics that a run's ``metrics.csv`` contains, without the step and the clocks.

    Raises:
        ValueError: If there is no such file, or more than one.
    """
    with metrics_file(run).open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return {name for row in rows for name, value in row.items() if value and not name.startswith(("clock/", "step"))}


def logged_rows(run: Path, metric: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a run's ``metrics.csv`` that contain a metric, in the order of the file.

    Args:
        run: a run directory, or its ``metrics.csv``.
        metric: column of the metric.
        columns: further columns that a row must contain.

    Raises:
        ValueError: If there is no such row; existing metrics are listed.
    """
    file = metrics_file(run)
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    found = [row for row in rows if all(row.get(name) for name in (metric, *columns))]
    if not found:
        names = ", ".join(sorted(logged_metrics(file))) or "nothing"
        raise ValueError(f"metric is {metric!r}, which {file} lacks; it has {names}.")
    return found


def read_config(run: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run.

    Raises:
        ValueError: If the folder does not exist or is not a run directory.
    """
    if not run.exists():
        raise ValueError(f"run is {str(run)!r}, which does not exist; name a run directory or a file of results.")
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"run is {str(run)!r}, which is not a run directory: it has no config.yaml.")
    try:
        config = from_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict) or not all(
        isinstance(part := config.get(name, {}), dict) and isinstance(part.get("init_args", {}), dict)
        for name in ("model", "data", "trainer")
    ):
        raise ValueError(f"run is {str(run)!r}, whose config.yaml is damaged; leave the run out, or write it again.")
    return config


def environment_of(run: Path) -> str:
    """Return the environment of a run as text, without the settings that only change what a policy reads."""
    env = read_config(run).get("data", {}).get("init_args", {}).get("env") or {}
    settings = {name: value for name, value in env.get("init_args", {}).items() if name not in _PRESENTATION and value}
    name = settings.pop("id", "") or str(env.get("class_path", "none")).rpartition(".")[2]
    return f"{name} {json.dumps(settings, sort_keys=True)}" if settings else name


def earlier_launches(run: Path) -> list[Path]:
    """Return the folders with the files that a resumed run has replaced, one per launch but the last, in order."""
    folders = [folder for folder in (run / "earlier").glob("*") if folder.name.isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name))


def trains(run: Path) -> bool:
    """Return whether a run directory is that of ``lrl fit``, and not of ``lrl validate``, ``test`` or ``predict``."""
    file = run / "command.txt"
    words = file.read_text(encoding="utf-8", errors="replace").split() if file.is_file() else []
    return not {"validate", "test", "predict"} & {*words[:2]}


def training_runs(paths: Iterable[Path]) -> list[Path]:
    """Return those of several paths that are no directories of ``lrl validate``, ``test`` or ``predict``.

    If all are, all are returned. A path may also be a file.
    """
    paths = list(paths)
    return [path for path in paths if not path.is_dir() or trains(path)] or paths


def minutes_of(run: Path) -> float | None:
    """Return the duration of a run over all its launches in minutes; None if the last launch has not finished.

    A single launch logs its duration, with imports. The clock of a resumed run continues from the checkpoint, so that
    work that was lost with a killed process, and done again, counts once.
    """
    log = run / "run.log"
    launches = log.read_text(encoding="utf-8").split(_LAUNCHED) if log.is_file() else [""]
    finished = _FINISHED.search(launches[-1])
    if finished is None:
        return None
    if len(launches) <= 2 and not earlier_launches(run):
        return float(finished[1])
    clock = max(float(row["clock/minutes"]) for row in logged_rows(run, "clock/minutes"))
    return max(float(finished[1]), round(clock, 2))


def known_minutes(run: Path) -> float | None:
    """Return :func:`minutes_of` a run; None also if files that it needs are missing or damaged."""
    try:
        return minutes_of(run)
    except _UNREADABLE:
        return None


def raised_limits(run: Path) -> str:
    """Return options that double all limits of a run that has finished, with which ``lrl fit --resume`` continues it.

    All are doubled, because a limit that the run did not reach could end it soon afterwards. There are none for a run
    that has not finished, or whose files are missing or damaged.
    """
    try:
        config = read_config(run) if minutes_of(run) is not None else {}
    except _UNREADABLE:
        return ""
    trainer, data = section(config, "trainer"), section(config, "data")
    limits = {f"trainer.{name}": trainer.get(name) for name in ("max_epochs", "max_steps")}
    limits["data.max_env_steps"] = (section(data, "init_args") or data).get("max_env_steps")
    return "".join(f" --{key} {2 * limit}" for key, limit in limits.items() if isinstance(limit, int) and limit > 0)


def section(config: Any, name: str) -> Mapping[str, Any]:
    """Return a nested mapping of a configuration, also if it is in its ``init_args``; empty if there is none."""
    config = config if isinstance(config, dict) else {}
    found = config.get(name)
    if found is None and isinstance(config.get("init_args"), dict):
        found = config["init_args"].get(name)
    return found if isinstance(found, dict) else {}


def last_and_best(run: Path, metric: str) -> tuple[float, float]:
    """Return the last and the best logged value of a metric of a run; of a metric without a best, the last one twice.

    Raises:
        ValueError: If the run has not logged the metric.
    """
    values = [float(row[metric]) for row in logged_rows(run, metric)]
    choose, numbers = best_of(metric), [value for value in values if not math.isnan(value)]
    return values[-1], choose(numbers) if choose and numbers else values[-1]


def minutes_range(minutes: Iterable[float | None]) -> str:
    """Return the shortest and the longest duration as text; empty if none is known."""
    known = [one for one in minutes if one is not None]
    return " to ".join(sorted({f"{min(known):.1f}", f"{max(known):.1f}"}, key=float)) if known else ""


def results_of(run: Path) -> list[str]:
    """Return the best and the last value of each validation metric, or of a training metric if there is none, as text.

    Empty without ``metrics.csv``.
    """
    lines = []
    for name in _result_metrics(run):
        rows = logged_rows(run, name)
        best, row = (min if name.endswith("loss") else max)(
            ((float(row[name]), row) for row in rows), key=lambda logged: logged[0]
        )
        clock = "env_steps" if row.get("clock/env_steps") else "optimizer_steps"
        when = f"after {float(row.get(f'clock/{clock}') or 0):.0f} {clock.replace('_', ' ')}"
        lines.append(f"{name:16}  best {best:.4g} ({when}), last {float(rows[-1][name]):.4g}")
    return lines


def commands_of(run: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the checkpoint of a run, ``best.ckpt`` if there is one, and commands that use the run, by name.

    A command for which the run does not have what it needs is left out. A run that has finished is resumed with limits
    that are twice as high.

    Args:
        run: the run directory.
        names: ``checkpoint``, ``evaluate``, ``watch``, ``plot``, ``compare`` or ``resume``.
    """
    shown, commands = shlex.quote(str(run)), dict[str, str]()
    found = [file for name in ("best.ckpt", "last.ckpt") if (file := run / "checkpoints" / name).exists()]
    first = shlex.quote(str(found[0])) if found else ""
    loaded = shown if [file.name for file in found] == ["last.ckpt"] else first  # of a directory, last.ckpt is loaded
    metric = next(iter(_result_metrics(run)), "") if {"plot", "compare"} & {*names} else ""
    for name in names:
        if name == "checkpoint" and found:
            commands[name] = first
        elif name in ("evaluate", "watch") and found:
            commands[name] = f"lrl {name} --checkpoint {loaded}{_validated_at(run)}"
        elif name == "plot" and metric:
            clock = "" if "clock/env_steps" in _columns(run) else " --clock minutes"
            picture = shlex.quote(str(run / f"{metric.replace('/', '_')}.png"))
            commands[name] = f"lrl plot {shown} --metric {metric}{clock} --out {picture}"
        elif name == "compare" and (other := _other_run(run, metric)):
            commands[name] = f"lrl compare {shown} --baseline {shlex.quote(str(other))} --metric {metric}"
        elif name == "resume" and found and found[-1].name == "last.ckpt" and (run / "config.yaml").exists():
            commands[name] = f"lrl fit --resume {shown}{raised_limits(run)}"  # lrl.train writes no config.yaml
    return commands


def _validated_at(run: Path) -> str:
    """Return the option with which ``lrl evaluate`` samples as in validation; empty for its default, temperature 0."""
    try:
        temperature = section(section(read_config(run), "data"), "validation").get("temperature")
    except _UNREADABLE:
        return ""
    return f" --temperature {temperature:g}" if isinstance(temperature, (int, float)) and temperature else ""


def _result_metrics(run: Path) -> list[str]:
    """Return the result metrics that a run has logged: those of validation, or the first one of training."""
    found = [name for name in RESULT_METRICS if name in _columns(run)]
    return [name for name in found if name.startswith("val/")] or found[:1]


def _columns(run: Path) -> list[str]:
    """Return the columns of a run's ``metrics.csv``; none if there is no such file."""
    file = run / "metrics.csv"
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return next(csv.reader(lines), [])


def _other_run(run: Path, metric: str) -> Path | None:
    """Return the newest finished run beside this one that differs in settings, but not in seed and environment.

    Runs whose files cannot be read are left out.
    """
    try:
        own = read_config(run)
    except _UNREADABLE:
        return None
    origin = run.name.partition("-resumed-")[0]
    seed = re.compile(rf"^seed_everything: {own.get('seed_everything')}$", re.M)
    found = list[tuple[float, Path]]()
    for folder in run.parent.iterdir():
        if folder == run or is_replaced(folder) or folder.name.partition("-resumed-")[0] == origin:
            continue
        with suppress(*_UNREADABLE):
            if (
                seed.search((folder / "config.yaml").read_text(encoding="utf-8"))  # parsing YAML takes much longer
                and metric in _columns(folder)
                and trains(folder)
                and minutes_of(folder) is not None
                and _environment(config := read_config(folder)) == _environment(own)
                and without_run(config) != without_run(own)
            ):
                found.append((folder.stat().st_mtime, folder))
    return max(found)[1] if found else None


def _environment(config: Mapping[str, Any]) -> Any:
    """Return the settings of the environment in a configuration; None if it has none."""
    data = config.get("data") or {}
    return (data.get("init_args") or data).get("env")
