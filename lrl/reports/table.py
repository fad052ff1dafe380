"""Evaluation results as a table in the terminal and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrl.evaluation.results import EpisodeResults
from lrl.whole_file import write_whole

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = {
    "return": ("return", 3),
    "length": ("length", 1),
    "success_rate": ("success", 3),
    "invalid_action_rate": ("invalid", 3),
}
"""Metric to its heading and the maximum number of decimals."""
_DIGITS = 4
"""Number of digits that are shown, including decimals; more only before the decimal point."""


def results_table(rows: Mapping[str, EpisodeResults], title: str, caption: str = "") -> Table:
    """Return a table with one row per policy, in which each mean is above its 95% interval.

    Args:
        rows: results by the name of the policy.
        title: title above the table.
        caption: caption below the table.
    """
    from rich import box
    from rich.table import Table

    justify: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    table = Table(title=title, caption=caption or None, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **justify)
    table.add_column("policy", overflow="fold", min_width=8)
    for heading in (*(heading for heading, _ in _COLUMNS.values()), "steps/s"):
        table.add_column(heading, justify="right", overflow="fold")  # digits are never replaced by an ellipsis
    for name, results in rows.items():
        means, intervals = results.means(), results.intervals()
        figures = [
            _figure(means[key], intervals[key], most) if key in means else "none" for key, (_, most) in _COLUMNS.items()
        ]
        table.add_row(name, *figures, f"{results.env_steps_per_second:,.0f}")
    return table


def _figure(mean: float, interval: tuple[float, float], most: int) -> str:
    """Return a mean above its interval, with as many decimals for all three numbers as the largest has."""
    finite = [abs(value) for value in (mean, *interval) if np.isfinite(value)]
    whole = len(f"{max(finite, default=0):.0f}")
    decimals = max(0, min(most, _DIGITS - whole))
    if np.isnan(interval).any():
        return f"{mean:.{decimals}f}\nno interval"
    low, high = (f"{bound:.{decimals}f}" for bound in interval)
    between = ".." if len(low) + len(high) <= 2 * (_DIGITS + 2) else "..\n"
    return f"{mean:.{decimals}f}\n{low}{between}{high}"


def write_json(report: Mapping[str, object], path: Path) -> None:
    """Write a JSON file completely or not at all; missing folders are created."""
    with write_whole(path) as file:
        file.write(json.dumps(report, indent=2, allow_nan=False) + "\n")
