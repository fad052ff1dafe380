"""The figure of a result against the number of demonstrated rows that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrl.evaluation.statistics import t_interval
from lrl.reports.plots import Curve, draw_curves
from lrl.reports.seed_intervals import MIN_SEEDS


def rows_curve(label: str, values_by_rows: Mapping[int, np.ndarray]) -> Curve:
    """Return final values against the number of rows, with Student's interval at points of five seeds or more.

    Args:
        label: label of the curve.
        values_by_rows: final values over seeds, ``(run,)``, by the number of rows; the numbers of seeds may differ.
    """
    rows = sorted(values_by_rows)
    most = max(len(values) for values in values_by_rows.values())
    runs = np.full((most, len(rows)), np.nan)
    bounds = np.full((2, len(rows)), np.nan)
    for point, count in enumerate(rows):
        values = values_by_rows[count]
        runs[: len(values), point] = values
        if len(values) >= MIN_SEEDS:
            bounds[:, point] = t_interval(values)
    return Curve(
        label=label,
        num_runs=most,
        clock=np.array(rows, dtype=np.float64),
        centre=np.nanmean(runs, axis=0),
        lower=bounds[0],
        upper=bounds[1],
        runs=runs,
    )


def draw_rows(results: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw results against their numbers of ``rows``, on a logarithmic axis: a line per label.

    Args:
        results: kept results with ``label``, ``rows``, ``metric`` and ``runs``; the first gives the y axis.
        path: the PNG.

    Returns:
        ``path``.
    """
    points: dict[str, dict[int, np.ndarray]] = {}
    for result in results:
        values = np.array([run["curve"][result["metric"]][-1] for run in result["runs"]])
        points.setdefault(result["label"], {})[int(result["rows"])] = values
    baselines = {label: height for result in results for label, height in result["baselines"].items()}
    curves = [rows_curve(label, values) for label, values in points.items()]
    draw_curves(curves, results[0]["metric"], "demonstrated rows", path, baselines, log=True)
    return path
