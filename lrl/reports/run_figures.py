"""The seed and one figure of runs, read from run directories or kept results."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lrl.reports.plots import metrics_file
from lrl.reports.seed_intervals import bounds_of
from lrl.reports.table import read_result

DEFAULT_METRIC = "val/exact_success"
"""The metric that is read where none is named and no kept result names one."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One figure of several runs: the last value of a metric, or the env steps that a value of it took."""

    by_seed: Mapping[int, float]
    """Seed to figure."""
    bounds: tuple[float, float] | None
    """The least and the greatest value that the figure can take; None where it has no such bounds."""


@dataclass(frozen=True, kw_only=True)
class _Curve:
    values: Sequence[float]
    env_steps: Sequence[float]
    """Of each value; empty where the run has no such clock."""


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


def read_figures(
    paths: Sequence[Path], metric: str, bounds: tuple[float, float] | None = None, steps_to: float | None = None
) -> RunFigures:
    """Read one figure of every run: the last value of a metric.

    Args:
        paths: run directories, and JSON files of kept results, which hold several runs each.
        metric: a column of ``metrics.csv``; the metric of kept results, or the one that is drawn of them.
        bounds: of the metric; None takes those of a rate or of a kept result.
        steps_to: read the env steps after which the metric is first at least this, instead of its last value.

    Raises:
        ValueError: a path does not exist or lacks the metric, a run never reaches ``steps_to``, or two runs have the
            same seed.
    """
    curves: dict[int, _Curve] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"run is {str(path)!r}, which does not exist; name a run directory or a kept result.")
        if path.suffix == ".json":
            result = _kept(path)
            found = [(int(run["seed"]), _kept_curve(path, result, run, metric)) for run in result["runs"]]
            bounds = bounds or (bounds_of(result) if metric == result["metric"] else None)
        else:
            found = [(_seed(path), _logged_curve(path, metric))]
        for seed, curve in found:
            if seed in curves:
                raise ValueError(f"run is {str(path)!r}, whose seed {seed} another run has; name one run per seed.")
            curves[seed] = curve
    if steps_to is not None:
        return RunFigures(by_seed=_steps_to(steps_to, metric, curves), bounds=None)
    last = {seed: curve.values[-1] for seed, curve in curves.items()}
    return RunFigures(by_seed=last, bounds=bounds or bounds_of({"metric": metric}))


def _steps_to(value: float, metric: str, curves: Mapping[int, _Curve]) -> dict[int, float]:
    best = {seed: max(curve.values) for seed, curve in curves.items()}
    worst = min(best, key=lambda seed: best[seed])
    if not best[worst] >= value:
        raise ValueError(
            f"steps_to is {value:g}, but {metric} of seed {worst} reaches {best[worst]:g}; it must be at most that."
        )
    without = [seed for seed, curve in curves.items() if len(curve.env_steps) < len(curve.values)]
    if without:
        raise ValueError(f"steps_to is {value:g}, but {metric} of seed {without[0]} has no env steps; leave it out.")
    return {
        seed: next(steps for steps, one in zip(curve.env_steps, curve.values, strict=True) if one >= value)
        for seed, curve in curves.items()
    }


def _kept(path: Path) -> dict[str, Any]:
    """Read a kept result that holds runs."""
    result = read_result(path)
    if "metric" not in result or not result.get("runs"):
        raise ValueError(f"run is {str(path)!r}, which holds no runs with a metric; name the result of training runs.")
    return result


def _kept_curve(path: Path, result: Mapping[str, Any], run: Mapping[str, Any], metric: str) -> _Curve:
    """Return the metric's curve, or the one that is drawn."""
    curve = next((run[name] for name in ("curve", "drawn") if metric in run.get(name, {})), None)
    if curve is None:
        raise ValueError(f"metric is {metric!r}, but {path} holds {result['metric']!r}; name that metric.")
    return _Curve(values=[float(value) for value in curve[metric]], env_steps=curve.get("env_steps", []))


def _logged_curve(run: Path, metric: str) -> _Curve:
    """Return a column of ``metrics.csv``."""
    file = metrics_file(run)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    logged = [row for row in rows if row.get(metric)]
    if not logged:
        names = sorted({name for row in rows for name, value in row.items() if value and "clock/" not in name})
        raise ValueError(f"metric is {metric!r}, which {file} lacks; it has {', '.join(names) or 'nothing'}.")
    steps = [float(row["clock/env_steps"]) for row in logged if row.get("clock/env_steps")]
    return _Curve(values=[float(row[metric]) for row in logged], env_steps=steps)


def _seed(run: Path) -> int:
    """Return the seed of a run directory."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"run is {str(run)!r}, which is not a run directory: it has no config.yaml.")
    return int(yaml.safe_load(file.read_text(encoding="utf-8"))["seed_everything"])
