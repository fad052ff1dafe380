"""The table of searchers on held-out synthetic functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"random_search": "random search", "cma_es": "CMA-ES", "in_context": "in-context search"}
_CONTROL = "random_search"
_GROUPS = {"all": "all", "real": "real parameters", "tables": "tables"}


def synthetic_table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row per searcher and group of functions of each report.

    Args:
        reports: what ``lrl synthetic_search --json`` wrote, by name.

    Raises:
        ValueError: one is another kind of file.
    """
    heads = ["searcher", "functions", "proposals", "exact value", "gain on random search", "better on"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, report in reports.items():
        if "searchers" not in report:
            raise ValueError(f"{name!r} holds no searchers of `lrl synthetic_search --json`.")
        for group, title in _GROUPS.items():
            for searcher, whole in report["searchers"].items():
                figures = whole if group == "all" else whole.get(group)
                if figures is None:
                    continue
                cells = [_NAMES.get(searcher, searcher), title, str(report["iterations"])]
                cells.append(_interval(figures["value"], figures["value_ci95"]))
                compared = searcher != _CONTROL and "gain" in figures
                cells.append(_interval(figures["gain"], figures["gain_ci95"]) if compared else "")
                cells.append(f"{figures['better_share']:.0%}" if compared else "")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _interval(mean: float, bounds: Sequence[float]) -> str:
    return f"{mean:.3f} ({bounds[0]:.3f} to {bounds[1]:.3f})"
