"""Pictures of learning curves with intervals over seeds, and the style of all pictures."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lrl.evaluation.run_records import logged_rows
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_bounds, interquartile_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


Colour = tuple[float, float, float, float]
"""Red, green, blue and opacity, from 0 to 1."""

CLOCKS = ("env_steps", "episodes", "tokens", "minutes")
"""Units of the x axis, which are columns ``clock/<name>`` of ``metrics.csv``."""

MAX_TOGETHER = 4
"""Maximum number of curves in a pair of axes; more curves are drawn in a pair of axes each."""

_RESAMPLES = 2000
_LABEL_WIDTH = 60
"""Maximum number of characters in a line of the legend."""
_EPISODES = {"rollout": "training episodes", "val": "held-out episodes"}
"""Episodes on which a metric is measured, by the first part of its name."""
_NAMES = {
    "return": "return (sum of rewards)",
    "length": "length in turns",
    "train/loss": "training loss",
    "search/best_return": "best mean return so far, training episodes",
}
"""Names of metrics on axes, by the whole name or its last part; others are written with spaces."""
_EARLY = 0.95
"""A run has ended early if its last clock value is below this fraction of that of the longest run."""
_CARRIED = "some runs have ended and keep their last value"
_RATE = (0, 1.04)  # limits of an axis that shows the full range of a rate
_LOW = "0.75"  # grey of curves that are shown for comparison


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
    """Values of the single runs, ``(run, point)``; nan where a run has ended or has no value."""
    ended: float = math.inf
    """Clock value from which the centre contains last values of runs that ended early; infinite without such runs."""

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return len(self.runs)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Holds what is drawn of one metric."""

    metric: str
    """Column of ``metrics.csv``; several lines name several metrics."""
    curves: Sequence[Curve]
    """Curves, in the same order in all panels of a picture."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Label to height of horizontal lines."""
    final: bool = False
    """Whether each curve is a single point, the final value, which is drawn without a clock."""


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


def aggregate(
    label: str, runs: Sequence[Series], statistic: Literal["mean", "iqm"] = "iqm", by_row: bool = False
) -> Curve:
    """Average runs, with a 95% percentile bootstrap interval if there are at least five.

    Runs are interpolated linearly at the clock values of all runs. The curve starts where all runs have started. A run
    that has ended keeps its last value, so that every point is an average over the same runs, and the last point is the
    average of the last values.

    Args:
        label: label of the curve.
        runs: at least one run.
        statistic: ``mean`` or ``iqm``, the interquartile mean.
        by_row: average the n-th rows of the runs at the mean of their clock values, if all runs have the same number of
            rows. This suits a clock such as minutes, whose values differ because the machine's speed differs. Runs of
            one row are always averaged in this way.

    Raises:
        ValueError: If the statistic is unknown, or the runs have no common range.
    """
    if statistic not in ("mean", "iqm"):
        raise ValueError(f"statistic is {statistic!r}; it must be mean or iqm.")
    ends, shortest = [run.clock[-1] for run in runs], min(run.clock[-1] for run in runs)
    ended = math.inf
    lengths = {len(run.clock) for run in runs}
    if lengths == {1} or (by_row and len(lengths) == 1):
        clock = np.mean([run.clock for run in runs], axis=0)
        values = shown = np.stack([run.values for run in runs])
    else:
        first = max(run.clock[0] for run in runs)
        if first > shortest:
            raise ValueError(f"the runs of {label!r} share no range of the clock; they must have different labels.")
        clock = np.unique(np.concatenate([run.clock for run in runs]))
        clock = clock[clock >= first]
        values = np.stack([np.interp(clock, run.clock, run.values) for run in runs])
        shown = np.where(clock <= np.array(ends)[:, None], values, np.nan)
        ended = shortest if shortest < _EARLY * max(ends) else math.inf
    reduce = np.mean if statistic == "mean" else interquartile_mean
    lower, upper = np.full((2, len(clock)), np.nan)
    if len(runs) >= MIN_SEEDS:
        lower, upper = bootstrap_bounds((values,), reduce, resamples=_RESAMPLES)  # whole runs are resampled
    centre = reduce(values, axis=0)
    return Curve(label=label, clock=clock, centre=centre, lower=lower, upper=upper, runs=shown, ended=ended)


def draw_curves(
    curves: Sequence[Curve],
    metric: str,
    clock: str,
    path: Path,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
    log: bool = False,
) -> None:
    """Draw curves and horizontal baselines to a PNG, see :func:`draw_panels`."""
    draw_panels([Panel(metric=metric, curves=curves, baselines=baselines or {})], clock, path, title, log)


def draw_panels(panels: Sequence[Panel], clock: str, path: Path, title: str = "", log: bool = False) -> None:
    """Draw panels side by side to a PNG, with a common legend below.

    A curve has an interval for five runs or more, and a thin line per run for two to four. It is dotted where runs have
    ended early. More than :data:`MAX_TOGETHER` curves are drawn in a pair of axes each, with the others in grey.

    Args:
        panels: at least one panel.
        clock: one of :data:`CLOCKS`, or a label of the x axis.
        path: path of the PNG; missing folders are created.
        title: title above the picture.
        log: whether the x axis is logarithmic and each point has a marker.
    """
    figure = _empty_figure(7 if len(panels) == 1 else 11, 4.2)
    count = len(panels[0].curves)
    apart = count > MAX_TOGETHER
    if apart:
        figure.set_size_inches(figure.get_figwidth(), 1 + 1.7 * -(-count // 2))
    numbered = apart and any(panel.final for panel in panels)
    widths = [2 if panel.final and len(panels) > 1 else 3 for panel in panels]
    parts = figure.subfigures(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for panel, part in zip(panels, parts, strict=True):
        if panel.final:
            axes = styled(part.add_subplot())
            _draw_finals(axes, panel, numbered)
            axes.set(xlabel="last value of each run", ylabel=_axis_labels(panel.metric))
        elif apart:
            _draw_apart(part, panel, log, numbered)
            part.supxlabel(clock.replace("_", " "), fontsize=9)
            part.supylabel(_axis_labels(panel.metric), fontsize=9)
        else:
            axes = styled(part.add_subplot())
            _draw_together(axes, panel, log)
            axes.set(xlabel=clock.replace("_", " "), ylabel=_axis_labels(panel.metric))
    if title:
        figure.suptitle(title, fontsize=11)
    _add_legend(figure)
    save_figure(figure, path)


def _draw_together(axes: Axes, panel: Panel, log: bool) -> None:
    _prepare(axes, panel, log)
    for colour, curve in zip(shades(len(panel.curves)), panel.curves, strict=True):
        _draw_curve(axes, curve, colour, _legend_label(curve), log)
    _draw_baselines(axes, panel)


def _draw_apart(part: SubFigure, panel: Panel, log: bool, numbered: bool) -> None:
    grid = part.subplots(-(-len(panel.curves) // 2), 2, sharex=True, sharey=True)
    for place, (axes, curve) in enumerate(zip(grid.flat, panel.curves)):
        _prepare(styled(axes), panel, log)
        for other in panel.curves:
            marker = "." if len(other.clock) == 1 else ""
            axes.plot(other.clock, other.centre, color=_LOW, linewidth=0.9, marker=marker)
        _draw_curve(axes, curve, shades(1)[0], "", log)
        _draw_baselines(axes, panel)
        number = f"{place + 1}  " if numbered else ""
        axes.tick_params(labelbottom=place + 2 >= len(panel.curves))
        axes.set_title(_wrapped(f"{number}{_runs_label(curve)}", 34), fontsize=8, loc="left")
    for axes in grid.flat[len(panel.curves) :]:
        axes.set_visible(False)
    low = min([float(np.nanmin(curve.runs)) for curve in panel.curves] + list(panel.baselines.values()))
    if grid.flat[0].get_ylim() == _RATE and low > 0.6:  # small panels of rates that are all high
        axes.set_ylim(np.floor(10 * low - 0.25) / 10, 1.01)


def _draw_finals(axes: Axes, panel: Panel, numbered: bool) -> None:
    """Draw the values of single runs as points, with a line at their mean and a bar for its interval."""
    _prepare(axes, panel, False)
    for place, (colour, curve) in enumerate(zip(shades(len(panel.curves)), panel.curves, strict=True)):
        values, shift = curve.runs[:, 0], np.linspace(-0.25, 0.25, curve.num_runs) if curve.num_runs > 1 else 0
        axes.plot(place + shift, np.sort(values), "o", color=colour, markersize=4, alpha=0.6)
        axes.hlines(curve.centre[0], place - 0.35, place + 0.35, color=colour, linewidth=2)
        axes.vlines(place, curve.lower[0], curve.upper[0], color=colour, linewidth=1.5)
        axes.plot([], [], color=colour, label="" if numbered else _legend_label(curve))
    _draw_baselines(axes, panel)
    low, high = axes.get_ylim()
    if high - low < 0.12 * max(abs(low), abs(high)):  # values that hardly differ: show their distance to 0
        axes.set_ylim(min(0, 1.04 * low), max(0, 1.04 * high))
    places = range(len(panel.curves))
    axes.set_xticks(places if numbered else [], [f"{place + 1}" for place in places] if numbered else [])
    axes.set_xlim(-0.6, len(places) - 0.4)


def _prepare(axes: Axes, panel: Panel, log: bool) -> None:
    from matplotlib.ticker import NullFormatter

    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_number)
        axes.xaxis.set_minor_formatter(NullFormatter())
    if "success" in panel.metric and all(0 <= value <= 1 for curve in panel.curves for value in curve.centre):
        axes.set_ylim(*_RATE)


def _draw_curve(axes: Axes, curve: Curve, colour: Colour, label: str, marked: bool) -> None:
    marker = "o" if marked or len(curve.clock) < 3 else ""
    early, late = curve.clock <= curve.ended, curve.clock >= curve.ended
    axes.plot(curve.clock[early], curve.centre[early], color=colour, label=label, marker=marker, markersize=4)
    if math.isfinite(curve.ended):
        axes.plot(curve.clock[late], curve.centre[late], ":", color=colour)
        axes.plot([], [], ":", color="0.35", label=_CARRIED)
    if curve.num_runs >= MIN_SEEDS:
        axes.fill_between(curve.clock, curve.lower, curve.upper, color=colour, alpha=0.2, linewidth=0)
    elif curve.num_runs > 1:
        points = "." if marked else ""
        axes.plot(curve.clock, curve.runs.T, color=colour, alpha=0.45, linewidth=0.8, marker=points)


def _draw_baselines(axes: Axes, panel: Panel) -> None:
    styles = ((0, (4, 2)), (0, (1, 1.5)), (0, (7, 2, 1, 2)))
    for place, (label, height) in enumerate(panel.baselines.items()):
        text = f"{label} ({height:,.4g})"
        axes.axhline(height, color="0.35", linestyle=styles[place % 3], linewidth=1.2, label=text, zorder=1)


def _add_legend(figure: Figure) -> None:
    """Add the labelled lines of all axes below them, one entry per label, and make the figure higher for them."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if _CARRIED in entries:
        entries[_CARRIED] = entries.pop(_CARRIED)  # the last one
    if not entries:
        return
    width, height = figure.get_size_inches()
    widest = max(len(line) for label in entries for line in label.splitlines())
    columns = max(1, int(width * 13 / (widest + 6)))
    rows = -(-len(entries) // columns)
    columns = -(-len(entries) // rows)  # equally full rows
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.set_size_inches(width, height + 0.18 * rows * max(1 + label.count("\n") for label in entries))


def axis_label(metric: str) -> str:
    """Return the name of a metric on an axis, with the episodes on which it is measured."""
    group, _, noun = metric.partition("/")
    name = _NAMES.get(metric) or _NAMES.get(noun) or noun.replace("_", " ")
    if metric in _NAMES or not noun:
        return name or group
    if noun.startswith("exact_"):  # computed from the transition table, not measured on episodes
        return f"{noun.removeprefix('exact_').replace('_', ' ')}, computed exactly"
    if group not in _EPISODES:
        return f"{name} ({group})"
    head, bracket, unit = name.partition(" (")
    return f"{head} of {_EPISODES[group]}{bracket}{unit}"


def _axis_labels(metrics: str) -> str:
    return "\n".join(map(axis_label, metrics.splitlines()))


def _runs_label(curve: Curve) -> str:
    return curve.label if curve.num_runs == 1 else f"{curve.label} ({curve.num_runs} runs)"


def _legend_label(curve: Curve) -> str:
    return _wrapped(_runs_label(curve), _LABEL_WIDTH)


def _wrapped(label: str, width: int) -> str:
    kept = re.sub(r" (?=runs\)$)", "\0", label)  # the number of runs stays in one line
    return textwrap.fill(kept, width).replace("\0", " ")


def shades(count: int) -> list[Colour]:
    """Return colours that differ in lightness, from dark to light, so that they also differ in grey."""
    from matplotlib import colormaps

    places = [0.25] if count == 1 else np.linspace(0, 0.82, count)
    return [colormaps["viridis"](float(place)) for place in places]


def _number(value: float, _: object = None) -> str:
    return f"{value:,.10g}"


def _empty_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of ``width`` x ``height`` inches with one pair of axes; it needs no display."""
    figure = _empty_figure(width, height)
    return figure, styled(figure.add_subplot())


def styled(axes: Axes) -> Axes:
    """Give axes the style of all pictures: a grid, no frame above and on the right, numbers without an offset."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.xaxis.set_major_formatter(_number)
    axes.yaxis.set_major_formatter(_number)
    axes.locator_params(axis="x", nbins=6)
    return axes


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG of at most 256 colours; missing folders are created."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    written = io.BytesIO()
    figure.savefig(written, dpi=150 if figure.get_figheight() < 10 else 100, format="png")
    with Image.open(written) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)
