"""The figure of two metrics of the same runs, such as a modelled reward and the return that it leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrl.reports.plots import axis_label, new_figure, save_figure


def draw_twin(results: Sequence[Mapping[str, Any]], clock: str, path: Path) -> Path:
    """Draw the ``drawn`` metric of runs on the left axis and their ``metric`` on the right one, a line per run.

    Args:
        results: kept results whose ``drawn`` is another metric than their ``metric``; the first names both axes.
        clock: the x axis, one of :data:`lrl.reports.plots.CLOCKS`.
        path: the PNG.

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
