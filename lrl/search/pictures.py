"""Pictures of searches, and the callback that writes every proposal to the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np

from lrl.evaluation.pictures import Curve, new_figure, save_figure
from lrl.evaluation.statistics import MIN_SEEDS, bootstrap_bounds
from lrl.registry import register
from lrl.search.experiments import UNPLAYABLE, Records, best_so_far, is_random
from lrl.search.module import PromptedSearchModule
from lrl.search.tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SAME = 0.12
"""Maximum vertical shift of a line, which makes equal values of a parameter visible."""


@dataclass(frozen=True, kw_only=True)
class SearchedPolicies:
    """Policies of a search in the order in which they were played."""

    parameters: np.ndarray
    """float64 ``(policy, parameter)``."""
    values: np.ndarray
    """Mean return of each policy, ``(policy,)``."""
    episodes: np.ndarray
    """Number of episodes up to and including each policy, ``(policy,)``."""
    warm_up: np.ndarray
    """Whether a policy is a random one before the first proposal, bool ``(policy,)``."""

    @classmethod
    def of(cls, trials: Sequence[dict[str, Any]]) -> SearchedPolicies:
        """Collect at least one trial of a :class:`~lrl.search.module.PromptedSearchModule`."""
        return cls(
            parameters=np.array([trial["parameters"] for trial in trials], dtype=np.float64),
            values=np.array([np.mean(trial["returns"]) for trial in trials]),
            episodes=np.cumsum([len(trial["returns"]) for trial in trials]),
            warm_up=np.array([trial["iteration"] < 1 for trial in trials]),
        )

    @property
    def best_so_far(self) -> np.ndarray:
        """Highest mean return up to each policy, ``(policy,)``."""
        return np.maximum.accumulate(self.values)

    def ranks(self) -> np.ndarray:
        """Return the rank of each policy by its mean return, from 0 for the worst to 1 for the best, ``(policy,)``."""
        order = np.argsort(np.argsort(self.values, kind="stable"), kind="stable")
        return order / max(1, len(order) - 1)


def draw_search(policies: SearchedPolicies, path: Path, title: str = "") -> None:
    """Draw the mean return of each policy and the highest so far against episodes, to a PNG file.

    Args:
        policies: policies of the search.
        path: path of the PNG file; missing folders are created.
        title: title of the picture.
    """
    figure, axes = new_figure(7, 4.2)
    for chosen, label, colour in ((policies.warm_up, "random policies", "0.6"), (~policies.warm_up, "proposals", "C0")):
        if chosen.any():
            axes.plot(policies.episodes[chosen], policies.values[chosen], ".", color=colour, markersize=4, label=label)
    axes.step(policies.episodes, policies.best_so_far, where="post", color="C1", label="best so far")
    axes.set_xlabel("episodes")
    axes.set_ylabel("mean return, training episodes")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_parameters(policies: SearchedPolicies, path: Path, title: str = "") -> None:
    """Draw each policy as a line over its parameters (parallel coordinates), to a PNG file.

    The colour of a line shows the rank of the mean return; the best policy is drawn in black on top.

    Args:
        policies: policies of the search.
        path: path of the PNG file; missing folders are created.
        title: title of the picture.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    count = policies.parameters.shape[1]
    figure, axes = new_figure(min(14.0, 3.5 + 0.35 * count), 4.2)
    ranks, colours, x = policies.ranks(), colormaps["viridis"], np.arange(count)
    for index in np.argsort(ranks, kind="stable"):  # better policies on top
        shifted = policies.parameters[index] + _SAME * (2 * index / max(1, len(ranks) - 1) - 1)
        axes.plot(x, shifted, color=colours(ranks[index]), alpha=0.35, linewidth=0.8, marker="." if count == 1 else "")
    best = policies.parameters[int(policies.values.argmax())]
    axes.plot(x, best, color="black", linewidth=1.6, marker=".", label=f"best ({policies.values.max():,.4g})")
    axes.set_xlabel("parameter")
    axes.set_ylabel("value")
    axes.set_title(title)
    axes.legend(frameon=False, fontsize=9)
    figure.colorbar(ScalarMappable(cmap=colours), ax=axes, label="rank of the mean return")
    save_figure(figure, path)


@register
class SearchPictures(L.Callback):
    """Callback that writes ``proposals.jsonl`` after each proposal, and draws two pictures at the end.

    A line of ``proposals.jsonl`` describes a policy: ``iteration``, ``parameters``, ``returns``, ``env_steps``, and the
    ``replies`` of a language model. If a proposal ended the run, its ``parameters`` are null. A resumed run also writes
    the lines of the run before. The pictures are ``search.png`` and ``parameters.png``.
    """

    def __init__(self) -> None:
        self._written = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the policies of the run before.

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
        with (folder / "proposals.jsonl").open("a" if self._written else "w", encoding="utf-8") as lines:
            for trial in pl_module.trials[self._written :]:
                lines.write(json.dumps(trial, ensure_ascii=False) + "\n")
        self._written = len(pl_module.trials)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw both pictures; of a finished search that is resumed, also write the policies."""
        assert isinstance(pl_module, PromptedSearchModule)
        if pl_module.trials:
            if not self._written:
                self._write(trainer, pl_module)
            policies, folder = SearchedPolicies.of(pl_module.trials), Path(trainer.default_root_dir)
            draw_search(policies, folder / "search.png")
            draw_parameters(policies, folder / "parameters.png")


_COLUMNS = 3
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

    Args:
        records: records of all planned runs. Runs without figures, and runs of a language model with mostly random
            proposals, are left out.
        path: path of the PNG file; missing folders are created.

    Raises:
        ValueError: If no run has finished.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = {run: record for run, record in records.items() if record is not None and _is_drawn(record)}
    if not records:
        raise ValueError("picture is given, but no run has finished; leave it out, or finish a run before.")
    tasks, methods = (list(dict.fromkeys(getattr(run, part) for run in records)) for part in ("task", "method"))
    colours = {method: f"C{place}" for place, method in enumerate(methods)}
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(max(5.0, 3.6 * columns), 2.6 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    lines: dict[str, Any] = {}
    for place, task in enumerate(tasks):
        axes = figure.add_subplot(rows, columns, place + 1)
        lines = _draw_task(axes, task, records, colours) | lines
        if place + columns >= len(tasks):
            axes.set_xlabel("episodes")
    figure.supylabel("best mean return so far, training episodes", fontsize=10)
    shown = [name for name in (*methods, "published ProPS") if name in lines]
    labels = [lines[name] for name in shown]
    figure.legend(labels, shown, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path)


def _is_drawn(record: Mapping[str, Any]) -> bool:
    return UNPLAYABLE not in record and not is_random(record)


def _draw_task(axes: Axes, task: str, records: Records, colours: dict[str, str]) -> dict[str, Any]:
    """Draw one panel and return its lines by label."""
    lines, published = {}, TASKS[task].published.props
    heights = [published]
    for method, colour in colours.items():
        played = [
            record for run, record in records.items() if (run.task, run.method) == (task, method) and record is not None
        ]
        if not played:
            continue
        curve = progress_curve(method, played)
        axes.fill_between(curve.clock, curve.lower, curve.upper, color=colour, alpha=0.2, linewidth=0, step="post")
        (lines[method],) = axes.step(curve.clock, curve.centre, color=colour, linewidth=1.2, where="post")
        late = curve.clock >= _SKIPPED * curve.clock[-1]
        heights += [*curve.lower[late], *curve.upper[late]]
    lines["published ProPS"] = axes.axhline(published, color="0.3", linestyle="--", linewidth=1)
    margin = 0.05 * (max(heights) - min(heights) or 1.0)
    axes.set_ylim(min(heights) - margin, max(heights) + margin)
    axes.set_title(task.replace("_", " "), fontsize=9)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=7)
    return lines
