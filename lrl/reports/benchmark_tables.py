"""Markdown tables of what ``scripts/benchmark.py`` measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def benchmark_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per comparison of ``scripts/benchmark.py``."""
    return comparisons_table([(report, one) for report in reports for one in report["comparisons"]])


def comparisons_table(comparisons: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return a Markdown table with one row per comparison, each given with the report that it is from."""
    lines = ["| comparison | ours | theirs | ratio (repeats) |", "|---|---|---|---|"]
    for report, one in comparisons:
        ours, theirs = (_rate(float(np.median(one[side]))) for side in ("ours", "theirs"))
        ratios = f"{one['ratio']:.2f} ({one['ratio_min']:.2f} to {one['ratio_max']:.2f})"
        lines.append(f"| {report['title']}, {one['name']} | {ours} {one['unit']} | {theirs} | {ratios} |")
    return "\n".join(lines)


def _rate(rate: float) -> str:
    """Return a rate without decimals, or with two digits below 10."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def text_cost_table(report: dict[str, Any]) -> str:
    """Return a Markdown table of the cost of text in each environment of ``scripts/benchmark.py text``."""
    lines = ["| environment | text layer, microseconds per step | steps/s in text | native |", "|---|---|---|---|"]
    for one in report["environments_in_text"]:
        cost = np.array(one["text_layer_us"])
        spread = f"{np.median(cost):.1f} ({cost.min():.1f} to {cost.max():.1f})"
        rates = (f"{np.median(one[name]):,.0f}" for name in ("steps_per_second", "native_steps_per_second"))
        lines.append(f"| `{one['env_id']}` | {spread} | {' | '.join(rates)} |")
    return "\n".join(lines)
