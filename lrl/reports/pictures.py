"""Pictures of a policy on FrozenLake."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lrl.evaluation.exact import Lake
from lrl.reports.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"S": "#dbeafe", "F": "#eff6ff", "H": "#334155", "G": "#bbf7d0"}
_ARROWS = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""Directions of LEFT, DOWN, RIGHT and UP, as cells to the right and cells down."""
_BEST, _OTHER = "#1d4ed8", "#94a3b8"


def draw_policy(lake: Lake, decisions: np.ndarray, path: Path, title: str = "") -> None:
    """Draw the map with an arrow for each action, whose length grows with the probability beside it, to a PNG.

    The most probable action is blue. The probability of invalid actions is shown in red.

    Args:
        lake: the map.
        decisions: action probabilities ``(state, action)``; the rest of a row's sum to 1 is that of invalid actions.
        path: the PNG; missing folders are created.
        title: title above the picture.
    """
    rows, columns = len(lake.desc), len(lake.desc[0])
    figure, axes = new_figure(1.35 * columns, 1.35 * rows + 0.4)
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title, fontsize=10)
    acting = set(lake.states)
    for state in range(rows * columns):
        row, column = divmod(state, columns)
        _draw_cell(axes, column, row, lake.desc[row][column])
        if state in acting:
            _draw_decision(axes, column + 0.5, row + 0.5, decisions[state])
    save_figure(figure, path)


def _draw_cell(axes: Axes, column: int, row: int, letter: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=_COLOURS[letter], edgecolor="white", linewidth=2))
    colour = "white" if letter == "H" else "#64748b"
    axes.text(column + 0.06, row + 0.06, letter, ha="left", va="top", fontsize=8, color=colour)


def _draw_decision(axes: Axes, x: float, y: float, probabilities: np.ndarray) -> None:
    best = int(probabilities.argmax())
    for action, probability in enumerate(probabilities.tolist()):
        if probability < 0.005:
            continue
        right, down = _ARROWS[action]
        colour, reach = (_BEST if action == best else _OTHER), 0.08 + 0.22 * probability
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1 + 2 * probability, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(x + right * reach, y + down * reach), xytext=(x, y), arrowprops=style)
        axes.text(
            x + right * 0.38,
            y + down * 0.38,
            f"{probability:.2f}".lstrip("0"),
            ha="center",
            va="center",
            fontsize=6.5,
            color=colour,
        )
    if probabilities.sum() < 0.995:
        invalid = f"{1 - probabilities.sum():.2f}".lstrip("0")
        axes.text(x + 0.44, y - 0.4, f"invalid {invalid}", ha="right", va="top", fontsize=6, color="#dc2626")
