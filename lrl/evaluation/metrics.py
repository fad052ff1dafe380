"""A torchmetrics metric of evaluation episodes, summed over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from lrl.evaluation.episodes import EpisodeResults


class EpisodeMetrics(Metric):
    """Computes mean return and length, success rate, and the rate of turns without a legal action.

    Args:
        options: arguments of :class:`torchmetrics.Metric`; ``sync_on_compute=False`` uses this rank's episodes only.
    """

    full_state_update = False
    episodes: Tensor
    returns: Tensor
    turns: Tensor
    successes: Tensor
    invalid_actions: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("episodes", "returns", "turns", "successes", "invalid_actions"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, results: EpisodeResults) -> None:
        """Add episodes that were played to their end, or none."""
        self.episodes = self.episodes + len(results)
        self.returns = self.returns + float(results.returns.sum())
        self.turns = self.turns + int(results.lengths.sum())
        self.successes = self.successes + int(results.successes.sum())
        self.invalid_actions = self.invalid_actions + int(results.invalid_actions.sum())

    def compute(self) -> dict[str, Tensor]:
        """Return ``return``, ``length``, ``success_rate`` and ``invalid_action_rate``, each a float64 scalar ``()``."""
        return {
            "return": self.returns / self.episodes,
            "length": self.turns / self.episodes,
            "success_rate": self.successes / self.episodes,
            "invalid_action_rate": self.invalid_actions / self.turns,
        }
