"""Pictures of searches, and the callback that writes every proposal to the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np

from lrl.evaluation.pictures import MAX_TOGETHER, Colour, Curve, new_figure, save_figure, shades, styled
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_bounds
from lrl.faults import appending
from lrl.registry import register
from lrl.search.experiments import UNPLAYABLE, Records, best_so_far, is_random
from lrl.search.module import PromptedSearchModule
from lrl.search.tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MAX_SHIFT = 0.12
"""Maximum vertical shift of a line; lines are shifted so that equal values of a parameter do not hide each other."""


def draw_search(trials: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the mean return of each policy and the highest so far against episodes, to a PNG file.

    Args:
        trials: at least one trial of a :class:`~lrl.search.module.PromptedSearchModule`.
        path: path of the PNG file; missing folders are created.
    """
    values = np.array([np.mean(trial["returns"]) for trial in trials])
    episodes = np.cumsum([len(trial["returns"]) for trial in trials])
    warm_up = np.array([trial["iteration"] < 1 for trial in trials])
    figure, axes = new_figure(7, 4.2)
    dark, light = shades(2)
    for chosen, label, colour in ((warm_up, "random policies", "0.6"), (~warm_up, "proposals", light)):
        if chosen.any():
            axes.plot(episodes[chosen], values[chosen], ".", color=colour, markersize=4, label=label)
    axes.step(episodes, np.maximum.accumulate(values), where="post", color=dark, label="best so far")
    axes.set(xlabel="episodes", ylabel="mean return of training episodes")
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_parameters(trials: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw each policy as a line over its parameters (parallel coordinates), to a PNG file.

    The colour of a line shows the rank of the mean return; the best policy is drawn in black on top.

    Args:
        trials: at least one trial of a :class:`~lrl.search.module.PromptedSearchModule`.
        path: path of the PNG file; missing folders are created.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    parameters = np.array([trial["parameters"] for trial in trials], dtype=np.float64)
    values = np.array([np.mean(trial["returns"]) for trial in trials])
    count, last = parameters.shape[1], max(1, len(trials) - 1)
    figure, axes = new_figure(min(14.0, 3.5 + 0.35 * count), 4.2)
    colours, x, marker = colormaps["viridis"], np.arange(count), "." if count == 1 else ""
    for rank, index in enumerate(np.argsort(values, kind="stable")):  # better policies on top
        shifted = parameters[index] + _MAX_SHIFT * (2 * index / last - 1)
        axes.plot(x, shifted, color=colours(rank / last), alpha=0.35, linewidth=0.8, marker=marker)
    best = parameters[int(values.argmax())]
    axes.plot(x, best, color="black", linewidth=1.6, marker=".", label=f"best ({values.max():,.4g})")
    axes.set(xlabel="parameter", ylabel="value")
    axes.legend(frameon=False, fontsize=9)
    figure.colorbar(ScalarMappable(cmap=colours), ax=axes, label="rank of the mean return")
    save_figure(figure, path)


@register
class SearchPictures(L.Callback):
    """Callback that writes ``proposals.jsonl`` after each proposal, and draws two pictures at the end.

    A line of ``proposals.jsonl`` describes a policy: ``iteration``, ``parameters``, ``returns``, ``env_steps``, and the
    ``replies`` of a language model. If a proposal ended the run, its ``parameters`` are null. The file of a resumed run
    also contains the lines of the run that it continues. The pictures are ``search.png`` and ``parameters.png``.
    """

    def __init__(self) -> None:
        self._written = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the policies of the run that this run continues.

        Raises:
            ValueError: If the model is not a search.
        """
        if not isinstance(pl_module, PromptedSearchModule):
            name = type(pl_module).__name__
            raise ValueError(
                f"trainer.callbacks has SearchPictures, which draws searches, but {name} is not a search; remove the "
                "callback."
            )
        self._written = 0
        self._write(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        """Write the latest policy."""
        self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, PromptedSearchModule)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "proposals.jsonl"
        with appending("a policy in", file), file.open("a" if self._written else "w", encoding="utf-8") as lines:
            for trial in pl_module.trials[self._written :]:
                lines.write(json.dumps(trial, ensure_ascii=False) + "\n")
        self._written = len(pl_module.trials)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw both pictures; if a finished search is resumed, also write its policies."""
        assert isinstance(pl_module, PromptedSearchModule)
        if pl_module.trials:
            if not self._written:
                self._write(trainer, pl_module)
            draw_search(pl_module.trials, Path(trainer.default_root_dir) / "search.png")
            draw_parameters(pl_module.trials, Path(trainer.default_root_dir) / "parameters.png")


_COLUMNS, _PUBLISHED = 3, "published ProPS"
_RESAMPLES = 2000
_POINTS = 400
"""Maximum number of points of a curve."""
_SKIPPED = 0.02
"""Initial fraction of the episodes that does not determine the y axis: first policies may be far below all others."""


def progress_curve(method: str, records: Sequence[dict[str, Any]]) -> Curve:
    """Return the best mean return so far against episodes, averaged over seeds.

    The band is the 95% interval of at least five seeds, or the range of fewer. A seed that ended earlier than others
    keeps its best value.

    Args:
        method: label of the curve.
        records: records of at least one seed on one task.
    """
    runs = [best_so_far(record) for record in records]
    clock = np.unique(np.concatenate([run.clock for run in runs]))
    clock = clock[clock >= max(run.clock[0] for run in runs)]
    clock = clock[np.unique(np.linspace(0, len(clock) - 1, min(_POINTS, len(clock))).round().astype(int))]
    values = np.stack([run.values[np.searchsorted(run.clock, clock, side="right") - 1] for run in runs])
    lower, upper = values.min(0), values.max(0)
    if len(runs) >= MIN_SEEDS:
        lower, upper = bootstrap_bounds((values,), np.mean, resamples=_RESAMPLES)
    return Curve(label=method, clock=clock, centre=values.mean(0), lower=lower, upper=upper, runs=values)


def draw_progress(records: Records, path: Path) -> None:
    """Draw a panel for each task with a curve and a band for each method, and the published ProPS, to a PNG file.

    With more than :data:`~lrl.evaluation.pictures.MAX_TOGETHER` methods, a task has several panels side by side
    with the same axes, each with some of the methods.

    Args:
        records: records of all planned runs. Runs without figures, and runs of a language model with mostly random
            proposals, are left out.
        path: path of the PNG file; missing folders are created.

    Raises:
        ValueError: If no run has finished.
    """
    from matplotlib.figure import Figure

    drawn: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run, record in records.items():
        if record is not None and UNPLAYABLE not in record and not is_random(record):
            drawn.setdefault(run.task, {}).setdefault(run.method, []).append(record)
    if not drawn:
        raise ValueError("picture is given, but no run has finished; leave it out, or finish a run before.")
    methods = list(dict.fromkeys(method for played in drawn.values() for method in played))
    groups = [methods[start : start + MAX_TOGETHER] for start in range(0, len(methods), MAX_TOGETHER)]
    colours = {method: colour for group in groups for method, colour in zip(group, shades(len(group)), strict=True)}
    places = [(task, group) for task in drawn for group in groups]
    columns = min(_COLUMNS if len(groups) == 1 else 2 * len(groups), len(places))
    rows = -(-len(places) // columns)
    figure = Figure(figsize=(max(5.0, min(11.0, 3.6 * columns)), 2.1 * rows + 0.6), layout="constrained")
    lines: dict[str, Any] = {}
    left: Axes | None = None
    for place, (task, group) in enumerate(places):
        left = None if group is groups[0] else left
        axes = styled(figure.add_subplot(rows, columns, place + 1, sharex=left, sharey=left))
        lines |= _draw_task(axes, task, drawn[task], colours, group)
        left = left or axes
        if place + columns >= len(places):
            axes.set_xlabel("episodes")
    figure.supylabel("best mean return so far, training episodes", fontsize=10)
    shown = [*methods, _PUBLISHED]
    handles = [lines[name] for name in shown]
    figure.legend(handles, shown, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)


def _draw_task(
    axes: Axes,
    task: str,
    played: Mapping[str, Sequence[dict[str, Any]]],
    colours: Mapping[str, Colour],
    group: Sequence[str],
) -> dict[str, Any]:
    """Draw a panel of one task with a group of methods, and return its lines by label.

    Args:
        axes: the panel.
        task: name of the task.
        played: records of each method; all of them determine the y axis.
        colours: colour of each method.
        group: methods of this panel.
    """
    published = TASKS[task].published["props"]
    lines, heights = {_PUBLISHED: axes.axhline(published, color="0.35", linestyle=":", linewidth=1.2)}, [published]
    line = "-" if group[0] == next(iter(colours)) else "--"
    for method, records in played.items():
        curve, colour = progress_curve(method, records), colours[method]
        late = curve.clock >= _SKIPPED * curve.clock[-1]
        heights += [*curve.lower[late], *curve.upper[late]]
        if method not in group:
            continue
        axes.fill_between(curve.clock, curve.lower, curve.upper, color=colour, alpha=0.2, linewidth=0, step="post")
        (lines[method],) = axes.step(curve.clock, curve.centre, line, color=colour, linewidth=1.4, where="post")
    margin = 0.05 * (max(heights) - min(heights) or 1.0)
    axes.set_ylim(min(heights) - margin, max(heights) + margin)
    axes.set_title(task.replace("_", " "), fontsize=9)
    axes.tick_params(labelsize=7)
    axes.locator_params(axis="x", nbins=4)
    return lines
