"""The figure of searches and networks on all tasks: the best mean return so far against episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrl.evaluation.parameter_search import UNPLAYABLE
from lrl.evaluation.statistics import bootstrap_bounds
from lrl.reports.plots import Curve, save_figure
from lrl.reports.search_records import Records, best_so_far, is_random
from lrl.reports.seed_intervals import MIN_SEEDS
from lrl.search.tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_RESAMPLES = 2000
_POINTS = 400
"""Maximum number of points of a curve."""
_SKIPPED = 0.02
"""Fraction of the episodes before which a curve does not set the y axis: first policies may be far below all others."""


def progress_curve(method: str, records: Sequence[dict[str, Any]]) -> Curve:
    """Return the mean over seeds of the best so far, with the 95% interval of at least five seeds, else their range.

    A seed that ended earlier than others keeps its best.

    Args:
        method: label of the curve.
        records: of its seeds on one task, at least one.
    """
    runs = [best_so_far(record) for record in records]
    clock = np.unique(np.concatenate([run.clock for run in runs]))
    clock = clock[clock >= max(run.clock[0] for run in runs)]
    clock = clock[np.unique(np.linspace(0, len(clock) - 1, min(_POINTS, len(clock))).round().astype(int))]
    values = np.stack([run.values[np.searchsorted(run.clock, clock, side="right") - 1] for run in runs])
    lower, upper = values.min(0), values.max(0)
    if len(runs) >= MIN_SEEDS:
        lower, upper = bootstrap_bounds((values,), np.mean, resamples=_RESAMPLES)
    return Curve(
        label=method, num_runs=len(runs), clock=clock, centre=values.mean(0), lower=lower, upper=upper, runs=values
    )


def draw_progress(records: Records, path: Path) -> None:
    """Draw a panel for each task with a curve and a band for each method, and the published ProPS, to a PNG.

    Args:
        records: of all planned runs; what has not finished, cannot be played, or was random in place of a language
            model's proposals is left out, and so is a task of which nothing is left.
        path: the PNG; missing folders are created.

    Raises:
        ValueError: nothing is left to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = {run: record for run, record in records.items() if record is not None and _is_drawn(record)}
    if not records:
        raise ValueError("no run has finished that could be drawn; leave --picture out, or run some first.")
    tasks, methods = (list(dict.fromkeys(getattr(run, part) for run in records)) for part in ("task", "method"))
    colours = {method: f"C{place}" for place, method in enumerate(methods)}
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(max(5.0, 3.6 * columns), 2.6 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    lines: dict[str, Any] = {}
    for place, task in enumerate(tasks):
        axes = figure.add_subplot(rows, columns, place + 1)
        lines = _draw_task(axes, task, records, colours) | lines
        if place + columns >= len(tasks):
            axes.set_xlabel("episodes")
    figure.supylabel("best mean return so far, training episodes", fontsize=10)
    shown = [name for name in (*methods, "published ProPS") if name in lines]
    labels = [lines[name] for name in shown]
    figure.legend(labels, shown, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)


def _is_drawn(record: Mapping[str, Any]) -> bool:
    return UNPLAYABLE not in record and not is_random(record)


def _draw_task(axes: Axes, task: str, records: Records, colours: dict[str, str]) -> dict[str, Any]:
    """Draw one panel and return its lines by label."""
    lines, published = {}, TASKS[task].published.props
    heights = [published]
    for method, colour in colours.items():
        played = [
            record for run, record in records.items() if (run.task, run.method) == (task, method) and record is not None
        ]
        if not played:
            continue
        curve = progress_curve(method, played)
        axes.fill_between(curve.clock, curve.lower, curve.upper, color=colour, alpha=0.2, linewidth=0, step="post")
        (lines[method],) = axes.step(curve.clock, curve.centre, color=colour, linewidth=1.2, where="post")
        late = curve.clock >= _SKIPPED * curve.clock[-1]
        heights += [*curve.lower[late], *curve.upper[late]]
    lines["published ProPS"] = axes.axhline(published, color="0.3", linestyle="--", linewidth=1)
    margin = 0.05 * (max(heights) - min(heights) or 1.0)
    axes.set_ylim(min(heights) - margin, max(heights) + margin)
    axes.set_title(task.replace("_", " "), fontsize=9)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=7)
    return lines
