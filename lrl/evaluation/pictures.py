"""Pictures: learning curves with intervals over seeds, and policies on FrozenLake."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_bounds, interquartile_mean
from lrl.files import is_replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lrl.evaluation.exact import Lake


CLOCKS = ("env_steps", "episodes", "tokens", "minutes")
"""Units of the x axis, which are columns ``clock/<name>`` of ``metrics.csv``."""

_RESAMPLES = 2000
_LABEL_WIDTH = 60
"""Maximum number of characters in a line of the legend, so that it fits inside the axes."""
_EPISODES = {"rollout": "training episodes", "val": "held-out episodes"}
"""Episodes on which a metric is measured, by the first part of its name."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Holds one metric of one run."""

    clock: np.ndarray
    """Strictly increasing values of the clock, float64 ``(row,)``."""
    values: np.ndarray
    """Values of the metric, float64 ``(row,)``."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Holds one metric averaged over several runs."""

    label: str
    """Label of the curve in the legend."""
    clock: np.ndarray
    """Values of the clock, float64 ``(point,)``."""
    centre: np.ndarray
    """Mean or interquartile mean over runs, ``(point,)``."""
    lower: np.ndarray
    """Lower bound of the 95% interval, ``(point,)``; nan with fewer than five runs."""
    upper: np.ndarray
    """Upper bound of the interval, ``(point,)``; nan with fewer than five runs."""
    runs: np.ndarray
    """Values of the single runs, ``(run, point)``."""

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return len(self.runs)


def metrics_file(run: Path) -> Path:
    """Return the path of the ``metrics.csv`` in a run directory or below it; a path of a file is returned unchanged.

    Raises:
        ValueError: If there is no such file, or more than one.
    """
    if run.is_file():
        return run
    found = [run / "metrics.csv"] if (run / "metrics.csv").exists() else sorted(run.rglob("metrics.csv"))
    found = [file for file in found if not any(map(is_replaced, file.relative_to(run).parents))]
    if len(found) != 1:
        raise ValueError(f"run is {str(run)!r}, which holds {len(found)} files metrics.csv; it must hold one.")
    return found[0]


def logged_metrics(run: Path) -> set[str]:
    """Return the metrics that a run's ``metrics.csv`` contains, without the step and the clocks.

    Raises:
        ValueError: If there is no such file, or more than one.
    """
    with metrics_file(run).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {name for row in rows for name, value in row.items() if value and not name.startswith(("clock/", "step"))}


def logged_rows(run: Path, metric: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a run's ``metrics.csv`` that contain a metric, in the order of the file.

    Args:
        run: a run directory, or its ``metrics.csv``.
        metric: column of the metric.
        columns: further columns that a row must contain.

    Raises:
        ValueError: If there is no such row; existing metrics are listed.
    """
    file = metrics_file(run)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    found = [row for row in rows if all(row.get(name) for name in (metric, *columns))]
    if not found:
        names = ", ".join(sorted(logged_metrics(file))) or "nothing"
        raise ValueError(f"metric is {metric!r}, which {file} lacks; it has {names}.")
    return found


def common_clock(runs: Iterable[Path], metric: str) -> str:
    """Return the first of :data:`CLOCKS` that every run has logged together with a metric; ``env_steps`` if none is.

    Args:
        runs: run directories, or their ``metrics.csv``.
        metric: column of the metric.

    Raises:
        ValueError: If a run lacks the metric.
    """
    rows = [logged_rows(run, metric) for run in runs]
    known = (clock for clock in CLOCKS if all(any(row.get(f"clock/{clock}") for row in own) for own in rows))
    return next(known, CLOCKS[0])


def read_series(run: Path, metric: str, clock: str = "env_steps") -> Series:
    """Read one metric of a run; of several rows with the same clock, the last one is used.

    Args:
        run: a run directory, or its ``metrics.csv``.
        metric: column of the metric.
        clock: one of :data:`CLOCKS`.

    Raises:
        ValueError: If the metric, the clock or the run does not exist; existing metrics are listed.
    """
    if clock not in CLOCKS:
        raise ValueError(f"clock is {clock!r}; it must be one of {', '.join(CLOCKS)}.")
    column = f"clock/{clock}"
    points = {float(row[column]): float(row[metric]) for row in logged_rows(run, metric, column)}
    order = sorted(points)
    return Series(clock=np.array(order), values=np.array([points[at] for at in order]))


def aggregate(label: str, runs: Sequence[Series], statistic: Literal["mean", "iqm"] = "iqm") -> Curve:
    """Average runs, with a 95% percentile bootstrap interval if there are at least five.

    Runs are interpolated linearly at the clock values of all runs, within the range that all runs cover, so that every
    point is an average over the same runs.

    Args:
        label: label of the curve.
        runs: at least one run.
        statistic: ``mean`` or ``iqm``, the interquartile mean.

    Raises:
        ValueError: If the statistic is unknown, or the runs have no common range.
    """
    if statistic not in ("mean", "iqm"):
        raise ValueError(f"statistic is {statistic!r}; it must be mean or iqm.")
    first, last = max(run.clock[0] for run in runs), min(run.clock[-1] for run in runs)
    clock = np.unique(np.concatenate([run.clock for run in runs]))
    clock = clock[(clock >= first) & (clock <= last)]
    if not len(clock):
        raise ValueError(f"the runs of {label!r} share no range of the clock; they must have different labels.")
    values = np.stack([np.interp(clock, run.clock, run.values) for run in runs])
    reduce = np.mean if statistic == "mean" else interquartile_mean
    lower, upper = np.full((2, len(clock)), np.nan)
    if len(runs) >= MIN_SEEDS:
        lower, upper = bootstrap_bounds((values,), reduce, resamples=_RESAMPLES)  # whole runs are resampled
    centre = reduce(values, axis=0)
    return Curve(label=label, clock=clock, centre=centre, lower=lower, upper=upper, runs=values)


def draw_curves(
    curves: Sequence[Curve],
    metric: str,
    clock: str,
    path: Path,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
    log: bool = False,
) -> None:
    """Draw curves and horizontal baselines to a PNG.

    Args:
        curves: curves, with an interval for five runs or more, and a thin line per run for two to four.
        metric: label of the y axis, with one line per metric.
        clock: label of the x axis.
        path: path of the PNG; missing folders are created.
        baselines: label to height of horizontal lines.
        title: title above the picture.
        log: whether the x axis is logarithmic and each point has a marker.
    """
    figure, axes = new_figure(7, 4.2)
    axes.set_xscale("log" if log else "linear")
    for curve in curves:
        _draw_curve(axes, curve, log)
    for shade, (label, height) in zip(_greys(len(baselines or {})), (baselines or {}).items(), strict=True):
        axes.axhline(height, color=shade, linestyle="--", linewidth=1.2, label=f"{label} ({height:,.4g})")
    if all(0 <= value <= 1 for curve in curves for value in curve.centre):
        axes.set_ylim(0, 1.04)  # the full range of a rate
    axes.set_xlabel(clock.replace("_", " "))
    axes.set_ylabel("\n".join(map(axis_label, metric.splitlines())))
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def _draw_curve(axes: Axes, curve: Curve, marked: bool) -> None:
    marker = "o" if marked or len(curve.clock) < 3 else ""
    (line,) = axes.plot(curve.clock, curve.centre, label=_legend_label(curve), marker=marker)
    if curve.num_runs >= MIN_SEEDS:
        axes.fill_between(curve.clock, curve.lower, curve.upper, color=line.get_color(), alpha=0.2, linewidth=0)
    elif curve.num_runs > 1:
        points = "." if marked else ""
        axes.plot(curve.clock, curve.runs.T, color=line.get_color(), alpha=0.4, linewidth=0.8, marker=points)


def axis_label(metric: str) -> str:
    """Return the name of a metric with the episodes on which it is measured."""
    group, _, name = metric.partition("/")
    exact = name.startswith("exact_")  # computed from the transition table, not measured on episodes
    return metric if exact or group not in _EPISODES else f"{metric}, {_EPISODES[group]}"


def _legend_label(curve: Curve) -> str:
    text = curve.label if curve.num_runs == 1 else f"{curve.label} ({curve.num_runs} runs)"
    return textwrap.fill(text, _LABEL_WIDTH)


def _greys(count: int) -> list[str]:
    return [f"{0.2 + 0.5 * index / max(count, 2):.2f}" for index in range(count)]


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of ``width`` x ``height`` inches with one pair of axes; it needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format="png")


# Pictures of a policy on FrozenLake.

_COLOURS = {"S": "#dbeafe", "F": "#eff6ff", "H": "#334155", "G": "#bbf7d0"}
_ARROWS = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""Directions of LEFT, DOWN, RIGHT and UP, as cells to the right and cells down."""
_BEST, _OTHER = "#1d4ed8", "#94a3b8"


def draw_policy(lake: Lake, decisions: np.ndarray, path: Path, title: str = "") -> None:
    """Draw the map to a PNG, with an arrow and the probability of each action in each state.

    The length of an arrow increases with the probability. The most probable action is blue. The probability of invalid
    actions is shown in red.

    Args:
        lake: the map.
        decisions: action probabilities ``(state, action)``; if a row sums to less than 1, the rest is the probability
            of invalid actions.
        path: path of the PNG; missing folders are created.
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
