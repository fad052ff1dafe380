"""Optimiser and learning-rate schedule of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lrl.ranges import HalfOpenUnitInterval, NonNegativeFloat, PositiveFloat, check_fields

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
    run."""
    warmup: HalfOpenUnitInterval = 0.0
    """Share of the run over which the learning rate rises from zero."""
    update_kl: PositiveFloat | None = None
    """Divergence KL(old || new) of the update of one collection, in nats per token, to which the learning rate is
    adapted as in arXiv:2109.11978, but per collection instead of per minibatch: after an update with more than twice
    this divergence it is divided by 1.5, and after one with less than half of it multiplied by 1.5, within the limits
    of :meth:`adapted`. Null does not adapt it."""
    reject_kl: PositiveFloat | None = None
    """Maximum of KL(old || new) of the update of one collection, in nats per token. A larger update is undone: the
    weights and the state of the optimiser before it are restored, and the learning rate is halved. Unless ``update_kl``
    is set, each accepted update multiplies it by 1.2, up to ``lr``, which with a schedule is the rate before its decay.
    Null undoes none."""
    factory: OptimizerFactory | None = None
    """Creates another optimiser from parameter groups; null uses AdamW with ``lr`` and ``weight_decay``."""

    def __post_init__(self) -> None:
        check_fields(self, "model.optimizer")
        if self.update_kl is not None and (self.schedule != "constant" or self.warmup):
            raise ValueError(
                f"model.optimizer.update_kl is {self.update_kl}, but the learning rate has a schedule; "
                "model.optimizer.schedule must be constant and model.optimizer.warmup 0."
            )

    @property
    def adapts(self) -> bool:
        """Return whether the learning rate depends on the divergence of updates."""
        return self.update_kl is not None or self.reject_kl is not None

    def require_fixed_rate(self) -> None:
        """Check that the learning rate is not adapted, for training without rollouts.

        Raises:
            ValueError: If ``update_kl`` or ``reject_kl`` is set.
        """
        for name in ("update_kl", "reject_kl"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"model.optimizer.{name} is {getattr(self, name)}; it must be null, because only rollouts have a "
                    "divergence from the policy that sampled."
                )

    def rejects(self, kl: float) -> bool:
        """Return whether an update with this divergence in nats per token is undone."""
        return self.reject_kl is not None and not kl <= self.reject_kl

    def adapted(self, lr: float, kl: float) -> float:
        """Return the learning rate of the next collection; with a schedule, before its factor.

        It stays above a hundredth of the configured one, and below ten times the configured one with ``update_kl``.

        Args:
            lr: learning rate of the last update.
            kl: its divergence in nats per token. A divergence at the level of rounding, such as that of a collection in
                which all advantages are 0, says nothing about the learning rate; ``update_kl`` then does not change it.
        """
        if self.rejects(kl):
            return max(lr / 2, self.lr / 100)
        if self.update_kl is None:
            return min(1.2 * lr, self.lr)
        if kl > 2 * self.update_kl:
            lr /= 1.5
        elif _MIN_KL < kl < self.update_kl / 2:
            lr *= 1.5
        return min(max(lr, self.lr / 100), 10 * self.lr)

    def make(self, groups: list[dict[str, Any]], total_steps: float, fused: bool) -> Any:
        """Return the optimiser, with its schedule if it has one, in the format of ``configure_optimizers``.

        Args:
            groups: parameter groups.
            total_steps: number of optimiser steps of the whole run; infinite if it has no limit.
            fused: whether AdamW updates all weights in one kernel.

        Raises:
            ValueError: If the learning rate is not constant and the run has no limit.
        """
        if self.factory is not None:
            optimizer = self.factory(groups)
        else:
            optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=self.weight_decay, fused=fused)
        if self.schedule == "constant" and self.warmup == 0:
            return optimizer
        if total_steps == float("inf"):
            raise ValueError(
                f"model.optimizer.schedule is {self.schedule!r}; it needs trainer.max_epochs or trainer.max_steps."
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
