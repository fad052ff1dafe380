"""The evaluation table that ``lrl validate``, ``test`` and ``predict`` print, and the file that ``predict`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from lrl.evaluation.checkpoint import env_id
from lrl.evaluation.results import EpisodeResults
from lrl.reports.table import results_table, write_json

PREDICTIONS = "predictions.json"
"""Name of the file that ``predict`` writes into the run directory."""


class HeldOutTable(L.Callback):
    """Prints the evaluation table after held-out episodes; added by the commands that do not train."""

    def __init__(self) -> None:
        self._results: EpisodeResults | None = None

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, *_: Any, **__: Any
    ) -> None:
        """Store the results that the module returned; the table is printed after the metrics of other callbacks."""
        self._results = outputs if isinstance(outputs, EpisodeResults) else None

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table."""
        self._print(trainer)

    on_test_end = on_validation_end

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table, and write all episodes to the run directory."""
        self._print(trainer)
        if self._results is not None and trainer.is_global_zero:
            data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
            report = self._results.report(env_id(data.validation_env), _policy_name(trainer))
            write_json(report, Path(trainer.default_root_dir) / PREDICTIONS)

    def _print(self, trainer: L.Trainer) -> None:
        if self._results is None or not trainer.is_global_zero:
            return
        from rich.console import Console

        results, data = self._results, trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        seeds = f"seeds {results.seed} to {results.seed + len(results) - 1}"
        where = f"{_policy_name(trainer)} in {env_id(data.validation_env)}"
        exact = trainer.callback_metrics.get("val/exact_success")
        lines = [results.success_rule, "" if exact is None else f"exact success: {float(exact):.4f}"]
        title = f"{where}\n{len(results)} episodes ({seeds}), 95% intervals"
        Console().print(results_table({"policy": results}, title, "\n".join(filter(None, lines))))


def _policy_name(trainer: L.Trainer) -> str:
    return str(trainer.ckpt_path or "policy before training")
