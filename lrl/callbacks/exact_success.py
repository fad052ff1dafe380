"""What validation adds to held-out episodes where the environment can be solved: the exact figure."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import numpy as np

from lrl.evaluation.episodes import sampling_at
from lrl.evaluation.exact import Lake, exact_evaluation, is_frozen_lake, lakes_of, wrong_states
from lrl.functional.distributed import unsharded

_SOLVED = 0.97
"""Share of the best stationary policy's success from which a map counts as solved."""


class ExactSuccess(L.Callback):
    """Publishes ``val/exact_success`` after each validation on a FrozenLake, and does nothing elsewhere.

    Nor does it for policies that act natively. At the end of training the log says whether the map is solved, and
    which states are not: the greedy action, its probability when sampling, and that of the best action.

    The policy, decoded greedily in each state, is propagated through the transition table, so the figure has no
    sampling error. ``val/exact_success_of_optimum`` is its share of the best policy's. Averaged over maps.

    Args:
        num_maps: different maps, where the environment draws them; those of the first held-out episodes.
        samples: responses per state, at temperature 1, from which the final report takes its probabilities.
    """

    def __init__(self, num_maps: int = 100, samples: int = 64) -> None:
        for name, value in (("num_maps", num_maps), ("samples", samples)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.num_maps, self.samples = num_maps, samples

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate on every rank, so that all make the same calls."""
        module: Any = pl_module
        lakes = self._lakes(trainer, module)
        if not lakes:
            return
        with trainer.precision_plugin.forward_context(), unsharded(pl_module):
            exact = exact_evaluation(module.policy, lakes)
        success, optimum = float(exact.success.mean()), float(exact.optimum.mean())
        figures = {"val/exact_success": success, "val/exact_success_of_optimum": success / optimum}
        module.publish(figures)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log whether a run on one map solved it, and where it did not."""
        module: Any = pl_module
        lakes = self._lakes(trainer, module)
        if len(lakes) != 1 or trainer.interrupted:
            return
        with trainer.precision_plugin.forward_context(), unsharded(pl_module):
            greedy = exact_evaluation(module.policy, lakes)
            sampled = exact_evaluation(module.policy, lakes, sampling_at(module.policy, 1.0), self.samples)
        if trainer.is_global_zero:
            _report(lakes[0], float(greedy.success[0]), greedy.decisions[0], sampled.decisions[0])

    def _lakes(self, trainer: L.Trainer, module: Any) -> list[Lake]:
        """The maps on which the run validates; none elsewhere, and none for a policy that is not asked in text."""
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not is_frozen_lake(data.validation_env) or module.policy.response_format is None:
            return []
        return lakes_of(data.validation_env, self.num_maps, data.validation_seed)


def _report(lake: Lake, success: float, greedy: np.ndarray, sampled: np.ndarray) -> None:
    logger, ceiling = logging.getLogger("lrl"), lake.best_stationary
    solved = success >= _SOLVED * ceiling
    verdict = "solved" if solved else "NOT SOLVED"
    wrong = wrong_states(lake, greedy, sampled)
    logger.log(
        logging.INFO if solved else logging.WARNING,
        "FrozenLake is %s: exact success %.3f, best stationary policy %.3f; in %d of %d states the greedy action is "
        "not a best one",
        *(verdict, success, ceiling, len(wrong), len(lake.states)),
    )
    for state in wrong:
        logger.log(logging.INFO if solved else logging.WARNING, "  %s", state)
