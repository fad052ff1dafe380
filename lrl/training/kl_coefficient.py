"""The weight of the KL term to the reference policy: fixed, or steered towards a target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lrl.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, check_fields


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL term that keeps a policy near the one that the run started from."""

    coef: NonNegativeFloat = 0.0
    """Weight; 0 keeps no reference policy."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How GRPO estimates the divergence from sampled tokens (:func:`lrl.functional.losses.kl_estimate`)."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")


@dataclass(frozen=True, kw_only=True)
class AdaptiveKLConfig:
    """KL penalties of PPO; the one to the reference can follow a target (arXiv:1909.08593, section 2.2)."""

    coef: NonNegativeFloat = 0.0
    """Weight, at first if it is steered; 0 keeps no reference policy."""
    target: PositiveFloat | None = None
    """Nats per turn that the weight is steered towards; null leaves it fixed."""
    horizon: PositiveInt = 10_000
    """Turns over which it is steered."""
    old_coef: NonNegativeFloat = 0.0
    """Weight of KL(pi_old || pi), the divergence from the policy that sampled."""

    def __post_init__(self) -> None:
        check_fields(self, "model.kl")
        if self.target is not None and self.coef == 0:
            raise ValueError(f"model.kl.target is {self.target}, but model.kl.coef is 0; it must be positive.")


class KLCoefficient:
    """Holds the weight of a KL penalty, which changes between collections.

    Args:
        config: where it starts, and what it is steered towards.
    """

    def __init__(self, config: AdaptiveKLConfig) -> None:
        self.config = config
        self.value = self._next = float(config.coef)

    def observe(self, kl: float, turns: float) -> None:
        """Take the mean KL per turn of a collection into account, from :meth:`advance` on.

        Args:
            kl: mean over turns, in nats.
            turns: how many there were, over all ranks.
        """
        if self.config.target is not None:
            error = min(max(kl / self.config.target - 1, -0.2), 0.2)
            self._next = self.value * math.exp(error * turns / self.config.horizon)

    def advance(self) -> None:
        """Use the weight that the last collection asked for: its advantages have been estimated."""
        self.value = self._next

    def state(self) -> list[float]:
        """Return the current weight and the next."""
        return [self.value, self._next]

    def load(self, state: list[float]) -> None:
        """Restore :meth:`state`, if the weight is steered; else the configured one counts."""
        if self.config.target is not None:
            self.value, self._next = state
