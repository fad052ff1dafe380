"""Pictures in the run directory: the action probabilities of the policy, and its learning curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from lrl.evaluation.exact import Lake, exact_evaluation, is_frozen_lake, lakes_of
from lrl.functional.distributed import unsharded
from lrl.ranges import PositiveInt, check_arguments
from lrl.reports.pictures import draw_policy
from lrl.reports.plots import Curve, aggregate, draw_curves, read_series


class PolicyPicture(L.Callback):
    """Writes ``policy.png`` (on FrozenLake only) and ``learning_curve.png`` at the end of training.

    Args:
        samples: number of responses per state, sampled at temperature 1, whose frequencies are drawn.
        metrics: metrics in the learning curve; those that were not logged are left out.
        clock: x axis of the learning curve: ``env_steps``, ``episodes``, ``tokens`` or ``minutes``.
    """

    def __init__(
        self,
        samples: PositiveInt = 64,
        metrics: Sequence[str] = ("rollout/success_rate", "val/exact_success"),
        clock: str = "env_steps",
    ) -> None:
        check_arguments(PolicyPicture.__init__, locals(), "PolicyPicture")
        self.samples, self.metrics, self.clock = samples, tuple(metrics), clock

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the policy on every rank, draw on the first."""
        folder = Path(trainer.default_root_dir)
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        baselines: dict[str, float] = {}
        if is_frozen_lake(data.validation_env):
            lake = lakes_of(data.validation_env, 1, data.validation.seed)[0]
            self._draw_policy(trainer, pl_module, lake, folder)
            if len(lakes_of(data.validation_env, 2, data.validation.seed)) == 1:
                baselines["optimum"] = lake.optimum
        if trainer.is_global_zero:
            self._draw_curve(trainer, baselines, folder)

    def _draw_policy(self, trainer: L.Trainer, pl_module: L.LightningModule, lake: Lake, folder: Path) -> None:
        policy: Any = pl_module.policy
        with trainer.precision_plugin.forward_context(), unsharded(pl_module):
            greedy = exact_evaluation(policy, [lake]).success[0]
            sampled = exact_evaluation(policy, [lake], policy.sampling_at(1.0), self.samples)
        if trainer.is_global_zero:
            title = f"exact success {greedy:.3f}, optimum {lake.optimum:.3f}"
            draw_policy(lake, sampled.decisions[0], folder / "policy.png", title)

    def _draw_curve(self, trainer: L.Trainer, baselines: Mapping[str, float], folder: Path) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]
        curves: list[Curve] = []
        for logger in loggers[:1]:
            logger.save()  # it writes only every n rows
            for metric in self.metrics:
                with suppress(ValueError):  # not logged in this run
                    series = read_series(Path(logger.log_dir), metric, self.clock)
                    curves.append(aggregate(metric, [series], "mean"))
        if curves:
            names = "\n".join(curve.label for curve in curves)
            draw_curves(curves, names, self.clock, folder / "learning_curve.png", baselines)
