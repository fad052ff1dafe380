"""What a person sees while a run goes on."""

import logging
import re

import pytest
from tiny_runs import COLLECTIONS, grpo, make_trainer, rollout_data, save_tiny_model

from lrl.callbacks.progress import ConsoleProgress


def test_a_line_tells_the_figures_of_its_own_collection(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    trainer = make_trainer(tmp_path, ConsoleProgress(every_n_collections=1), limit_val_batches=1)
    folder = save_tiny_model(tmp_path / "tiny")
    with caplog.at_level(logging.INFO, logger="lrl"):
        trainer.fit(grpo(folder), datamodule=rollout_data("episodes"))
    lines = [line for line in caplog.messages if line.startswith("collection ")]
    assert [int(re.findall(r"collection (\d+)/", line)[0]) for line in lines] == [*range(1, COLLECTIONS + 1)]
    steps = [row["clock/env_steps"] for _, row in trainer.logger.rows if "rollout/return" in row]
    assert [int(re.findall(r"env steps (\d+)", line)[0]) for line in lines] == steps
    for metric, shown in (("rollout/return", r"  return (-?[\d.]+)"), ("val/return", r"val return (-?[\d.]+)")):
        logged = [row[metric] for _, row in trainer.logger.rows if metric in row]
        assert [float(re.findall(shown, line)[0]) for line in lines] == pytest.approx(logged, abs=6e-4)
