"""Read the records of a run: configuration, metrics and duration; and name the commands that use the run."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lrl.evaluation.statistics import RESULT_METRICS, best_of, without_run
from lrl.files import from_yaml, is_replaced

_FINISHED = re.compile(r"finished after ([\d.]+) minutes")
_LAUNCHED = " INFO run directory "
"""First message of each launch in ``run.log``."""

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
    with metrics_file(run).open(newline="") as lines:
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
    with file.open(newline="") as lines:
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
    if not isinstance(config, dict) or not all(isinstance(config.get(name, {}), dict) for name in ("model", "data")):
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
    except (OSError, ValueError, KeyError):
        return None


def raised_limits(run: Path) -> str:
    """Return options that double all limits of a run that has finished, with which ``lrl fit --resume`` continues it.

    All are doubled, because a limit that the run did not reach could end it soon afterwards. There are none for a run
    that has not finished, or whose files are missing or damaged.
    """
    config = _config(run) if known_minutes(run) is not None else {}
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
    for name in _results(run):
        rows = logged_rows(run, name)
        best, row = (min if name.endswith("loss") else max)(
            ((float(row[name]), row) for row in rows), key=lambda logged: logged[0]
        )
        clock = "env_steps" if row.get("clock/env_steps") else "optimizer_steps"
        when = f"after {float(row.get(f'clock/{clock}') or 0):.0f} {clock.replace('_', ' ')}"
        lines.append(f"{name:16}  best {best:.4g} ({when}), last {float(rows[-1][name]):.4g}")
    return lines


def commands_of(run: Path) -> dict[str, str]:
    """Return the checkpoint of a run, ``best.ckpt`` if there is one, and the commands that use the run, by name.

    The names are ``checkpoint``, ``evaluate``, ``watch``, ``plot``, ``compare`` and ``resume``. A command for which the
    run does not have what it needs is left out. A run that has finished is resumed with limits that are twice as high.
    """
    shown, metric = _shown(run), next(iter(_results(run)), "")
    found = [file for name in ("best.ckpt", "last.ckpt") if (file := run / "checkpoints" / name).exists()]
    checkpoint = _shown(found[0]) if len(found) > 1 else shown  # of a run directory, last.ckpt is loaded
    other = _other_run(run, metric)
    commands = {}
    if found:
        commands["checkpoint"] = _shown(found[0])
        commands["evaluate"] = f"lrl evaluate --checkpoint {checkpoint}"
        commands["watch"] = f"lrl watch --checkpoint {checkpoint}"
    if metric:
        clock = "" if "clock/env_steps" in _columns(run) else " --clock minutes"
        picture = _shown(run / f"{metric.replace('/', '_')}.png")
        commands["plot"] = f"lrl plot {shown} --metric {metric}{clock} --out {picture}"
    if other is not None:
        commands["compare"] = f"lrl compare {shown} --baseline {_shown(other)} --metric {metric}"
    if found and found[-1].name == "last.ckpt" and (run / "config.yaml").exists():  # lrl.train writes no config.yaml
        commands["resume"] = f"lrl fit --resume {shown}{raised_limits(run)}"
    return commands


def _results(run: Path) -> list[str]:
    """Return the result metrics that a run has logged: those of validation, or the first one of training."""
    found = [name for name in RESULT_METRICS if name in _columns(run)]
    return [name for name in found if name.startswith("val/")] or found[:1]


def _columns(run: Path) -> list[str]:
    """Return the columns of a run's ``metrics.csv``; none if there is no such file."""
    file = run / "metrics.csv"
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        return next(csv.reader(lines), [])


def _other_run(run: Path, metric: str) -> Path | None:
    """Return the newest finished run beside this one that differs in settings, but not in seed and environment."""
    seed, origin = _seed(run), run.name.partition("-resumed-")[0]
    others = [folder for folder in run.parent.iterdir() if folder != run and folder.is_dir()]
    others = [one for one in others if one.name.partition("-resumed-")[0] != origin and not is_replaced(one)]
    others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    same = (folder for folder in others if seed is not None and _seed(folder) == seed)
    found = (one for one in same if metric in _columns(one) and known_minutes(one) is not None)
    found = (one for one in found if _environment(one) == _environment(run))
    return next((one for one in found if without_run(_config(one)) != without_run(_config(run))), None)


def _seed(run: Path) -> str | None:
    """Return the seed in the configuration of a run; None if there is none."""
    file = run / "config.yaml"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = re.search(r"^seed_everything: (\d+)$", text, re.M)
    return found and found[1]


def _config(run: Path) -> dict[str, Any]:
    """Return the configuration of a run; empty if its file is missing or damaged."""
    try:
        return read_config(run)
    except ValueError:
        return {}


def _environment(run: Path) -> Any:
    """Return the settings of the environment in the configuration of a run; None if it has none."""
    data = _config(run).get("data") or {}
    return (data.get("init_args") or data).get("env")


def _shown(path: Path) -> str:
    """Return a path for a command in a shell, relative to the current folder if it is inside."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
