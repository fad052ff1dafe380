"""Figures as a table, and as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrl.evaluation.episodes import EpisodeResults

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = {
    "return": ("return", 3),
    "length": ("length", 1),
    "success_rate": ("success", 3),
    "invalid_action_rate": ("invalid", 3),
}
"""Figure to heading and decimals."""


def results_table(rows: Mapping[str, EpisodeResults], title: str, caption: str = "") -> Table:
    """One row per policy; each figure stands over its 95% interval.

    Args:
        rows: results by the name of the policy.
        title: above the table.
        caption: below it.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left"
    )
    table.add_column("policy", overflow="fold", min_width=8)
    for heading in (*(heading for heading, _ in _COLUMNS.values()), "steps/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, results in rows.items():
        means, intervals = results.means(), results.intervals()
        figures = [f"{means[key]:.{n}f}\n{_bounds(intervals[key], n)}" for key, (_, n) in _COLUMNS.items()]
        table.add_row(name, *figures, f"{results.env_steps_per_second:,.0f}")
    return table


def _bounds(interval: tuple[float, float], decimals: int) -> str:
    if np.isnan(interval).any():
        return "no interval"
    return f"{interval[0]:.{decimals}f}..{interval[1]:.{decimals}f}"


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write a report whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
