"""Progress of a run: a bar on the terminal, and logged lines."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import lightning as L
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lrl.evaluation.episodes import EpisodeResults
from lrl.evaluation.load import env_id
from lrl.evaluation.report import results_table, write_json
from lrl.registry import register

_LINES = 20
"""Number of lines that a run logs, at equal distances."""
_LONG_PASS = 100
"""Minimum number of batches of a pass within which lines are logged."""
_SHOWN = {
    "rollout/return": "return",
    "search/best_return": "best",
    "rollout/success_rate": "success",
    "rollout/invalid_action_rate": "invalid",
    "train/loss": "loss",
    "train/entropy": "entropy",
    "val/success_rate": "val success",
    "val/return": "val return",
    "val/exact_success": "val exact success",
    "val/r2": "val R2",
}
"""Labels of the metrics that are shown, by name."""


@register
class ConsoleProgress(L.Callback):
    """Shows a progress bar over collections on a terminal, and logs a line at every twentieth of the run.

    If a run has fewer than twenty passes over demonstrations, with at least 100 batches each, a line is also logged
    within passes, at every twentieth of the run, with the metrics that were logged last.

    If ``data.max_env_steps`` is expected to end the run, the number of collections is estimated for the bar, and lines
    show the number of env steps.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._reported = self._env_steps = self._twentieth = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar."""
        self._reported = trainer.current_epoch
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[figures]}"))
        total = _num_collections(trainer, pl_module) or None
        self._task = self._progress.add_task("training", total=total, completed=trainer.current_epoch, figures="")
        self._progress.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a line within a long pass over demonstrations, if one is due."""
        demonstrations = "optimizer_steps" in getattr(pl_module, "clocks", {})
        if not demonstrations or not trainer.is_global_zero:
            return
        passes, batches = _num_collections(trainer, pl_module), trainer.num_training_batches
        if not 0 < passes < _LINES or not _LONG_PASS <= batches < float("inf") or batch_idx + 1 >= batches:
            return
        done, total = trainer.current_epoch * int(batches) + batch_idx + 1, passes * int(batches)
        if self._progress is not None:
            self._progress.update(self._task, completed=done / batches)
        if done * _LINES // total > (done - 1) * _LINES // total and (figures := _figures(trainer)):
            logging.getLogger("lrl").info("batch %d/%d  %s", done, total, figures)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the number of env steps before the next collection increases it."""
        self._env_steps = int(getattr(pl_module, "clocks", {}).get("env_steps", 0))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the previous epoch, whose metrics are logged after every callback's ``on_train_epoch_end``."""
        self._report(trainer, pl_module, trainer.current_epoch)

    def _report(self, trainer: L.Trainer, pl_module: L.LightningModule, done: int, last: bool = False) -> None:
        """Move the bar to ``done`` epochs, and log a line if it is due."""
        if done <= self._reported or not trainer.is_global_zero:
            return
        self._reported, limit, figures = done, _num_collections(trainer, pl_module), _figures(trainer)
        budget = getattr(getattr(trainer, "datamodule", None), "max_env_steps", None)
        expected = -(-done * budget // self._env_steps) if budget and self._env_steps else limit
        total = min(limit or expected, expected)
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total or None, figures=figures)
        shares = (done, limit), (self._env_steps, budget)
        twentieth = max(part * _LINES // whole if whole else 0 for part, whole in shares)
        if done == 1 or twentieth > self._twentieth or done == limit or last:
            clock = f"env steps {self._env_steps}{f'/{budget}' if budget else ''}  " if self._env_steps else ""
            counted = f"{done}/{limit}" if limit and limit == total else f"{done}"
            logging.getLogger("lrl").info("collection %s  %s%s", counted, clock, figures)
        self._twentieth = twentieth

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the last epoch and remove the bar."""
        self._report(trainer, pl_module, trainer.current_epoch, last=True)
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the bar."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _figures(trainer: L.Trainer) -> str:
    metrics = trainer.callback_metrics
    return "  ".join(f"{label} {float(metrics[name]):.3f}" for name, label in _SHOWN.items() if name in metrics)


def _num_collections(trainer: L.Trainer, pl_module: L.LightningModule) -> int:
    """Return the number of collections of the whole run; 0 if neither the trainer nor the module limits it."""
    limits = (trainer.max_epochs, getattr(pl_module, "max_collections", None))
    return min((limit for limit in limits if limit is not None and limit > 0), default=0)


PREDICTIONS = "predictions.json"
"""Name of the file that ``predict`` writes into the run directory."""


class HeldOutTable(L.Callback):
    """Prints a table of results after held-out episodes; ``lrl validate``, ``test`` and ``predict`` add it."""

    def __init__(self) -> None:
        self._results: EpisodeResults | None = None

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, *_: Any, **__: Any
    ) -> None:
        """Store the results; the table is printed later, after other callbacks have logged their metrics."""
        self._results = outputs if isinstance(outputs, EpisodeResults) else None

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table."""
        self._print(trainer)

    on_test_end = on_validation_end

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table, and write all episodes to the run directory."""
        self._print(trainer)
        if self._results is not None and trainer.is_global_zero:
            data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
            report = self._results.report(env_id(data.validation_env), _policy_name(trainer))
            write_json(report, Path(trainer.default_root_dir) / PREDICTIONS)

    def _print(self, trainer: L.Trainer) -> None:
        if self._results is None or not trainer.is_global_zero:
            return
        from rich.console import Console

        results, data = self._results, trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        seeds = f"seeds {results.seed} to {results.seed + len(results) - 1}"
        where = f"{_policy_name(trainer)} in {env_id(data.validation_env)}"
        exact = trainer.callback_metrics.get("val/exact_success")
        lines = [results.success_rule, "" if exact is None else f"exact success: {float(exact):.4f}"]
        title = f"{where}\n{len(results)} episodes ({seeds}), 95% intervals"
        Console().print(results_table({"policy": results}, title, "\n".join(filter(None, lines))))


def _policy_name(trainer: L.Trainer) -> str:
    return str(trainer.ckpt_path or "policy before training")
