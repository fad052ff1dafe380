"""The command ``lrl table``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lrl.cli.command import command
from lrl.files import is_replaced


def table(runs: list[Path], *, metric: str | None = None) -> None:
    """Print a table of runs with one row per configuration.

    lrl table runs/frozen_lake/grpo-sweep
    lrl table runs/cartpole/* --metric val/return

    Runs with the same configuration are one row; their seeds, directories and loggers may differ. Of several runs with
    the same configuration and seed, such as a run and its continuation, the longest one counts. The first columns are
    the settings in which the configurations differ. The others are the number of seeds, the last and the best value of
    the metric in a run, and the minutes of a run. Values are means over seeds with a 95% interval, or with the value of
    each run if there are fewer than five. Metrics such as an entropy, of which no direction is better, have no best.

    Args:
        runs: run directories, or folders that contain them.
        metric: a column of metrics.csv; default: the most important metric that the runs have in common.

    Raises:
        ValueError: If there are no runs, or they have no common metric.
    """
    print(summary_table(run_directories(runs), metric))


def run_directories(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories among paths and below them, each once.

    Interrupted runs that were started again (:func:`lrl.files.is_replaced`) are left out if there are others.

    Raises:
        ValueError: If a path contains no run directory.
    """
    found: dict[Path, None] = {}
    for path in paths:
        below = [path / "config.yaml"] if (path / "config.yaml").is_file() else sorted(path.rglob("config.yaml"))
        runs = [file.parent for file in below if "earlier" not in file.parts and _trains(file.parent)]
        if not runs:
            raise ValueError(f"run is {str(path)!r}, which holds no run directory, a folder with a config.yaml.")
        found |= dict.fromkeys(runs)
    return [run for run in found if not is_replaced(run)] or list(found)


def summary_table(runs: Sequence[Path], metric: str | None = None) -> str:
    """Return a Markdown table of runs with one row per configuration, and lines about runs that are left out.

    Args:
        runs: run directories.
        metric: a column of ``metrics.csv``; None chooses the most important one that the runs have in common.

    Raises:
        ValueError: If the runs have no common metric, or none has logged the given one.
    """
    from lrl.evaluation.comparison import common_metric, group_by_configuration, minutes_of
    from lrl.evaluation.pictures import logged_metrics
    from lrl.evaluation.report import markdown_table
    from lrl.evaluation.statistics import best_of

    logged = {run: logged_metrics(run) if (run / "metrics.csv").is_file() else set[str]() for run in runs}
    metric = common_metric([run for run in runs if logged[run]], metric)
    shown = [run for run in runs if metric in logged[run]]
    if not shown:
        names = ", ".join(sorted(set[str]().union(*logged.values()))) or "nothing"
        raise ValueError(f"metric is {metric!r}, which no run has logged; they have {names}.")
    longest = _longest(shown, metric)
    groups = group_by_configuration(longest)
    groups.sort(key=lambda group: [_order(text) for text in group.settings.values()])
    settings = list(groups[0].settings)
    rows = [
        [*(_cell(text) for text in (group.settings.values() or [group.label])), *_figures(group.runs, metric)]
        for group in groups
    ]
    best = ["best"] if best_of(metric) else []
    lines = [markdown_table([*(settings or ["runs"]), "seeds", f"last {metric}", *best, "minutes"], rows)]
    for count, what in (
        (len(runs) - len(shown), f"without {metric}, left out"),
        (len(shown) - len(longest), "shorter than another run with the same configuration and seed, left out"),
        (sum(minutes_of(run) is None for run in longest), "not finished, in the table with the value so far"),
    ):
        if count:
            lines.append(f"{count} of {len(runs)} runs: {what}")
    return "\n".join(lines)


def _trains(run: Path) -> bool:
    """Return whether a run directory is that of ``lrl fit``, and not of ``lrl validate``, ``test`` or ``predict``."""
    file = run / "command.txt"
    return not file.is_file() or not {"validate", "test", "predict"} & set(file.read_text(encoding="utf-8").split()[:2])


def _longest(runs: Sequence[Path], metric: str) -> list[Path]:
    """Return for each configuration and seed the run that logged a metric at the highest step."""
    from lrl.evaluation.comparison import read_config
    from lrl.evaluation.pictures import logged_rows
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
    from lrl.evaluation.comparison import last_and_best, minutes_of, minutes_range
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
