"""Evaluation results as a table in the terminal and as a JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrl.files import write_whole

if TYPE_CHECKING:
    from rich.table import Table

    from lrl.evaluation.episodes import EpisodeResults


_COLUMNS = {
    "return": ("return", 3),
    "length": ("length", 1),
    "success_rate": ("success", 3),
    "invalid_action_rate": ("invalid", 3),
}
"""Heading and maximum number of decimals of each metric, by its name."""
_DIGITS = 4
"""Number of digits that are shown, including decimals; more if the integer part is longer."""


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
        table.add_column(heading, justify="right", overflow="fold")  # never replace digits by an ellipsis
    for name, results in rows.items():
        means, intervals = results.means(), results.intervals()
        figures = [
            _figure(means[key], intervals[key], max_decimals) if key in means else "none"
            for key, (_, max_decimals) in _COLUMNS.items()
        ]
        table.add_row(name, *figures, f"{results.env_steps_per_second:,.0f}")
    return table


def _figure(mean: float, interval: tuple[float, float], max_decimals: int) -> str:
    """Return a mean above its interval; all three numbers have as many decimals as the largest of them has space for.

    Args:
        mean: the mean.
        interval: lower and upper bound; nan if there is no interval.
        max_decimals: maximum number of decimals.
    """
    finite = [abs(value) for value in (mean, *interval) if np.isfinite(value)]
    whole = len(f"{max(finite, default=0):.0f}")
    decimals = max(0, min(max_decimals, _DIGITS - whole))
    if np.isnan(interval).any():
        return f"{mean:.{decimals}f}\nno interval"
    low, high = (f"{bound:.{decimals}f}" for bound in interval)
    between = ".." if len(low) + len(high) <= 2 * (_DIGITS + 2) else "..\n"
    return f"{mean:.{decimals}f}\n{low}{between}{high}"


def write_json(report: Mapping[str, object], path: Path) -> None:
    """Write a JSON file atomically; missing folders are created.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If a number is not finite.
    """
    with write_whole(path) as file:
        file.write(json.dumps(report, indent=2, allow_nan=False) + "\n")


def result_text(result: dict[str, Any]) -> str:
    """Return a result as JSON in which each list of numbers is on one line."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[\s+([-\d.,\se]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def read_result(path: Path, key: str = "result") -> dict[str, Any]:
    """Read a stored result.

    Args:
        path: the file.
        key: name of the setting that contains the path, for error messages.

    Raises:
        ValueError: If the file is missing or is not a JSON object.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{key} is {str(path)!r}, which cannot be read: {error}.") from error
    if not isinstance(result, dict):
        raise ValueError(f"{key} is {str(path)!r}, which must hold a JSON object.")
    return result


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the given column titles and rows of cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def environments_table(
    reports: Sequence[dict[str, Any]], settings: Sequence[str] | None = None, figure: str = "success"
) -> str:
    """Return a Markdown table of policies in environments, with intervals, from results of ``EpisodeResults.report``.

    A single policy has columns for return, length and success; several policies have one column each. Each keyword
    argument of the environments has a column.

    Args:
        reports: one report per environment and policy.
        settings: keyword arguments of the environments to show; None shows all.
        figure: metric that is shown for several policies: ``success``, ``return``, ``length`` or ``invalid``.
    """
    policies = list(dict.fromkeys(report["policy"] for report in reports))
    if settings is None:
        settings = list(dict.fromkeys(name for report in reports for name in report.get("env_kwargs", {})))
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for report in reports:
        cells.setdefault((report["env_id"], json.dumps(report.get("env_kwargs", {}))), []).append(report)
    compared = len(policies) > 1
    heads = ["environment", *settings]
    heads += policies if compared else ["return", "length", "success"]
    rows = []
    for alike in cells.values():
        first = alike[0]
        row = [f"`{first['env_id']}`", *(str(first.get("env_kwargs", {}).get(name, "")) for name in settings)]
        if compared:
            known = {report["policy"]: _with_interval(report, figure) for report in alike}
            row += [known.get(policy, "") for policy in policies]
        else:
            row += [_with_interval(first, name) for name in ("return", "length", "success")]
        rows.append(row)
    return markdown_table(heads, rows)


def _with_interval(report: dict[str, Any], name: str) -> str:
    mean = report[{"success": "success_rate", "invalid": "invalid_action_rate"}.get(name, f"{name}_mean")]
    decimals = 1 if name == "length" else 0 if abs(mean) >= 1000 else 3
    bounds = [f"{bound:.{decimals}f}" for bound in report.get(f"{name}_ci95", []) if bound is not None]
    return f"{mean:.{decimals}f}" + (f" ({bounds[0]} to {bounds[1]})" if bounds else "")
