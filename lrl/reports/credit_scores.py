"""Tables and the figure of advantages that were compared with the exact ones, from the numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.reports.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def credit_table(result: Mapping[str, Any], tokens: int, averaged: bool = False) -> str:
    """Return a Markdown table of correlations with intervals over seeds, one row per estimator.

    Args:
        result: what :func:`~lrl.reports.credit_truth.measure` returned, or the file that holds it.
        tokens: tokens per turn.
        averaged: whether correlations are those of averages, else those of single tokens, beside error variances.
    """
    names, key = (
        [policy["policy"] for policy in result["policies"]],
        "averaged_correlation" if averaged else "correlation",
    )
    heads = [f"{policy['policy']} (success {policy['success']:.3f})" for policy in result["policies"]]
    if not averaged:
        heads = [cell for head in heads for cell in (head, "error variance")]
    lines = [f"| estimator | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    rows: dict[str, dict[str, str]] = {}
    for row in result["scores"]:
        if row["tokens"] == tokens:
            low, high = row[f"{key}_ci95"]
            cell = f"{row[key]:.3f} ({low:.3f} to {high:.3f})"
            cell += "" if averaged else f" | {row['error_variance']:.3e}"
            rows.setdefault(row["estimator"], {})[row["policy"]] = cell
    lines += [f"| {name} | {' | '.join(cells[policy] for policy in names)} |" for name, cells in rows.items()]
    if not averaged:
        nothing = (f"0 | {policy[f'truth_variance_{tokens}']:.3e}" for policy in result["policies"])
        lines.append(f"| no estimate | {' | '.join(nothing)} |")
    return "\n".join(lines)


def draw_scores(result: Mapping[str, Any], path: Path) -> None:
    """Draw the correlations of each estimator with their intervals to a PNG; open markers have three tokens per turn.

    Args:
        result: what :func:`~lrl.reports.credit_truth.measure` returned, or the file that holds it.
        path: the PNG; missing folders are created.
    """
    figure, axes = new_figure(11, 7)
    axes.remove()
    left, right = figure.subplots(1, 2, sharey=True)
    estimators = list(dict.fromkeys(row["estimator"] for row in result["scores"]))
    names = [policy["policy"] for policy in result["policies"]]
    for axes, key in ((left, "correlation"), (right, "averaged_correlation")):
        for row in result["scores"]:
            _draw_score(axes, row, key, estimators.index(row["estimator"]), names.index(row["policy"]))
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.grid(alpha=0.3)
    left.set_yticks(range(len(estimators)), estimators)
    left.invert_yaxis()
    left.set_xlabel("correlation with the true advantage, single tokens")
    right.set_xlabel("the same, averaged over a state's equal choices")
    for number, policy in enumerate(result["policies"]):
        right.plot([], [], "o", color=f"C{number}", label=f"{policy['policy']}, success {policy['success']:.3f}")
    for tokens in sorted({row["tokens"] for row in result["scores"]}):
        filled = "none" if tokens > 1 else "full"
        right.plot([], [], "o", color="0.4", fillstyle=filled, label=f"{tokens} token{'s' * (tokens > 1)} per turn")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    save_figure(figure, path)


def _draw_score(axes: Axes, row: Mapping[str, Any], key: str, height: int, policy: int) -> None:
    several = row["tokens"] > 1
    at = height + 0.22 * (policy - 1) + 0.09 * several
    axes.plot(row[f"{key}_ci95"], [at, at], color=f"C{policy}", linewidth=1.2)
    axes.plot(row[key], at, "o", color=f"C{policy}", markersize=4.5, fillstyle="none" if several else "full")
