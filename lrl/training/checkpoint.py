"""Checkpoints of a run, written completely or not at all."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from lrl.faults import DiskFullError, writing
from lrl.functional.distributed import read_checkpoint
from lrl.ranges import PositiveFloat, PositiveInt, check_arguments
from lrl.registry import register
from lrl.training.guards import weights_are_finite
from lrl.training.module import RunModule


@register
class CollectionCheckpoint(Checkpoint):
    """Writes ``last.ckpt``, and ``best.ckpt`` if a metric is monitored.

    ``last.ckpt`` is also written when the run ends within a collection, with the number of minibatches trained so far:
    at a limit such as ``max_steps`` or ``max_time``, at SIGTERM and Ctrl-C
    (:class:`lrl.training.guards.Interruption`), and, on one device, at an error. After an error while weights may be
    changing (an optimiser step, the fit of a critic), the previous file is kept.

    One Lightning epoch is one collection, or one pass over demonstrations.

    Args:
        every_n_collections: number of collections between updates of ``last.ckpt``.
        every_minutes: ``last.ckpt`` is also written if it is older than this at the end of a collection, or between
            optimiser steps if training on a collection takes longer. A killed run then loses at most this time plus one
            collection and one validation. Null disables it.
        monitor: metric of ``best.ckpt``; null writes no ``best.ckpt``.
        mode: whether the largest or the smallest value is the best.
    """

    def __init__(
        self,
        every_n_collections: PositiveInt = 10,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        every_minutes: PositiveFloat | None = 10.0,
    ) -> None:
        check_arguments(CollectionCheckpoint.__init__, locals(), "CollectionCheckpoint")
        super().__init__()
        self.every_n_collections, self.monitor, self.mode = every_n_collections, monitor, mode
        self.every_minutes = every_minutes
        self._written = self._began = time.monotonic()
        self._place: tuple[int, int] | None = None
        """Numbers of finished passes and trained minibatches when ``last.ckpt`` was written."""
        self._running = False
        """Whether training is in progress."""
        self._stops = False
        """Whether another callback stopped the run between accumulated minibatches; it then ends after the step."""
        self._ends_inside = False
        """Whether the run ends within a pass, in which case the checkpoint at its end has already been written."""
        self.best: float | None = None
        """Best value of the monitored metric so far."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let SIGTERM and Ctrl-C end the run with a checkpoint from now on."""
        assert isinstance(pl_module, RunModule)
        self._written = self._began = time.monotonic()
        self._running, self._stops, self._ends_inside, self._place = True, False, False, None
        best = checkpoint_folder(trainer) / "best.ckpt"
        if self.monitor is not None and best.exists():  # may have been written after last.ckpt
            self.load_state_dict(read_checkpoint(best, weights=False)["callbacks"][self.state_key])
        self.best = trainer.strategy.broadcast(self.best)
        pl_module.interruption.listen(trainer, partial(self.write, trainer, "last.ckpt"))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object) -> None:
        """Write ``last.ckpt`` if it is due or the run ends within the pass; end the run if a signal arrived.

        A run that ends within a pass logs a row for the part that was trained. The checkpoint is written before that,
        so that a resumed run logs one row for the whole pass instead.

        Between accumulated minibatches, whose gradients are not saved, no checkpoint is written and the run does not
        end, even if another callback, such as Lightning's timer, stops it.
        """
        assert isinstance(pl_module, RunModule)
        if trainer.fit_loop._should_accumulate():
            self._stops, trainer.should_stop = self._stops or trainer.should_stop, False
            return
        trainer.should_stop = trainer.should_stop or self._stops
        pl_module.interruption.check()
        loop = trainer.fit_loop
        ends = loop.epoch_loop._is_training_done or (trainer.should_stop and loop._can_stop_early)
        overdue = self._is_overdue(self._began)
        if overdue and loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # pyright: ignore[reportArgumentType]
            overdue = False  # a run resumed from here would skip the validation
        self._ends_inside = ends and not trainer.is_last_batch
        if self._decided_by_rank_0(trainer, self._ends_inside or (overdue and not trainer.is_last_batch)):
            self.write(trainer, "last.ckpt")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``last.ckpt`` if it is due; end the run if a signal arrived."""
        assert isinstance(pl_module, RunModule)
        due = (trainer.current_epoch + 1) % self.every_n_collections == 0
        if not self._ends_inside and self._decided_by_rank_0(trainer, due or self._is_overdue(self._written)):
            self.write(trainer, "last.ckpt")
        self._began = time.monotonic()
        pl_module.interruption.check()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``last.ckpt``; end the run if a signal has just arrived; restore the previous signal handlers."""
        assert isinstance(pl_module, RunModule)
        if not self._ends_inside and self._place != _place(trainer):
            self.write(trainer, "last.ckpt")
        pl_module.interruption.check()
        pl_module.interruption.ignore()
        self._running = False

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write ``last.ckpt`` if no optimiser step was in progress; restore the previous signal handlers."""
        if not isinstance(pl_module, RunModule):
            return
        pl_module.interruption.ignore()
        running, self._running = self._running, False
        whole = not pl_module.deferred_signals.inside and _is_between_steps(trainer) and _place(trainer) != (0, 0)
        if running and whole and isinstance(exception, Exception) and trainer.world_size == 1:
            try:
                path = os.path.relpath(self.write(trainer, "last.ckpt"))
            except Exception:  # for example a full disk; the first error is the one to report
                logging.getLogger("lrl.trace").debug("no checkpoint was written after the error", exc_info=True)
                return
            logging.getLogger("lrl").warning("an error ends the run: wrote %s, from which it can be resumed", path)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``best.ckpt`` if the monitored metric has improved.

        Raises:
            ValueError: If the metric does not exist.
        """
        if self.monitor is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.monitor not in trainer.callback_metrics:
            metrics = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"the checkpoint's monitor is {self.monitor!r}; it must be one of {metrics}.")
        value = float(trainer.callback_metrics[self.monitor])
        best = math.nan if self.best is None else self.best
        better = math.isnan(best) or (value > best if self.mode == "max" else value < best)
        if better and not math.isnan(value):
            before, self.best = self.best, value  # set before writing, because best.ckpt also stores the best value
            try:
                self.write(trainer, "best.ckpt")
            except Exception:
                self.best = before  # no better file was written, which matters if the run is resumed
                raise

    def _is_overdue(self, since: float) -> bool:
        """Return whether ``every_minutes`` have passed since a time (``time.monotonic``) and since the last write."""
        passed = time.monotonic() - max(since, self._written)
        return self.every_minutes is not None and passed > 60 * self.every_minutes

    def _decided_by_rank_0(self, trainer: L.Trainer, due: bool) -> bool:
        """Return rank 0's value of ``due``, because the clocks of ranks differ; all ranks must call it."""
        if self.every_minutes is None or trainer.world_size == 1:
            return due
        decision = torch.tensor(int(due and trainer.is_global_zero), device=trainer.strategy.root_device)
        return bool(trainer.strategy.reduce(decision, reduce_op="max"))

    def write(self, trainer: L.Trainer, name: str) -> Path:
        """Write a checkpoint under a temporary name and rename it to ``name``; all ranks must call it.

        Returns:
            The path of the checkpoint. Nothing is written with ``trainer.fast_dev_run``.

        Raises:
            ValueError: If weights are not finite; an existing checkpoint is left unchanged.
            DiskFullError: If the disk is full; an existing checkpoint is left unchanged.
        """
        if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return checkpoint_folder(trainer) / name
        if not weights_are_finite(trainer.lightning_module):
            raise ValueError(
                f"weights are not finite in collection {trainer.current_epoch + 1}; the run stops and {name} is "
                "unchanged; try a smaller learning rate or check the rewards."
            )
        folder = checkpoint_folder(trainer)
        target, draft = folder / name, folder / f".{name}.draft"
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            remove(draft)
        trainer.strategy.barrier("before the checkpoint")
        size = target.stat().st_size if target.is_file() else None  # of the previous one
        try:
            with writing("the checkpoint", target, size):
                trainer.save_checkpoint(draft)
        except DiskFullError:
            remove(draft)
            raise
        trainer.strategy.barrier("after the checkpoint")
        if trainer.is_global_zero:
            replace_checkpoint(draft, target)
        trainer.strategy.barrier("after moving the checkpoint")
        if name == "last.ckpt":
            self._written, self._place = time.monotonic(), _place(trainer)
        return target

    def state_dict(self) -> dict[str, float | None]:
        """Return the best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, float | None]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.best = state_dict["best"]


def _place(trainer: L.Trainer) -> tuple[int, int]:
    """Return the numbers of finished passes and trained minibatches."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    minibatches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return epochs.processed, minibatches.processed


def _is_between_steps(trainer: L.Trainer) -> bool:
    """Return whether no accumulated gradients wait for an optimiser step."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    trained = progress.current.processed
    ended = progress.is_last_batch and trained == progress.current.ready
    return ended or trained % trainer.accumulate_grad_batches == 0


def checkpoint_folder(trainer: L.Trainer) -> Path:
    """Return the folder of this run's checkpoints."""
    return Path(trainer.default_root_dir) / "checkpoints"


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_checkpoint(draft: Path, target: Path) -> None:
    """Replace ``target`` by ``draft`` such that a complete checkpoint, old or new, exists at all times.

    A sharded checkpoint is a folder, which cannot be replaced atomically: the old one is renamed first, and removed
    when the new one is in place.
    """
    if draft.is_file() and not target.is_dir():
        os.replace(draft, target)
        return
    old = target.with_name(f".{target.name}.old")
    remove(old)
    if target.exists():
        os.replace(target, old)
    os.replace(draft, target)
    remove(old)
