"""Base classes of all Lightning modules: clocks, metrics, signals, checkpoints and held-out episodes.

:class:`RunModule` trains any network, :class:`PolicyModule` a policy in an environment.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from lrl.data.run_data import ClockedDataModule, RunDataModule
from lrl.evaluation.episodes import EpisodeMetrics, EpisodeResults, evaluate_policy, gather
from lrl.functional.distributed import all_gather_objects, drop_frozen, frozen_parameter_names, own_value, unsharded
from lrl.policies.policy import Policy
from lrl.rollouts.examples import add_examples
from lrl.training.guards import DeferredSignals, Interruption, requeue_signals
from lrl.training.metrics import MetricMeans, State, log_row
from lrl.training.resume import (
    check_settings,
    correct_loop_counters,
    optimizer_settings,
    read_whole,
    restore_optimizer_settings,
    settings_of,
)

_NOTHING = nullcontext()  # shared, because it has no state


class NoProfiler(PassThroughProfiler):
    """Profiler that does nothing at little cost: Lightning profiles each call of a hook, 50 times per minibatch."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a context manager that does nothing."""
        return _NOTHING


class RunModule(L.LightningModule, ABC):
    """Abstract module that trains a policy (``PolicyModule``) or another network.

    Its data module is a :class:`~lrl.data.run_data.ClockedDataModule`; subclasses set :attr:`run_data` in ``setup``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_data: ClockedDataModule | None = None
        """The data module of the run; None before :meth:`setup`."""
        self.deferred_signals, self.interruption = DeferredSignals(), Interruption()
        self._means = MetricMeans()
        self._validated = -1
        self._settings: dict[str, Any] = {}
        self._optimizer_settings: list[dict[str, Any]] = []
        self._resumed_optimizers: tuple[list[dict[str, Any]], bool] | None = None
        """Settings of the optimisers of the run that is resumed, and whether it adapted its learning rate."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ``_current_fx_name``, which Lightning sets at each hook, bypasses ``nn.Module``."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def setup(self, stage: str) -> None:
        """Prepare for signals and for reading sharded checkpoints."""
        self._settings = {}
        self.deferred_signals = DeferredSignals(requeue_signals(self.trainer))
        read_whole(self.trainer)
        if type(getattr(self.trainer, "profiler", None)) is PassThroughProfiler:
            cast(Any, self.trainer).profiler = NoProfiler()

    def configure_callbacks(self) -> list[L.Callback]:
        """Check the trainer, and let callbacks that monitor a training metric read it after every collection.

        By default they read it only after a validation, if not every collection is validated.

        Raises:
            ValueError: If the trainer has a setting or a callback that is not supported.
        """
        check_trainer(self.trainer)
        if not self.automatic_optimization:
            for name, needed in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
                value = getattr(self.trainer, name)
                if (value or None) != needed:
                    required = "null" if needed is None else needed
                    raise ValueError(
                        f"trainer.{name} is {value}; it must be {required}, because {type(self).__name__} does not "
                        "train with Lightning's automatic optimisation."
                    )
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            monitor = getattr(callback, "monitor", None)
            of_training = monitor is not None and not monitor.startswith("val/")
            if of_training and isinstance(callback, EarlyStopping) and callback._check_on_train_epoch_end is None:
                callback._check_on_train_epoch_end = True
            if of_training and isinstance(callback, ModelCheckpoint) and callback._save_on_train_epoch_end is None:
                callback._save_on_train_epoch_end = True
        return []

    def on_fit_start(self) -> None:
        """Note the settings of the optimisers, which Lightning replaces by those of the checkpoint."""
        self._optimizer_settings = optimizer_settings(self.trainer)

    def on_train_start(self) -> None:
        """Let the settings of the optimisers that a resumed run changes take effect."""
        if self._resumed_optimizers is not None:
            groups, adapted = self._resumed_optimizers
            own = self._optimizer_settings
            restore_optimizer_settings(self.trainer, groups, own, self.rate_limits, adapted)
            self._resumed_optimizers = None

    @property
    def rate_limits(self) -> tuple[float, float] | None:
        """Smallest and largest learning rate if it is adapted in the course of the run; None if it is not."""
        return None

    def count_update(self) -> None:
        """Count an update of a module without automatic optimisation in Lightning's step counter.

        ``trainer.max_steps`` and ``ModelCheckpoint`` read that counter; the latter never saves while it is 0.
        """
        if self._trainer is not None:
            progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            progress.increment_ready()
            progress.increment_completed()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the settings that a resumed run is compared with, and the metrics of the current collection so far."""
        checkpoint["lrl"] = {
            "names": sorted(self.state_dict()),
            "env_steps": self.clocks.get("env_steps", 0),
            "validated": self._validated,
            "seed": self.run_seed,
            "settings": self._settled_settings(),
            "clocks": dict(self.clocks),
            "meters": self._metric_states(),
            "optimizers": self._optimizer_settings,
            "adapts_rate": self.rate_limits is not None,
            **checkpoint.get("lrl", {}),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits, and restore the state of the run.

        Raises:
            ValueError: If the seed, the settings or the names of the trainable weights differ.
        """
        saved, resumes = checkpoint.get("lrl", {}), self.trainer.state.fn == "fit"
        before = saved.get("seed", self.run_seed)
        if resumes and before != self.run_seed:  # episodes are replayed, and networks initialised, from the seed
            raise ValueError(
                f"seed_everything is {self.run_seed}, in the checkpoint it was {before}; resume with the same."
            )
        check_settings(saved, self._settled_settings(), resumes)
        given = set(checkpoint.get("state_dict", saved.get("names", ())))  # sharded checkpoints store weights elsewhere
        missing, unexpected = sorted(set(self.state_dict()) - given), sorted(given - set(super().state_dict()))
        if missing or unexpected:
            found = {"lacks weights of the policy": missing, "has weights that the policy lacks": unexpected}
            listed = " and ".join(f"{what} ({', '.join(names[:3])})" for what, names in found.items() if names)
            raise ValueError(f"ckpt_path is a checkpoint that {listed}; give the configuration of its run.")
        if resumes:
            self._validated = saved.get("validated", -1)
            if "optimizers" in saved:
                self._resumed_optimizers = saved["optimizers"], bool(saved["adapts_rate"])
            correct_loop_counters(checkpoint["loops"], self._validated)
            if any(saved.get("meters", ())):
                self._means.load(own_value(saved["meters"]))

    def _settled_settings(self) -> dict[str, Any]:
        """Return the result of :func:`~lrl.training.resume.settings_of`, computed once per run."""
        self._settings = self._settings or settings_of(self, self.run_data)
        return self._settings

    # -- metrics ----------------------------------------------------------------------------------------------------

    @property
    def clocks(self) -> Mapping[str, float]:
        """Numbers of env steps, episodes (SFT: optimiser steps), tokens and minutes so far, over all ranks."""
        return {} if self.run_data is None else self.run_data.clocks

    @property
    def run_seed(self) -> int:
        """Seed of the run; 0 before :meth:`setup`."""
        return 0 if self.run_data is None else int(self.run_data.seed)

    @property
    def max_collections(self) -> int | None:
        """Number of collections after which the run ends by itself; None if it is not known in advance."""
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

    def record_learning_rate(self) -> None:
        """Record the current learning rate, unless the module has its own optimisation."""
        if self.automatic_optimization and self._trainer is not None:
            rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
            self.record("train/lr", torch.tensor(rates))

    def record(self, name: str, values: Tensor) -> None:
        """Add values of any shape to the mean that is logged under ``name`` at the end of this collection."""
        self._means.record(name, values)

    def record_maximum(self, name: str, values: Tensor) -> None:
        """Add values of any shape to the maximum that is logged under ``name`` at the end of this collection."""
        self._means.record_maximum(name, values)

    def recorded_maximum(self, name: str) -> float | None:
        """Return the maximum that this rank has recorded since the last log; None if there is none."""
        self._means.settle()
        found = self._means.state().get(name)
        return None if found is None else found[0]

    def forget(self) -> None:
        """Drop the metrics of an interrupted collection, which is repeated."""
        self._means.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Settle the metrics of the previous minibatch, and defer signals during this one."""
        self._means.settle()
        # The step that LearningRateMonitor logs; after a resume within a pass, Lightning 2.6.6 counts one too few.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.trainer.global_step
        self.deferred_signals.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Handle signals received during the step, but not between accumulated minibatches.

        The gradients of these would be missing from a checkpoint that the handler of a signal writes.
        """
        if not self.trainer.fit_loop._should_accumulate():
            self.deferred_signals.__exit__()

    def flush(self) -> dict[str, float]:
        """Return the means and maxima of the metrics over ranks, and reset them; all ranks must call it."""
        return self._means.flush()

    def _metric_states(self) -> list[State]:
        """Return the metrics of each rank, except for an unfinished minibatch, which a resumed run repeats."""
        loop = self.trainer.fit_loop
        epoch: Any = loop.epoch_progress.current
        minibatch: Any = loop.epoch_loop.batch_progress.current
        if minibatch.started == minibatch.processed:
            self._means.settle()
        return all_gather_objects({} if epoch.ready == epoch.processed else self._means.state())

    def publish(self, means: dict[str, float]) -> None:
        """Log metrics together with the clocks, and make them available to callbacks that monitor them."""
        row = means | {f"clock/{name}": value for name, value in self.clocks.items()}
        if self._trainer is not None and not self.trainer.sanity_checking:
            step = self.clocks.get("env_steps", self.clocks.get("optimizer_steps", 0))
            for logger in self.trainer.loggers:
                log_row(logger, row, int(step))
            callback_metrics = {name: torch.tensor(value) for name, value in means.items()}
            self.trainer.callback_metrics.update(callback_metrics)  # log_dict would take a tenth of a small run's time

    def publish_training(self) -> None:
        """Log the training metrics since the last row."""
        self.publish(self.flush())

    def on_train_epoch_end(self) -> None:
        """Log once per collection."""
        self.publish_training()

    def on_validation_epoch_end(self) -> None:
        """Store the number of minibatches before this validation, so that a resumed run does not repeat it."""
        self._validated = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready


_UNSUPPORTED = {
    (WeightAveraging, StochasticWeightAveraging, BaseFinetuning, ModelPruning): (
        "it reads the weights before they are loaded"
    ),
    (LearningRateFinder, BatchSizeFinder): "model.optimizer sets the learning rate, data the size of a minibatch",
}
"""Callbacks of Lightning that are not supported, with the reason."""


def check_trainer(trainer: Any) -> None:
    """Check that the trainer has no settings or callbacks that are not supported.

    Raises:
        ValueError: If the trainer has a setting or a callback that is not supported.
    """
    for callback in trainer.callbacks:
        for kinds, reason in _UNSUPPORTED.items():
            if isinstance(callback, kinds):
                raise ValueError(f"trainer.callbacks has {type(callback).__name__}; it must be removed, {reason}.")
    if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
        raise ValueError(
            "trainer.plugins has AsyncCheckpointIO; it must be removed, checkpoints are moved to their place when "
            "complete."
        )
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        value = getattr(trainer, name)
        if 0 < value < 1 and not trainer.overfit_batches:
            raise ValueError(
                f"trainer.{name} is {value}; it must be 0 or 1, because held-out episodes are one batch: "
                "data.validation.episodes sets its size."
            )
    batches: float = trainer.overfit_batches if trainer.state.fn == "fit" else 0
    if batches and getattr(getattr(trainer, "datamodule", None), "collects", False):
        raise ValueError(
            f"trainer.overfit_batches is {batches}; it must be 0, because every collection has new data: "
            "trainer.limit_train_batches limits the minibatches of a collection."
        )
    if batches != int(batches):
        raise ValueError(f"trainer.overfit_batches is {batches}; it must be a number of batches.")


def _trained_policy(fingerprint: str) -> str:
    """Return a description of a policy for error messages, from the fingerprint of its base model."""
    return f"a language model with base weights {fingerprint!r}" if fingerprint else "a policy without language model"


class PolicyModule(RunModule, ABC):
    """Abstract module that trains a policy, by gradients (``GradientModule``) or by search.

    Args:
        policy: policy to train.
    """

    run_data: RunDataModule | None

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self._configured = False
        self._generator_state = torch.get_rng_state()

    # -- weights ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Connect the policy to its environment, and add few-shot examples if its prompt needs them.

        Raises:
            ValueError: If the data module has no environment, or the policy cannot act in it.
        """
        super().setup(stage)
        data = self.run_data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RunDataModule):
            name = type(data).__name__
            raise ValueError(f"data is a {name}; it must be a RolloutDataModule or a DemonstrationsDataModule.")
        self.policy.connect(data.codec)
        if data.validation_env is not data.env:
            data.validation_env.check("data.validation.env", self.policy.response_format)
        if self.policy.response_format is None:
            self.policy.connect_spaces(*data.env.spaces)
        add_examples(self.policy, data.env)

    def configure_model(self) -> None:
        """Load the weights; a second call does nothing.

        Weights without an ``init_seed`` are initialised by torch's generator in the state it had when the module was
        created. A strategy for several ranks may have seeded it again since, which would give other initial weights
        than on one device.
        """
        if not self._configured:
            self._configured = True
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator_state)
                self.policy.configure()

    @property
    def overwritten_names(self) -> set[str]:
        """Names of frozen weights that differ from the base model and are therefore saved in checkpoints."""
        return set()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the trainable weights; frozen ones are loaded again from the base model."""
        return drop_frozen(super().state_dict(*args, **kwargs), frozen_parameter_names(self) - self.overwritten_names)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the fingerprint of the base model."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lrl"] = {"fingerprint": self.policy.fingerprint} | checkpoint["lrl"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits, and restore the state of the run.

        Raises:
            ValueError: If the base model, the seed or the names of the trainable weights differ.
        """
        saved = checkpoint.get("lrl", {}).get("fingerprint", "")
        if saved != self.policy.fingerprint:
            raise ValueError(
                f"the checkpoint is of a run with {_trained_policy(saved)}, but model.policy is "
                f"{_trained_policy(self.policy.fingerprint)}; it must be the same."
            )
        super().on_load_checkpoint(checkpoint)

    @property
    def strict_loading(self) -> bool:
        """False, because frozen weights are not saved; :meth:`on_load_checkpoint` compares names instead."""
        return False

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        """Reject every value.

        Raises:
            ValueError: If the property is set.
        """
        raise ValueError("strict_loading cannot be set, because checkpoints contain trainable weights only.")

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens of a turn."""
        return self.policy.sampling.max_new_tokens

    # -- held-out episodes ------------------------------------------------------------------------------------------

    def evaluate_held_out(self, seeds: Tensor, group: str) -> EpisodeResults:
        """Play one episode for each seed and log the results as ``<group>/...``.

        Args:
            seeds: consecutive seeds, int64 ``(episode,)``.
            group: first part of the metrics' names.
        """
        results = self.interruption.attempt(partial(self._play, seeds))
        metrics = EpisodeMetrics().to(self.device)
        metrics.update(results)
        self.publish({f"{group}/{name}": float(value) for name, value in metrics.compute().items()})
        return gather(results)

    def _play(self, seeds: Tensor) -> EpisodeResults:
        """Play this rank's share of held-out episodes."""
        assert self.run_data is not None
        validation = self.run_data.validation
        with self.trainer.precision_plugin.forward_context(), unsharded(self), self.interruption.abandonable():
            return evaluate_policy(
                self.policy,
                self.run_data.validation_env,
                episodes=len(seeds),
                seed=int(seeds[0]),
                num_envs=min(validation.num_envs, len(seeds)),
                sampling=self.policy.sampling_at(validation.temperature),
                rank=self.global_rank,
                world_size=self.trainer.world_size,
            )

    def validation_step(self, seeds: Tensor) -> EpisodeResults | None:
        """Play held-out episodes, if there are any."""
        return self.evaluate_held_out(seeds, "val") if len(seeds) else None

    def test_step(self, seeds: Tensor) -> EpisodeResults:
        """Play held-out episodes."""
        return self.evaluate_held_out(seeds, "test")

    def predict_step(self, seeds: Tensor) -> EpisodeResults:
        """Play held-out episodes and return their results."""
        return self.evaluate_held_out(seeds, "predict")
