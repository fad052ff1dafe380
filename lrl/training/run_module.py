"""The base class of modules that Lightning trains: clocks, metrics, signals, and what a resume checks."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor

from lrl.data.run_data import ClockedDataModule
from lrl.functional.distributed import all_gather_objects, value_of_this_rank
from lrl.training.guards import DeferredSignals, Interruption, requeue_signals
from lrl.training.metrics import MetricMeans, State
from lrl.training.resume import check_seed, check_settings, mend_loops, read_whole, settings_of


class RunModule(L.LightningModule, ABC):
    """Trains something, a policy (:class:`~lrl.training.policy_module.PolicyModule`) or another network.

    Its data module is a :class:`~lrl.data.run_data.ClockedDataModule`, which a subclass takes in its ``setup``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_data: ClockedDataModule | None = None
        """The data module of the run; None before :meth:`setup`."""
        self.deferred_signals, self.interruption = DeferredSignals(), Interruption()
        self._means = MetricMeans()
        self._validated = -1
        self._settings: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, skipping ``nn.Module``'s bookkeeping for Lightning's hook name."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def setup(self, stage: str) -> None:
        """Prepare for signals and for checkpoints of several ranks."""
        self._settings = {}
        self.deferred_signals = DeferredSignals(requeue_signals(self.trainer))
        read_whole(self.trainer)

    def configure_callbacks(self) -> list[L.Callback]:
        """Check the trainer, and let callbacks that monitor a figure of training look at it after every collection.

        By themselves they would look after a validation only, if not every collection is validated.

        Raises:
            ValueError: the trainer has a setting or a callback that cannot have its usual effect.
        """
        check_trainer(self.trainer)
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            monitor = getattr(callback, "monitor", None)
            of_training = monitor is not None and not monitor.startswith("val/")
            if of_training and isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end is None:
                callback._check_on_train_epoch_end = True
            if of_training and isinstance(callback, ModelCheckpoint) and callback._save_on_train_epoch_end is None:
                callback._save_on_train_epoch_end = True
        return []

    def count_update(self) -> None:
        """Count an update of a module without automatic optimisation as a step of Lightning.

        ``trainer.max_steps`` and ``ModelCheckpoint`` read that count; the latter would never save at 0.
        """
        if self._trainer is not None:
            progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            progress.increment_ready()
            progress.increment_completed()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a resume checks, and what the current collection has recorded so far."""
        checkpoint["lrl"] = {
            "names": sorted(self.state_dict()),
            "env_steps": self.clocks.get("env_steps", 0),
            "validated": self._validated,
            "seed": self.run_seed,
            "settings": self._settled_settings(),
            "clocks": dict(self.clocks),
            "meters": self._metric_states(),
            **checkpoint.get("lrl", {}),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits, and restore what it says of the run.

        Raises:
            ValueError: another seed, other settings, missing trainable weights, or unknown ones.
        """
        saved = checkpoint.get("lrl", {})
        if self.trainer.state.fn == "fit":
            check_seed(saved, self.run_seed)
        check_settings(saved, self._settled_settings(), resumes=self.trainer.state.fn == "fit")
        given = set(checkpoint.get("state_dict", saved.get("names", ())))  # a sharded one holds its weights elsewhere
        missing, unexpected = sorted(set(self.state_dict()) - given), sorted(given - set(super().state_dict()))
        if missing or unexpected:
            raise ValueError(f"ckpt_path does not fit: {missing[:3]} are missing, {unexpected[:3]} are unknown.")
        if self.trainer.state.fn == "fit":
            self._validated = saved.get("validated", -1)
            mend_loops(checkpoint["loops"], self._validated)
            if any(saved.get("meters", ())):
                self._means.load(value_of_this_rank(saved["meters"]))

    def _settled_settings(self) -> dict[str, Any]:
        """Return what :func:`~lrl.training.resume.settings_of` does; they stay the same for the whole run."""
        self._settings = self._settings or settings_of(self, self.run_data)
        return self._settings

    # -- metrics ----------------------------------------------------------------------------------------------------

    @property
    def clocks(self) -> Mapping[str, float]:
        """Environment steps, episodes (SFT: optimiser steps), tokens and minutes so far, over all ranks."""
        return {} if self.run_data is None else self.run_data.clocks

    @property
    def run_seed(self) -> int:
        """Seed of everything random in the run; 0 before :meth:`setup`."""
        return 0 if self.run_data is None else int(self.run_data.seed)

    @property
    def max_collections(self) -> int | None:
        """Number of collections after which the run ends by itself; None where it is not known in advance."""
        return None

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 without a trainer."""
        return self.trainer.world_size if self._trainer else 1

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over ranks, in its shape; all ranks must call it."""
        if self.world_size == 1:
            return tensor
        return cast(Tensor, self.trainer.strategy.reduce(tensor, reduce_op="sum"))

    def record(self, name: str, values: Tensor) -> None:
        """Add values, of any shape, to the mean that is logged under ``name`` at the end of this collection."""
        self._means.record(name, values)

    def record_maximum(self, name: str, values: Tensor) -> None:
        """Add values, of any shape, to the maximum that is logged under ``name`` at the end of this collection."""
        self._means.record_maximum(name, values)

    def forget(self) -> None:
        """Drop what was recorded of a collection that was interrupted and is made again."""
        self._means.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count what the previous minibatch recorded; what this one records counts once it is done."""
        self._means.settle()
        self.deferred_signals.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Handle the signals that came during the step."""
        self.deferred_signals.__exit__()

    def flush(self) -> dict[str, float]:
        """Return the means and maxima over ranks of what was recorded, and forget it; all ranks must call it."""
        return self._means.flush()

    def _metric_states(self) -> list[State]:
        """Return what each rank recorded, without an unfinished minibatch, which a resume repeats."""
        loop = self.trainer.fit_loop
        epoch: Any = loop.epoch_progress.current
        minibatch: Any = loop.epoch_loop.batch_progress.current
        if minibatch.started == minibatch.processed:
            self._means.settle()
        return all_gather_objects({} if epoch.ready == epoch.processed else self._means.state())

    def publish(self, means: dict[str, float]) -> None:
        """Log means together with the clocks, and show them to callbacks that monitor them."""
        row = means | {f"clock/{name}": value for name, value in self.clocks.items()}
        if self._trainer is not None and not self.trainer.sanity_checking:
            step = self.clocks.get("env_steps", self.clocks.get("optimizer_steps", 0))
            for logger in self.trainer.loggers:
                logger.log_metrics(row, step=int(step))
            callback_metrics = {name: torch.tensor(value) for name, value in means.items()}
            self.trainer.callback_metrics.update(callback_metrics)  # log_dict would take a tenth of a small run

    def publish_training(self) -> None:
        """Log what training recorded since the last row."""
        self.publish(self.flush())

    def on_train_epoch_end(self) -> None:
        """Log once per collection."""
        self.publish_training()

    def on_validation_epoch_end(self) -> None:
        """Remember after which minibatch this validation was done: a resumed run must not repeat it."""
        self._validated = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready


_LATER = "it reads weights that are loaded later"
_UNSUPPORTED: dict[type[L.Callback], str] = {
    WeightAveraging: f"{_LATER}, and would write the frozen base model into every checkpoint",
    StochasticWeightAveraging: f"{_LATER}, and would average none",
    BaseFinetuning: f"{_LATER}, language_model.lora and freeze_trunk say what is trained",
    ModelPruning: _LATER,
    LearningRateFinder: "model.optimizer.lr sets the learning rate",
    BatchSizeFinder: "data.num_minibatches or data.batch_size sets the size of a minibatch",
}
"""Callbacks of Lightning that cannot have their usual effect, and why."""


def check_trainer(trainer: Any) -> None:
    """Raise for settings and callbacks of the trainer that cannot have their usual effect.

    Raises:
        ValueError: there is one.
    """
    for callback in trainer.callbacks:
        for kind, reason in _UNSUPPORTED.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise ValueError(f"trainer.callbacks has {name}; it must be removed, {reason}.")
    if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
        raise ValueError(
            "trainer.plugins has AsyncCheckpointIO; it must be removed, a checkpoint takes its place when it is whole."
        )
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        value = getattr(trainer, name)
        if 0 < value < 1 and not trainer.overfit_batches:
            raise ValueError(
                f"trainer.{name} is {value}; it must be 0 or 1, what is held out is one batch: "
                "data.validation.episodes sets its size."
            )
    if trainer.state.fn == "fit":
        _check_overfit(trainer)


def _check_overfit(trainer: Any) -> None:
    """Raise for ``overfit_batches`` where there are no batches to train on again.

    Raises:
        ValueError: it is set, and is a share, or each collection has new data.
    """
    batches: float = trainer.overfit_batches
    if not batches:
        return
    if getattr(getattr(trainer, "datamodule", None), "collects", False):
        raise ValueError(
            f"trainer.overfit_batches is {batches}; it must be 0, every collection is made anew: "
            "trainer.limit_train_batches limits the minibatches of one."
        )
    if batches != int(batches):
        raise ValueError(f"trainer.overfit_batches is {batches}; it must be a number of batches.")
