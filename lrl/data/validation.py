"""Which held-out episodes a run is validated on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrl.envs.factory import EnvFactory
from lrl.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Held-out episodes: where they are played, how many, and how actions are sampled."""

    env: EnvFactory | None = None
    """Environment of the episodes; null takes the training environment."""
    episodes: NonNegativeInt = 50
    """Number of episodes, one seed each."""
    seed: NonNegativeInt = 10_000
    """Seed of the first episode; the others count up from it."""
    num_envs: PositiveInt = 50
    """Environments that are played side by side."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of sampling; 0 decodes greedily."""

    def __post_init__(self) -> None:
        check_fields(self, "data.validation")

    @property
    def seeds(self) -> Tensor:
        """Seeds of all episodes, int64 ``(episode,)``."""
        return torch.arange(self.seed, self.seed + self.episodes)
