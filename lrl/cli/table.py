"""The command ``lrl table``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lrl.cli.command import command
from lrl.cli.run_seeds import PLAN
from lrl.files import is_replaced

_MOST_NAMES = 5
"""Maximum number of missing runs that an error names."""


def table(runs: list[Path], *, metric: str | None = None, incomplete: bool = False) -> None:
    """Print a table of runs with one row per configuration.

    lrl table runs/frozen_lake/grpo-sweep
    lrl table runs/cartpole/* --metric val/return

    Runs with the same configuration are one row; their seeds, directories and loggers may differ. Of several runs with
    the same configuration and seed, such as a run and its continuation, the longest one counts. The first columns are
    the settings in which the configurations differ. The others are the number of seeds, the last and the best value of
    the metric in a run, and the minutes of a run. Values are means over seeds with a 95% interval, or with the value of
    each run if there are fewer than five. Metrics such as an entropy, of which no direction is better, have no best.

    If runs are missing, there is no table unless --incomplete is given: runs that have not finished or not logged the
    metric, and runs that `lrl run_seeds` or `lrl sweep` were to train in these folders but that have not started.

    Args:
        runs: run directories, or folders that contain them.
        metric: a column of metrics.csv; default: the most important metric that the runs have in common.
        incomplete: print the table without the missing runs, and lines that count them.

    Raises:
        ValueError: If there are no runs, they have no common metric, or some are missing.
    """
    found = run_directories(runs)
    print(summary_table(found, metric, _not_started(runs, found), incomplete))


def run_directories(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories among paths and below them, each once.

    Evaluations, and interrupted runs that were started again (:func:`lrl.files.is_replaced`), are left out if there are
    others.

    Raises:
        ValueError: If a path contains no run directory.
    """
    from lrl.evaluation.run_records import training_runs, trains

    found: dict[Path, None] = {}
    for path in training_runs(paths):
        below = [path / "config.yaml"] if (path / "config.yaml").is_file() else sorted(path.rglob("config.yaml"))
        runs = [file.parent for file in below if "earlier" not in file.parts and trains(file.parent)]
        others = {file.parent for file in path.rglob("metrics.csv") if "earlier" not in file.parts}
        others = sorted(run for run in others if not (run / "config.yaml").is_file())  # written by lrl.train
        if not runs:
            also = "; lrl.train writes none" if others else ""
            raise ValueError(f"run is {str(path)!r}, which holds no run directory, a folder with a config.yaml{also}.")
        for run in others:
            print(f"{run} is left out: it has no config.yaml, as lrl.train writes none.", file=sys.stderr)
        found |= dict.fromkeys(runs)
    return [run for run in found if not is_replaced(run)] or list(found)


def _not_started(paths: Sequence[Path], runs: Sequence[Path]) -> list[Path]:
    """Return the run directories at or below ``paths`` that are planned and not among ``runs``."""
    folders = [path.resolve() for path in paths]
    known, missing = {run.resolve() for run in runs}, dict[Path, None]()
    for folder in folders:
        for plan in (*(above / PLAN for above in (folder, *folder.parents[:2])), *sorted(folder.rglob(PLAN))):
            lines = plan.read_text(encoding="utf-8").splitlines() if plan.is_file() else []
            missing |= dict.fromkeys(run for run in (plan.parent / line for line in lines) if run not in known)
    return [Path(os.path.relpath(run)) for run in missing if any(run.is_relative_to(folder) for folder in folders)]


def summary_table(
    runs: Sequence[Path], metric: str | None = None, not_started: Sequence[Path] = (), incomplete: bool = True
) -> str:
    """Return a Markdown table of runs with one row per configuration, and lines about runs that are missing.

    Args:
        runs: run directories.
        metric: a column of ``metrics.csv``; None chooses the most important one that the runs have in common.
        not_started: planned run directories that do not exist.
        incomplete: whether runs may be missing.

    Raises:
        ValueError: If the runs have no common metric, none has logged the given one, or runs are missing.
    """
    from lrl.evaluation.comparison import common_metric, group_by_configuration
    from lrl.evaluation.report import markdown_table
    from lrl.evaluation.run_records import logged_metrics, minutes_of
    from lrl.evaluation.statistics import best_of

    logged = {run: logged_metrics(run) if (run / "metrics.csv").is_file() else set[str]() for run in runs}
    if not any(logged.values()):
        raise ValueError(f"run is {str(runs[0])!r}, and neither it nor another run has logged a metric yet.")
    metric = common_metric([run for run in runs if logged[run]], metric)
    shown = [run for run in runs if metric in logged[run]]
    if not shown:
        names = ", ".join(sorted(set[str]().union(*logged.values()))) or "nothing"
        raise ValueError(f"metric is {metric!r}, which no run has logged; they have {names}.")
    longest = _longest(shown, metric)
    missing = {
        "not started": not_started,
        f"without {metric}, left out": [run for run in runs if run not in shown],
        "not finished, in the table with the value so far": [run for run in longest if minutes_of(run) is None],
    }
    if not incomplete and any(missing.values()):
        raise ValueError(_missing_text(missing, len(runs) + len(not_started)))
    groups = group_by_configuration(longest)
    groups.sort(key=lambda group: [_order(text) for text in group.settings.values()])
    settings = list(groups[0].settings)
    rows = [
        [*(_cell(text) for text in (group.settings.values() or [group.label])), *_figures(group.runs, metric)]
        for group in groups
    ]
    best = ["best"] if best_of(metric) else []
    lines = [markdown_table([*(settings or ["runs"]), "seeds", f"last {metric}", *best, "minutes"], rows)]
    repeated = {"shorter than another run with the same configuration and seed, left out": set(shown) - set(longest)}
    total = len(runs) + len(not_started)
    lines += [f"{len(named)} of {total} runs: {what}" for what, named in (missing | repeated).items() if named]
    return "\n".join(lines)


def _missing_text(missing: Mapping[str, Sequence[Path]], total: int) -> str:
    """Return a sentence that names missing runs.

    Args:
        missing: runs by what they lack; what follows a comma is not shown.
        total: number of all runs.
    """
    names = [f"{run} ({what.partition(',')[0]})" for what, runs in missing.items() for run in runs]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (
        f"{len(names)} of {total} runs are missing: {', '.join(names[:_MOST_NAMES])}{more}; let them finish, or give "
        "--incomplete for a table that counts them."
    )


def _longest(runs: Sequence[Path], metric: str) -> list[Path]:
    """Return for each configuration and seed the run that logged a metric at the highest step."""
    from lrl.evaluation.run_records import logged_rows, read_config
    from lrl.evaluation.statistics import config_digest

    found: dict[tuple[str, object], tuple[float, Path]] = {}
    for run in runs:
        config = read_config(run)
        key = config_digest(config), config.get("seed_everything")
        steps = float(logged_rows(run, metric)[-1].get("step") or 0)
        if key not in found or steps > found[key][0]:
            found[key] = steps, run
    return [run for _, run in found.values()]


def _figures(runs: Sequence[Path], metric: str) -> list[str]:
    """Return the cells of a group of runs: seeds, last value, the best one if the metric has one, and minutes."""
    from lrl.evaluation.run_records import last_and_best, minutes_of, minutes_range
    from lrl.evaluation.statistics import best_of, bounds_of, mean_with_spread

    values, bounds = np.array([last_and_best(run, metric) for run in runs]), bounds_of({"metric": metric})
    values = values if best_of(metric) else values[:, :1]
    return [
        str(len(runs)),
        *(mean_with_spread(column, bounds) for column in values.T),
        minutes_range(map(minutes_of, runs)),
    ]


def _order(text: str) -> tuple[float, str]:
    """Return the sort key of a setting: numbers come first, by size."""
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def _cell(text: str) -> str:
    """Return a text for a cell of a Markdown table, cut to a width that fits the terminal."""
    text = text.replace("|", "\\|")
    return text if len(text) <= 40 else f"{text[:37]}..."


main = command(table)
