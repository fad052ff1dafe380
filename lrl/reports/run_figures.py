"""The seed and the final figure of runs, read from run directories or kept results."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lrl.reports.plots import metrics_file
from lrl.reports.results import read_result
from lrl.reports.seed_intervals import bounds_of

DEFAULT_METRIC = "val/exact_success"
"""The metric that is read where none is named and no kept result names one."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One metric at the end of several runs."""

    by_seed: Mapping[int, float]
    """Seed to final value."""
    bounds: tuple[float, float] | None
    """The least and the greatest value that the metric can take; None where it has no such bounds."""


def common_metric(paths: Sequence[Path], metric: str | None = None) -> str:
    """Return ``metric``, or else the metric that all kept results among ``paths`` were made from.

    Raises:
        ValueError: the kept results have different metrics.
    """
    if metric is not None:
        return metric
    kept = {str(path): _kept(path)["metric"] for path in paths if path.suffix == ".json"}
    if len(set(kept.values())) > 1:
        told = ", ".join(f"{name} has {own}" for name, own in kept.items())
        raise ValueError(f"the results have different metrics ({told}); name results that have the same metric.")
    return next(iter(kept.values()), DEFAULT_METRIC)


def read_figures(paths: Sequence[Path], metric: str, bounds: tuple[float, float] | None = None) -> RunFigures:
    """Read the final value of a metric of every run.

    Args:
        paths: run directories, and JSON files of kept results, which hold several runs each.
        metric: a column of ``metrics.csv``; the metric of kept results, or the one that is drawn of them.
        bounds: of the metric; None takes those of a rate or of a kept result.

    Raises:
        ValueError: a path does not exist or lacks the metric, or two runs have the same seed.
    """
    figures: dict[int, float] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"run is {str(path)!r}, which does not exist; name a run directory or a kept result.")
        if path.suffix == ".json":
            result = _kept(path)
            found = [(int(run["seed"]), _final_kept(path, result, run, metric)) for run in result["runs"]]
            bounds = bounds or (bounds_of(result) if metric == result["metric"] else None)
        else:
            found = [(_seed(path), _final_logged(path, metric))]
        for seed, value in found:
            if seed in figures:
                raise ValueError(f"run is {str(path)!r}, whose seed {seed} another run has; name one run per seed.")
            figures[seed] = value
    return RunFigures(by_seed=figures, bounds=bounds or bounds_of({"metric": metric}))


def _kept(path: Path) -> dict[str, Any]:
    """Read a kept result that holds runs."""
    result = read_result(path)
    if "metric" not in result or not result.get("runs"):
        raise ValueError(f"run is {str(path)!r}, which holds no runs with a metric; name the result of training runs.")
    return result


def _final_kept(path: Path, result: Mapping[str, Any], run: Mapping[str, Any], metric: str) -> float:
    """Return the last value of the metric's curve, or of the one that is drawn."""
    curve = next((run[name] for name in ("curve", "drawn") if metric in run.get(name, {})), None)
    if curve is None:
        raise ValueError(f"metric is {metric!r}, but {path} holds {result['metric']!r}; name that metric.")
    return float(curve[metric][-1])


def _final_logged(run: Path, metric: str) -> float:
    """Return the last value of a column of ``metrics.csv``."""
    file = metrics_file(run)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    values = [row[metric] for row in rows if row.get(metric)]
    if not values:
        names = sorted({name for row in rows for name, value in row.items() if value and "clock/" not in name})
        raise ValueError(f"metric is {metric!r}, which {file} lacks; it has {', '.join(names) or 'nothing'}.")
    return float(values[-1])


def _seed(run: Path) -> int:
    """Return the seed of a run directory."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"run is {str(run)!r}, which is not a run directory: it has no config.yaml.")
    return int(yaml.safe_load(file.read_text(encoding="utf-8"))["seed_everything"])
