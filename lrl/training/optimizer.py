"""Optimiser and learning-rate schedule of a run, the sizes of its steps, and steps without effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lrl.data.rollout_buffer import RolloutDataModule
from lrl.policies.policy import Policy
from lrl.ranges import HalfOpenUnitInterval, NonNegativeFloat, PositiveFloat, check_fields
from lrl.training.module import PolicyModule
from lrl.types import TurnBatch

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]
_MIN_KL = 1e-6
"""Divergence in nats per token below which an estimate in float32 consists of rounding errors."""
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the optimiser and its learning-rate schedule."""

    lr: PositiveFloat = 3e-4
    """Learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: ``constant``, or ``linear`` or ``cosine`` decay to zero at the end of the
    run, which is ``data.max_env_steps`` only if ``data.num_steps`` is set."""
    warmup: HalfOpenUnitInterval = 0.0
    """Share of the run over which the learning rate rises from zero."""
    update_kl: PositiveFloat | None = None
    """Divergence KL(old || new) of the update of one collection, in nats per token, to which the learning rate is
    adapted as in arXiv:2109.11978, but per collection instead of per minibatch: after an update with more than twice
    this divergence it is divided by 1.5, and after one with less than half of it multiplied by 1.5, within the limits
    of :attr:`limits`. Null does not adapt it. The divergence is estimated from at most 256 turns, which is
    too few for a nearly deterministic policy (``docs/experiments/boards.md``)."""
    factory: OptimizerFactory | None = None
    """Creates another optimiser from parameter groups; null uses AdamW with ``lr`` and ``weight_decay``."""

    def __post_init__(self) -> None:
        check_fields(self, "model.optimizer")
        if self.update_kl is not None and self.factory is not None:
            raise ValueError(
                f"model.optimizer.update_kl is {self.update_kl} and model.optimizer.factory is set; update_kl must be "
                "null, because its limits depend on model.optimizer.lr, which only AdamW uses."
            )
        if self.update_kl is not None and self.has_schedule:
            raise ValueError(
                f"model.optimizer.update_kl is {self.update_kl}, but the learning rate has a schedule; "
                "model.optimizer.schedule must be constant and model.optimizer.warmup 0."
            )

    @property
    def has_schedule(self) -> bool:
        """True if the learning rate depends on the length of the run."""
        return self.schedule != "constant" or self.warmup > 0

    def require_fixed_rate(self) -> None:
        """Check that the learning rate is not adapted, for training without rollouts.

        Raises:
            ValueError: If ``update_kl`` is set.
        """
        if self.update_kl is not None:
            raise ValueError(
                f"model.optimizer.update_kl is {self.update_kl}; it must be null, because only rollouts have a "
                "divergence from the policy that sampled."
            )

    @property
    def limits(self) -> tuple[float, float] | None:
        """Smallest and largest learning rate if it is adapted: a hundredth and ten times ``lr``."""
        return None if self.update_kl is None else (self.lr / 100, 10 * self.lr)

    def adapted(self, lr: float, kl: float) -> float:
        """Return the learning rate of the next collection, within :attr:`limits`.

        Args:
            lr: learning rate of the last update.
            kl: its divergence in nats per token. A divergence at the level of rounding, such as that of a collection in
                which all advantages are 0, says nothing about the learning rate and does not change it.
        """
        assert self.update_kl is not None
        assert self.limits is not None
        if kl > 2 * self.update_kl:
            lr /= 1.5
        elif _MIN_KL < kl < self.update_kl / 2:
            lr *= 1.5
        return min(max(lr, self.limits[0]), self.limits[1])

    def make(self, groups: list[dict[str, Any]], total_steps: float, fused: bool) -> Any:
        """Return the optimiser, with its schedule if it has one, in the format of ``configure_optimizers``.

        Args:
            groups: parameter groups.
            total_steps: number of optimiser steps of the whole run; infinite if it has no limit.
            fused: whether AdamW updates all weights in one kernel.

        Raises:
            ValueError: If the factory fails, or the learning rate is not constant and the run has no limit.
        """
        if self.factory is not None:
            try:
                optimizer = self.factory(groups)
            except (TypeError, ValueError) as error:
                raise ValueError(f"model.optimizer.factory is set, but creates no optimiser: {error}") from error
        else:
            optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        if not self.has_schedule:
            return optimizer
        if total_steps == float("inf"):
            raise ValueError(
                f"model.optimizer.schedule is {self.schedule!r}; it needs trainer.max_epochs, trainer.max_steps, or "
                "data.max_env_steps with data.num_steps."
            )
        factor = learning_rate_factor(self.schedule, int(total_steps), self.warmup)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rate_factor(schedule: Schedule, total_steps: int, warmup: float) -> Callable[[int], float]:
    """Return the factor on the learning rate as a function of the optimiser step.

    Args:
        schedule: after the warm-up, ``constant``, or ``linear`` or half-``cosine`` decay to zero.
        total_steps: number of optimiser steps of the whole run.
        warmup: share of these steps over which the factor rises linearly from zero.
    """
    warmup_steps = math.ceil(warmup * total_steps)

    def factor(step: int) -> float:
        """Return the factor of an optimiser step, between 0 and 1."""
        if step < warmup_steps:
            return step / warmup_steps
        progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        if schedule == "linear":
            return 1 - progress
        return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0

    return factor


def step_sizes(module: PolicyModule, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of turns and sampled tokens of an optimiser step, averaged over ranks and minibatches.

    DDP averages gradients over ranks, and Lightning averages losses over accumulated minibatches. If losses are divided
    by these averages, all tokens of a step have the same weight. All ranks must call it.

    Args:
        module: module that is trained.
        mask: sampled tokens of the current minibatch, bool ``(turn, token)``.
    """
    trainer: Any = module._trainer
    if trainer is None or (trainer.world_size == 1 and trainer.accumulate_grad_batches == 1):
        return torch.tensor(float(len(mask)), device=mask.device), mask.count_nonzero()
    sizes: Any = len(mask), int(mask.sum())
    if trainer.accumulate_grad_batches > 1:
        assert isinstance(module.run_data, RolloutDataModule)
        sizes = module.run_data.step_sizes(trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches)
    totals = torch.tensor(sizes, dtype=torch.float32, device=mask.device) / trainer.accumulate_grad_batches
    turns, tokens = trainer.strategy.reduce(totals, reduce_op="mean")
    return turns, tokens


def no_op_loss(policy: Policy, batch: TurnBatch) -> Tensor:
    """Return a loss of 0 that is attached to the graph, so that the step makes all of its collective calls.

    One turn is evaluated, because forward passes gather sharded weights; it is all zeros if the batch is empty.
    """
    turn = batch[torch.zeros(1, dtype=torch.long)] if len(batch) else batch.map(_one_like)
    evaluation = policy.evaluate(turn)
    outputs = (evaluation.logprobs, evaluation.entropy, evaluation.values)
    return torch.stack([output.sum() * 0.0 for output in outputs if output is not None]).sum()


def _one_like(tensor: Tensor) -> Tensor:
    """Return one row with the shape of an empty tensor's rows, filled with True or 0."""
    return tensor.new_full((1, *tensor.shape[1:]), tensor.dtype == torch.bool)
