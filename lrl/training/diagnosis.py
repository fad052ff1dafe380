"""Callback that records what training uses, and reports mistakes that it shows while the run goes on."""

from __future__ import annotations

import functools
import logging
import math
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any, ParamSpec

import lightning as L
import torch

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.diagnosis.detectors import SERIES_DETECTORS, diagnose_samples
from lrl.diagnosis.losses import update
from lrl.diagnosis.metrics import diagnose_metrics, read_columns
from lrl.diagnosis.sample import Finding, Sample, write_sample
from lrl.functional.distributed import shards_parameters
from lrl.ranges import PositiveInt, check_arguments
from lrl.registry import register
from lrl.training.gradient_module import GradientModule
from lrl.training.recomputed import (
    WeightBefore,
    compared_gradients,
    compared_step,
    gradient_norm,
    moved_logprobs,
    scheduled_rate,
    weights_before,
)
from lrl.training.replay import Replay
from lrl.training.samples import array_of, rows_of, sample_of
from lrl.types import TurnBatch

_FIRST = 3
"""Number of collections at the start of a run that are always recorded."""
_NORMS = 4
"""Number of minibatches of a recorded collection of whose gradients the norm is computed."""
_KEPT = 20
"""Number of samples that are held in memory."""
_MIN_ROWS = 8
"""Number of different turns of a collection below which their order may be a coincidence."""
_SHARE = 0.015
"""Share of the processor time above which no further collections are recorded, after the first three."""
ERRORS = "diagnosis_errors.txt"
"""File in the run directory with the tracebacks of errors in this callback."""
_P = ParamSpec("_P")


def _harmless(hook: Callable[_P, None]) -> Callable[_P, None]:
    """Let a run continue if a hook of the callback fails: one line shows the first failure, a file the tracebacks."""

    @functools.wraps(hook)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        callback, trainer = args[:2]
        assert isinstance(callback, Diagnosis)
        started = process_time()
        try:
            hook(*args, **kwargs)
        except Exception as error:  # of any kind, because a diagnosis must not end a run
            assert isinstance(trainer, L.Trainer)
            callback.failed(trainer, hook.__name__, error)
        finally:
            callback.spent += process_time() - started

    return guarded


@register
class Diagnosis(L.Callback):
    """Records a sample of the turns of some collections, and warns of mistakes that they show.

    The samples are files in ``samples`` in the run directory, from which ``lrl report`` repeats the diagnosis. It is
    recorded before the first optimiser step on a collection, when all probability ratios are 1. A warning does not
    change the run. Of algorithms that do not learn by minibatches of a rollout, such as TRPO and SFT, and of sharded
    weights only the metrics are checked.

    Args:
        every_n_collections: one in this many collections is recorded, and the first three. Others are left out while
            this takes more than 1.5% of the processor time of the run.
        turns: maximum number of turns to record; more if a single group has more.
    """

    def __init__(self, every_n_collections: PositiveInt = 20, turns: PositiveInt = 128) -> None:
        check_arguments(Diagnosis.__init__, locals(), "Diagnosis")
        self.every_n_collections, self.turns = every_n_collections, turns
        self.recorded: list[Sample] = []
        """The samples of this process, the latest last."""
        self._reported: set[str] = set()
        self._replay: Replay | None = None
        self._rows: list[int] = []
        """Hashes of all turns of the latest sample's collection, while it is trained on."""
        self._weights: dict[str, float] = {}
        """Checksum of each trained weight before the updates of the latest sample's collection."""
        self._gradient = 0.0
        """Largest norm of the gradients of its minibatches."""
        self._steps: dict[str, Any] = {}
        """What was found in the optimiser steps on its minibatches, see :meth:`_of_updates`."""
        self._batch: TurnBatch | None = None
        """The current minibatch of a recorded collection."""
        self._order: list[list[int]] = []
        """Hashes of the turns of each minibatch of a recorded collection, in order."""
        self._norm = 0.0
        """Norm of the gradients before clipping in the optimiser step that is compared."""
        self._before: list[WeightBefore] = []
        """Some weights before the optimiser step on that minibatch."""
        self._minibatch: TurnBatch | None = None
        """The current minibatch, if its gradients are to be computed again."""
        self._has_failed = False
        self.spent = 0.0
        """Seconds of processor time of the hooks so far."""
        self._part: TurnBatch | None = None
        """Turns of the latest sample until the updates of its collection are finished."""

    def failed(self, trainer: L.Trainer, hook: str, error: Exception) -> None:
        """Report that a hook has failed, and drop the sample of the current collection."""
        self._part = self._minibatch = self._batch = None
        self._before = []
        path = Path(trainer.default_root_dir) / ERRORS
        if not self._has_failed:
            self._has_failed = True
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            told = "Diagnosis failed in %s (%s), and training continues; the traceback is in %s"
            logging.getLogger("lrl").warning(told, hook, what, path)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(traceback.format_exception(error)))
        except OSError:  # such as a full disk, which may also be what failed
            logging.getLogger("lrl").warning("the traceback cannot be written to %s", path)

    @_harmless
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the collection before its first optimiser step."""
        data: Any = getattr(trainer, "datamodule", None)
        if self._part is not None and isinstance(data, RolloutDataModule):
            self._order.append(rows_of(batch))
            self._batch = batch
            self._minibatch = batch if batch_idx == 1 else None
        if not self._records(trainer, pl_module, data):
            return
        assert isinstance(pl_module, GradientModule)
        if self._replay is None and data.env.replayable:
            self._replay = Replay(data.env, pl_module.policy.response_format, data.max_turns)
        with trainer.precision_plugin.forward_context():
            sample, self._part = sample_of(pl_module, data, self.turns, self._replay)
        assert data.batch is not None
        self._rows, self._order = rows_of(data.batch), [rows_of(batch)]
        self._weights, self._gradient, self._steps = _checksums(pl_module), 0.0, {}
        self._minibatch = batch if data.minibatches_per_collection * data.num_epochs == 1 else None
        self._batch, self._before = batch, []
        self._keep(sample, trainer)
        found = diagnose_samples([sample])
        for of_all in SERIES_DETECTORS:
            found += of_all(self.recorded)
        for finding in found:
            self._report(finding)

    @_harmless
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        """Record the largest gradient that remains from earlier minibatches, and when ``target_kl`` is exceeded."""
        if self._part is None:
            return
        assert isinstance(pl_module, GradientModule)
        batch, last = trainer.fit_loop.epoch_loop.batch_idx, int(trainer.num_training_batches) - 1
        ends = pl_module.skip_updates or batch == last
        if pl_module.target_kl and ends and "stopped" not in self._steps and trainer.world_size == 1:
            assert self._batch is not None
            with trainer.precision_plugin.forward_context():
                moved = moved_logprobs(pl_module, self._batch)[self._batch.response_mask.cpu()]
            self._steps |= {"stop_kl": float((moved.exp() - 1 - moved).mean()), "stopped": pl_module.skip_updates}
        if batch < _NORMS and batch % trainer.accumulate_grad_batches == 0:
            weights = [weight for group in trainer.optimizers[0].param_groups for weight in group["params"]]
            left = [weight.grad.abs().max() for weight in weights if weight.grad is not None]
            self._steps["left_gradient"] = max([self._steps.get("left_gradient", 0.0), *map(float, left)])

    @_harmless
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Compare some gradients of one minibatch, before they are clipped, with those of another backward pass."""
        batch, self._minibatch = self._minibatch, None
        if batch is not None:
            assert isinstance(pl_module, GradientModule)
            self._steps |= compared_gradients(trainer, pl_module, batch)
            self._before = weights_before(trainer, pl_module)
            self._norm = gradient_norm(pl_module)

    @_harmless
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the norm of the gradients of the first minibatches after clipping, and compare an optimiser step."""
        before, self._before = self._before, []
        if not pl_module.skip_updates:
            self._steps |= compared_step(before)
        if self._part is None or batch_idx >= _NORMS or trainer.accumulate_grad_batches > 1 or pl_module.skip_updates:
            return
        norm = gradient_norm(pl_module)
        self._gradient = max(self._gradient, norm)
        if before and trainer.gradient_clip_algorithm != "value" and math.isfinite(self._norm):
            self._steps["norms"] = [self._norm, norm]

    @_harmless
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record how the updates of the collection changed the policy, and look at the metrics so far."""
        found: list[Finding] = []
        if self._part is not None:
            assert isinstance(pl_module, GradientModule)
            with trainer.precision_plugin.forward_context():
                moved = array_of(moved_logprobs(pl_module, self._part))
            sample = self.recorded.pop()
            sample = replace(sample, settings={**sample.settings, **self._of_updates(trainer, pl_module)})
            sample = replace(sample, arrays={**sample.arrays, "moved": moved})
            self._keep(sample, trainer)
            self._part = self._batch = None
            found.extend(update(sample))
        elif not trainer.is_global_zero or (trainer.current_epoch + 1) % self.every_n_collections:
            return
        for finding in found + diagnose_metrics(read_columns(Path(trainer.default_root_dir) / "metrics.csv")):
            self._report(finding)

    def _of_updates(self, trainer: L.Trainer, module: GradientModule) -> dict[str, Any]:
        """Return settings that are known after the updates of a collection; see :class:`Sample`."""
        data: Any = module.run_data
        rows, trained = Counter(self._rows), Counter(row for minibatch in self._order for row in minibatch)
        expected = Counter({row: count * data.num_epochs for row, count in rows.items()})
        has_history = bool(getattr(getattr(module.policy, "prompt", None), "history", None))  # episodes stay together
        out: dict[str, Any] = {
            "order": "" if has_history else _order(self._order, self._rows, data.num_minibatches),
            "mixed_turns": sum(count for row, count in trained.items() if row not in rows),
            "largest_ratio_error": module.recorded_maximum("train/ratio_error_max"),
            "largest_gradient": self._gradient,
            **self._steps,
            "gradient_clip_val": trainer.gradient_clip_val if trainer.gradient_clip_algorithm != "value" else None,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        whole = trainer.max_steps in (-1, None) and not trainer.should_stop and trainer.limit_train_batches == 1.0
        if whole and not out["mixed_turns"]:
            out["untrained_turns"] = sum((expected - trained).values())
            out["repeated_turns"] = sum((trained - expected).values())
        after = _checksums(module)
        out["unchanged_weights"] = [name for name, value in self._weights.items() if after[name] == value]
        out["num_weights"] = len(after)
        if whole and data.max_env_steps is None and (trainer.max_epochs or -1) > 0:
            of_collection = -(-data.minibatches_per_collection // trainer.accumulate_grad_batches)
            steps = (of_collection * count for count in (data.collection + 1, trainer.max_epochs or 1))
            scheduled = scheduled_rate(module.optimizer, *steps)
            if scheduled is not None:
                out["scheduled_lr"] = scheduled
        return out

    def _keep(self, sample: Sample, trainer: L.Trainer) -> None:
        write_sample(sample, Path(trainer.default_root_dir))
        self.recorded = [*self.recorded, sample][-_KEPT:]

    @_harmless
    @_harmless
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the metrics of a whole run whose turns were not compared."""
        if trainer.is_global_zero and not self.recorded:
            for finding in diagnose_metrics(read_columns(Path(trainer.default_root_dir) / "metrics.csv")):
                self._report(finding)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the environment in which episodes are played again."""
        if self._replay is not None:
            self._replay.close()
            self._replay = None
        if stage == "fit" and self.recorded and not self._reported and not self._has_failed:
            turns = sum(map(len, self.recorded))
            found = "Diagnosis: no mistake in the last %d samples, which have %d turns"
            logging.getLogger("lrl").info(found, len(self.recorded), turns)
        elif stage == "fit" and trainer.is_global_zero and not (self.recorded or self._reported or self._has_failed):
            said = "Diagnosis: no alarm in the metrics; the turns of this run were not compared"
            logging.getLogger("lrl").info(said)

    def _records(self, trainer: L.Trainer, module: Any, data: Any) -> bool:
        """Return whether the current collection is to be recorded by this process, and has not been trained on yet."""
        if not (trainer.is_global_zero and isinstance(module, GradientModule) and isinstance(data, RolloutDataModule)):
            return False
        if data.trained_minibatches or data.rollout is None or not module.automatic_optimization:
            return False
        affordable = self.spent < _SHARE * process_time()
        wanted = data.collection < _FIRST or (data.collection % self.every_n_collections == 0 and affordable)
        return wanted and not shards_parameters(trainer.strategy)

    def _report(self, finding: Finding) -> None:
        if finding.cause not in self._reported:
            self._reported.add(finding.cause)
            logging.getLogger("lrl").warning("%s: %s; %s", finding.cause, finding.evidence, finding.remedy)


def _order(minibatches: Sequence[list[int]], rows: list[int], of_pass: int) -> str:
    """Return whether turns of minibatches are not shuffled: ``recorded``, ``repeated``, or empty if they are.

    Args:
        minibatches: hashes of the turns of each minibatch.
        rows: those of all turns, in the order of the collection.
        of_pass: number of minibatches of a pass.
    """
    passes = [minibatches[start : start + of_pass] for start in range(0, len(minibatches), of_pass)]
    if of_pass < 2 or len(set(rows)) < _MIN_ROWS or len(passes[-1]) < of_pass:
        return ""
    if [row for minibatch in passes[0] for row in minibatch] == rows:
        return "recorded"
    return "repeated" if len(passes) > 1 and passes[0] == passes[1] else ""


def _checksums(module: L.LightningModule) -> dict[str, float]:
    """Return a number for each trained weight, which changes with it."""
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    return {name: float(weight.detach().double().square().sum()) for name, weight in weights.items()}
