"""What validation adds to held-out episodes where the environment can be solved: the exact figure."""

from __future__ import annotations

from typing import Any

import lightning as L

from lrl.evaluation.frozen_lake import exact_evaluation, is_frozen_lake, lakes_of
from lrl.functional.sharding import unsharded


class ExactSuccess(L.Callback):
    """Publishes ``val/exact_success`` after each validation on a FrozenLake, and does nothing elsewhere.

    Nor does it for policies that act natively.

    The policy, decoded greedily in each state, is propagated through the transition table, so the figure has no
    sampling error. ``val/exact_success_of_optimum`` is its share of the best policy's. Averaged over maps.

    Args:
        num_maps: different maps, where the environment draws them; those of the first held-out episodes.
    """

    def __init__(self, num_maps: int = 100) -> None:
        if num_maps < 1:
            raise ValueError(f"num_maps is {num_maps}; it must be at least 1.")
        self.num_maps = num_maps

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate on every rank, so that all make the same calls."""
        module: Any = pl_module
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not is_frozen_lake(data.validation_env) or module.policy.response_format is None:  # it is asked in text
            return
        lakes = lakes_of(data.validation_env, self.num_maps, data.validation_seed)
        with trainer.precision_plugin.forward_context(), unsharded(pl_module):
            exact = exact_evaluation(module.policy, lakes)
        success, optimum = float(exact.success.mean()), float(exact.optimum.mean())
        figures = {"val/exact_success": success, "val/exact_success_of_optimum": success / optimum}
        module.publish(figures)
