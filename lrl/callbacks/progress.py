"""What a person sees while a run goes on: one bar, and a line now and then."""

from __future__ import annotations

import logging
import sys
from typing import Any

import lightning as L
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SHOWN = {
    "rollout/return": "return",
    "rollout/success_rate": "success",
    "rollout/invalid_action_rate": "invalid",
    "train/loss": "loss",
    "train/entropy": "entropy",
    "val/success_rate": "val success",
    "val/return": "val return",
    "val/exact_success": "val exact success",
}


class ConsoleProgress(L.Callback):
    """A progress bar over collections on a terminal, and a logged line every ``every_n_collections``.

    Args:
        every_n_collections: how often a line is logged; null logs twenty over the run.
    """

    def __init__(self, every_n_collections: int | None = None) -> None:
        self.every_n_collections = every_n_collections
        self._progress: Progress | None = None
        self._task: Any = None
        self._told = self._env_steps = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar."""
        self._told = trainer.current_epoch
        if not trainer.is_global_zero or not sys.stderr.isatty():
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[figures]}"))
        total = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None
        self._task = self._progress.add_task("training", total=total, completed=trainer.current_epoch, figures="")
        self._progress.start()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the clock, before the next collection moves it on."""
        self._env_steps = int(getattr(pl_module, "clocks", {}).get("env_steps", 0))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell of the epoch before: its figures are published behind every callback's ``on_train_epoch_end``."""
        if trainer.current_epoch > self._told:
            self._tell(trainer, trainer.current_epoch)

    def _tell(self, trainer: L.Trainer, done: int) -> None:
        """Move the bar to ``done`` epochs; log a line now and then."""
        if not trainer.is_global_zero:
            return
        self._told, total = done, trainer.max_epochs or 0
        figures = "  ".join(
            f"{label} {float(trainer.callback_metrics[name]):.3f}"
            for name, label in _SHOWN.items()
            if name in trainer.callback_metrics
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=done, figures=figures)
        every = self.every_n_collections or max(1, total // 20)
        if done == 1 or done % every == 0 or done == total:
            clock = f"env steps {self._env_steps}  " if self._env_steps else ""
            logging.getLogger("lrl").info("collection %d/%d  %s%s", done, total, clock, figures)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell of the last epoch; take the bar away."""
        if trainer.current_epoch > self._told:
            self._tell(trainer, trainer.current_epoch)
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
