"""Figures of held-out episodes as one metric of torchmetrics, which adds them up over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from lrl.evaluation.episodes import EpisodeResults


class EpisodeMetrics(Metric):
    """Mean return and length, success rate, and the share of turns without a legal action.

    Args:
        options: of :class:`torchmetrics.Metric`; ``sync_on_compute=False`` takes this rank's episodes alone.
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
        """Add episodes that were played to their end; there may be none."""
        self.episodes = self.episodes + len(results)
        self.returns = self.returns + float(results.returns.sum())
        self.turns = self.turns + int(results.lengths.sum())
        self.successes = self.successes + int(results.successes.sum())
        self.invalid_actions = self.invalid_actions + int(results.invalid_actions.sum())

    def compute(self) -> dict[str, Tensor]:
        """``return``, ``length``, ``success_rate`` and ``invalid_action_rate``, each ``()``."""
        return {
            "return": self.returns / self.episodes,
            "length": self.turns / self.episodes,
            "success_rate": self.successes / self.episodes,
            "invalid_action_rate": self.invalid_actions / self.turns,
        }
