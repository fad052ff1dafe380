"""The figure of a result against the number of demonstrated rows that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrl.evaluation.pictures import Curve, axis_label, draw_curves, new_figure, save_figure
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_interval, bounds_of, t_interval


def rows_curve(
    label: str, values_by_rows: Mapping[int, np.ndarray], bounds: tuple[float, float] | None = None
) -> Curve:
    """Return final values against the number of rows, with the interval of tables at points of five seeds or more.

    Args:
        label: Label of the curve.
        values_by_rows: Final values over seeds, ``(run,)``, by the number of rows; the numbers of seeds may differ.
        bounds: Of the metric, for which a bootstrap interval is used; None uses Student's interval.
    """
    rows = sorted(values_by_rows)
    most = max(len(values) for values in values_by_rows.values())
    runs = np.full((most, len(rows)), np.nan)
    interval = np.full((2, len(rows)), np.nan)
    for point, count in enumerate(rows):
        values = values_by_rows[count]
        runs[: len(values), point] = values
        if len(values) >= MIN_SEEDS:
            interval[:, point] = t_interval(values) if bounds is None else bootstrap_interval(values)
    return Curve(
        label=label,
        num_runs=most,
        clock=np.array(rows, dtype=np.float64),
        centre=np.nanmean(runs, axis=0),
        lower=interval[0],
        upper=interval[1],
        runs=runs,
    )


def draw_rows(results: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw results against their numbers of ``rows``, on a logarithmic axis: a line per label.

    Several results of one label and number of rows are one point.

    Args:
        results: Kept results with ``label``, ``rows``, ``metric`` and ``runs``; the first gives the y axis.
        path: The PNG.

    Returns:
        ``path``.
    """
    points: dict[str, dict[int, np.ndarray]] = {}
    for result in results:
        values = np.array([run["curve"][result["metric"]][-1] for run in result["runs"]])
        by_rows = points.setdefault(result["label"], {})
        by_rows[int(result["rows"])] = np.concatenate([by_rows.get(int(result["rows"]), values[:0]), values])
    baselines = {label: height for result in results for label, height in result["baselines"].items()}
    bounds = bounds_of(dict(results[0]))
    curves = [rows_curve(label, values, bounds) for label, values in points.items()]
    draw_curves(curves, results[0]["metric"], "demonstrated rows", path, baselines, log=True)
    return path


# The figure of two metrics of the same runs, such as a modelled reward and the return that it leads to.


def draw_twin(results: Sequence[Mapping[str, Any]], clock: str, path: Path) -> Path:
    """Draw the ``drawn`` metric of runs on the left axis and their ``metric`` on the right one, a line per run.

    Args:
        results: Kept results whose ``drawn`` is another metric than their ``metric``; the first names both axes.
        clock: The x axis, one of :data:`lrl.evaluation.pictures.CLOCKS`.
        path: The PNG.

    Returns:
        ``path``.
    """
    figure, left = new_figure(7, 4.2)
    right = left.twinx()
    left_color, right_color = "tab:blue", "tab:red"
    for result in results:
        for run in result["runs"]:
            left.plot(run["drawn"][clock], run["drawn"][result["drawn"]], color=left_color, alpha=0.7)
            right.plot(run["curve"][clock], run["curve"][result["metric"]], color=right_color, marker="o", alpha=0.7)
    left.set_xlabel(clock.replace("_", " "))
    left.set_ylabel(axis_label(results[0]["drawn"]), color=left_color)
    right.set_ylabel(axis_label(results[0]["metric"]), color=right_color)
    left.grid(alpha=0.3)
    save_figure(figure, path)
    return path
