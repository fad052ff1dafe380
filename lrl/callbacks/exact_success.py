"""Exact success rates on FrozenLake, computed from the transition table instead of sampled episodes."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import numpy as np

from lrl.evaluation.exact import Lake, exact_evaluation, is_frozen_lake, lakes_of, wrong_states
from lrl.functional.distributed import unsharded
from lrl.ranges import PositiveInt, check_arguments

_SOLVED = 0.97
"""Fraction of the best stationary policy's success rate from which a map counts as solved."""


class ExactSuccess(L.Callback):
    """Logs ``val/exact_success`` after each validation on FrozenLake; does nothing elsewhere.

    The policy is decoded greedily in each state and propagated through the transition table, so the success rate has no
    sampling error. ``val/exact_success_of_optimum`` is its ratio to that of the best policy. Both are averaged over
    maps. At the end of training on a single map the log says whether it is solved, and lists the states in which the
    greedy action is not a best one, with the sampling probabilities of both.

    Args:
        num_maps: number of maps, if the environment generates them: the maps of the first held-out episodes.
        samples: number of responses per state, sampled at temperature 1, for the probabilities in the final log.
    """

    def __init__(self, num_maps: PositiveInt = 100, samples: PositiveInt = 64) -> None:
        check_arguments(ExactSuccess.__init__, locals(), "ExactSuccess")
        self.num_maps, self.samples = num_maps, samples

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate on every rank, so that all ranks make the same collective calls."""
        module: Any = pl_module
        lakes = self._lakes(trainer)
        if not lakes:
            return
        with trainer.precision_plugin.forward_context(), unsharded(pl_module):
            exact = exact_evaluation(module.policy, lakes)
        success, optimum = float(exact.success.mean()), float(exact.optimum.mean())
        module.publish({"val/exact_success": success, "val/exact_success_of_optimum": success / optimum})

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log whether a run on a single map solved it, and the states in which it did not."""
        module: Any = pl_module
        lakes = self._lakes(trainer)
        if len(lakes) != 1 or trainer.interrupted:
            return
        with trainer.precision_plugin.forward_context(), unsharded(pl_module):
            greedy = exact_evaluation(module.policy, lakes)
            sampled = exact_evaluation(module.policy, lakes, module.policy.sampling_at(1.0), self.samples)
        if trainer.is_global_zero:
            _log_solved(lakes[0], float(greedy.success[0]), greedy.decisions[0], sampled.decisions[0])

    def _lakes(self, trainer: L.Trainer) -> list[Lake]:
        """Return the maps of the validation; none in other environments."""
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not is_frozen_lake(data.validation_env):
            return []
        return lakes_of(data.validation_env, self.num_maps, data.validation.seed)


def _log_solved(lake: Lake, success: float, greedy: np.ndarray, sampled: np.ndarray) -> None:
    """Log whether a success rate solves the map, with greedy and sampled action probabilities ``(state, action)``."""
    logger, optimum = logging.getLogger("lrl"), lake.best_stationary
    solved = success >= _SOLVED * optimum
    level = logging.INFO if solved else logging.WARNING
    wrong = wrong_states(lake, greedy, sampled)
    logger.log(
        level,
        "FrozenLake is %s: exact success %.3f, best stationary policy %.3f; in %d of %d states the greedy action is "
        "not a best one",
        *("solved" if solved else "NOT SOLVED", success, optimum, len(wrong), len(lake.states)),
    )
    for state in wrong:
        logger.log(level, "  %s", state)
