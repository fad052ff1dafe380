"""What every algorithm's LightningModule needs beside its paper: weights, optimiser, clocks, held-out episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lrl.evaluation.episodes import EpisodeResults, evaluate_policy, gather
from lrl.evaluation.metrics import EpisodeMetrics
from lrl.functional.distributed import all_gather_objects, unsharded, value_of_this_rank
from lrl.functional.trainable_state import drop_frozen, frozen_parameter_names
from lrl.models.loading import fingerprint
from lrl.policies.policy import Policy
from lrl.rollouts.few_shot_examples import add_examples, wants_examples
from lrl.training.adapters import lora_scale, start_from
from lrl.training.deferred_signals import WholeSteps, requeue_signals
from lrl.training.finite import GuardedStepsModule
from lrl.training.interruption import Interruption
from lrl.training.metrics import MetricMeans, State
from lrl.training.resume import check_seed, check_start, mend_loops, read_whole, run_seed
from lrl.training.schedule import Schedule, check_training, learning_rate_factor
from lrl.training.weights import shard_weights
from lrl.types import Rollout, SamplingConfig, TurnBatch

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


class PolicyModule(GuardedStepsModule, ABC):
    """Plumbing that is the same for all algorithms; no algorithm inherits from another.

    Args:
        policy: what is trained.
        optimizer: makes the optimiser from the trainable parameters; None takes AdamW at ``lr``.
        lr: learning rate.
        weight_decay: of the default optimiser.
        schedule: ``constant``, ``linear`` or ``cosine`` decay to zero over the run.
        warmup: share of the run over which the learning rate rises from zero.
        init_from: checkpoint, folder or hub name whose *weights only* the run starts from.
        max_skipped_steps: how many optimiser steps in a row may be skipped because their gradients are not finite.
    """

    def __init__(
        self,
        policy: Policy,
        lr: float,
        optimizer: OptimizerFactory | None = None,
        weight_decay: float = 0.0,
        schedule: Schedule = "constant",
        warmup: float = 0.0,
        init_from: str | None = None,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__(max_skipped_steps)
        check_training(lr, weight_decay, schedule, warmup)
        self.policy, self.lr, self.weight_decay, self.warmup = policy, lr, weight_decay, warmup
        self.optimizer_factory, self.init_from = optimizer, init_from
        self.schedule: Schedule = schedule
        self._meters = MetricMeans()
        self.whole_steps, self.interruption = WholeSteps(), Interruption()
        self._configured = False
        self._start = ""
        self._overwritten, self._validated = set[str](), -1

    def __setattr__(self, name: str, value: Any) -> None:
        """As every module, but quick for what Lightning notes fifty times a step: which hook runs is no weight."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the policy at the start of the run must be kept."""

    @abstractmethod
    def turn_batch(self, rollout: Rollout) -> TurnBatch:
        """Credit the turns of a rollout."""

    # -- weights ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Tell the policy what environment it acts in, and show it examples from there, if its prompt wants some."""
        self.whole_steps = WholeSteps(requeue_signals(self.trainer))
        read_whole(self.trainer)
        data: Any = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        self.policy.connect(data.codec)
        if data.validation_env is not data.env:
            data.validation_env.check("data.validation_env", self.policy.response_format)
        if self.policy.response_format is None:
            self.policy.connect_spaces(*data.env.spaces)
        if wants_examples(self.policy):
            add_examples(self.policy, data.env)

    def configure_model(self) -> None:
        """Load the weights, then the reference; a second call does nothing."""
        if self._configured:
            return
        self._configured = True
        self.policy.configure()
        if self.init_from is not None:
            self._overwritten = {f"policy.{name}" for name in start_from(self.policy, self.init_from)}
            self._start = fingerprint(self.policy)
        if self.needs_reference:
            self.policy.build_reference(warm_started=self.init_from is not None)
        if self.device_mesh is not None:
            shard_weights(self.policy, self.device_mesh)

    @property
    def base_is_overwritten(self) -> bool:
        """Whether ``init_from`` replaced frozen weights, which the name of the base then no longer stands for."""
        return bool(self._overwritten)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What is trained: a frozen base, its quantisation constants included, can be had again by its name.

        Unless ``init_from`` has overwritten it.
        """
        return drop_frozen(super().state_dict(*args, **kwargs), frozen_parameter_names(self) - self._overwritten)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what tells whether the checkpoint fits a run, and what the running collection recorded so far."""
        checkpoint["lrl"] = {
            "fingerprint": self.policy.fingerprint,
            "start": self._start,
            "lora_scale": lora_scale(self.policy),
            "names": sorted(self.state_dict()),
            "env_steps": self.clocks.get("env_steps", 0),
            "skip_updates": self.skip_updates,
            "skipped_steps": self.finite_steps.state(),
            "validated": self._validated,
            "seed": run_seed(self._trainer),
            "clocks": dict(self.clocks),
            "meters": self._meter_states(),
            **checkpoint.get("lrl", {}),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights that do not fit.

        Raises:
            ValueError: another base or other initial weights, missing trainable weights, or weights that nothing is
                called after.
        """
        saved = checkpoint.get("lrl", {})
        check_start(saved, self.policy.fingerprint, self._start, self.init_from)
        if self.trainer.state.fn == "fit":
            check_seed(saved, run_seed(self._trainer))
        given = set(checkpoint.get("state_dict", saved.get("names", ())))  # a sharded one holds its weights elsewhere
        missing, unexpected = sorted(set(self.state_dict()) - given), sorted(given - set(super().state_dict()))
        if missing or unexpected:
            raise ValueError(f"ckpt_path does not fit: {missing[:3]} are missing, {unexpected[:3]} are unknown.")
        self.skip_updates = bool(saved.get("skip_updates", False))
        if self.trainer.state.fn == "fit":
            self._validated = saved.get("validated", -1)
            self.finite_steps.load(saved.get("skipped_steps", [0, 0]))
            mend_loops(checkpoint["loops"], self._validated)
            if any(saved.get("meters", ())):
                self._meters.load(value_of_this_rank(saved["meters"]))

    @property
    def strict_loading(self) -> bool:
        """Frozen weights are not in a checkpoint; :meth:`on_load_checkpoint` does the checking."""
        return False

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        raise ValueError("strict_loading cannot be set: checkpoints hold trainable weights only.")

    # -- optimiser --------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """The optimiser over trainable weights, and its schedule by optimiser step."""
        groups = self.parameter_groups()
        if self.optimizer_factory is not None:
            optimizer = self.optimizer_factory(groups)
        else:
            fused = not isinstance(self.trainer.precision_plugin, MixedPrecision)  # it refuses to clip fused ones
            optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        if self.schedule == "constant" and self.warmup == 0:
            return optimizer
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ValueError(f"model.schedule is {self.schedule!r}; it needs trainer.max_epochs or trainer.max_steps.")
        factor = learning_rate_factor(self.schedule, int(total), self.warmup)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable weights as an optimiser takes them, those with a learning rate of their own apart."""
        return [{"params": [parameter for parameter in self.parameters() if parameter.requires_grad]}]

    @property
    def clocks(self) -> dict[str, float]:
        """Environment steps, episodes (SFT: optimiser steps), tokens and minutes so far, over all ranks."""
        data = getattr(self._trainer, "datamodule", None) if self._trainer else None
        return getattr(data, "clocks", {})

    @property
    def max_response_tokens(self) -> int:
        """The longest possible turn."""
        sampling = getattr(self.policy, "sampling", None)
        return sampling.max_new_tokens if sampling is not None else 1

    def record(self, name: str, values: Tensor) -> None:
        """Add values (any shape) to the mean that is logged under ``name`` at the end of this collection."""
        self._meters.record(name, values)

    def forget(self) -> None:
        """Drop what was recorded of a collection that was broken off and is made again."""
        self._meters.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count what the part before recorded; what this one records counts once it is through."""
        self._meters.settle()
        self.whole_steps.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What a signal asked for meanwhile is done now."""
        self.whole_steps.__exit__()

    def flush(self) -> dict[str, float]:
        """Reduce what was recorded over ranks and forget it. All ranks must call it, whatever each has recorded."""
        return self._meters.flush()

    def _meter_states(self) -> list[State]:
        """What was recorded, by rank; not by a part that is not through, which a resume does again."""
        loop = self.trainer.fit_loop
        epoch: Any = loop.epoch_progress.current
        part: Any = loop.epoch_loop.batch_progress.current
        if part.started == part.processed:
            self._meters.settle()
        return all_gather_objects({} if epoch.ready == epoch.processed else self._meters.state())

    def publish(self, means: dict[str, float]) -> None:
        """Hand means to the loggers, with the clocks, and to callbacks that monitor them."""
        row = means | {f"clock/{name}": value for name, value in self.clocks.items()}
        if self._trainer is not None and not self.trainer.sanity_checking:
            step = self.clocks.get("env_steps", self.clocks.get("optimizer_steps", 0))
            for logger in self.trainer.loggers:
                logger.log_metrics(row, step=int(step))
            callback_metrics = {name: torch.tensor(value) for name, value in means.items()}
            self.trainer.callback_metrics.update(callback_metrics)  # log_dict would take a tenth of a small run

    def publish_training(self) -> None:
        """Log what training recorded since the last row."""
        self.publish(self.flush() | {"train/skipped_steps": float(self.finite_steps.flush())})

    def on_train_epoch_end(self) -> None:
        """Log once per collection."""
        self.publish_training()

    def held_out(self, seeds: Tensor, group: str) -> EpisodeResults:
        """Play one episode for each seed and publish ``<group>/...``."""
        results = self.interruption.attempt(partial(self._play, seeds))
        metrics = EpisodeMetrics().to(self.device)
        metrics.update(results)
        self.publish({f"{group}/{name}": float(value) for name, value in metrics.compute().items()})
        return gather(results)

    def _play(self, seeds: Tensor) -> EpisodeResults:
        """Play this rank's share of held-out episodes."""
        data = self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        own = getattr(self.policy, "sampling", None) or SamplingConfig()
        with self.trainer.precision_plugin.forward_context(), unsharded(self), self.interruption.abandonable():
            return evaluate_policy(
                self.policy,
                data.validation_env,
                episodes=len(seeds),
                seed=int(seeds[0]),
                num_envs=min(data.validation_num_envs, len(seeds)),
                sampling=replace(own, temperature=data.validation_temperature),
                rank=self.global_rank,
                world_size=self.trainer.world_size,
            )

    def validation_step(self, seeds: Tensor) -> EpisodeResults | None:
        """Play held-out episodes."""
        return self.held_out(seeds, "val")

    def on_validation_epoch_end(self) -> None:
        """Remember that it is done: a run that is resumed from here must not do it again."""
        self._validated = self.current_epoch

    def test_step(self, seeds: Tensor) -> EpisodeResults:
        """Play held-out episodes."""
        return self.held_out(seeds, "test")

    def predict_step(self, seeds: Tensor) -> EpisodeResults:
        """Play held-out episodes and return them."""
        return self.held_out(seeds, "predict")
