"""Tests of the progress output of a run."""

import logging
import re

import pytest
from tiny_runs import COLLECTIONS, grpo, make_trainer, rollout_data, save_tiny_model, text_policy

from lrl.algorithms.sft import SFTModule
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.run_data import ValidationConfig
from lrl.data.sources import ExpertDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.training.optimizer import OptimizerConfig
from lrl.training.progress import ConsoleProgress


def test_a_logged_line_has_the_metrics_of_its_own_collection(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    trainer = make_trainer(tmp_path, ConsoleProgress(), limit_val_batches=1)
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


@pytest.mark.slow
def test_a_run_that_a_number_of_env_steps_ends_counts_them_and_reports_its_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    trainer, data = make_trainer(tmp_path, ConsoleProgress()), rollout_data("episodes")
    trainer.fit_loop.max_epochs, data.max_env_steps = 1000, 200
    with caplog.at_level(logging.INFO, logger="lrl"):
        trainer.fit(grpo(save_tiny_model(tmp_path / "tiny")), datamodule=data)
    first, *_, last = [line for line in caplog.messages if line.startswith("collection ")]
    assert re.match(r"collection 1  env steps \d+/200  return", first)
    count, steps = map(int, re.findall(r"collection (\d+)  env steps (\d+)/200  return", last)[0])
    assert count == trainer.current_epoch > 1 and steps == data.clocks["env_steps"] >= 200


@pytest.mark.slow
def test_a_long_pass_over_demonstrations_is_reported_in_parts(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    rows = ExpertDemonstrations(ExpertQRows(), repeat=10)
    data = DemonstrationsDataModule(
        rows, GymnasiumEnvs("FrozenLake-v1"), batch_size=1, validation=ValidationConfig(episodes=0)
    )
    module = SFTModule(
        text_policy(save_tiny_model(tmp_path / "tiny")),
        optimizer=OptimizerConfig(lr=1e-3, schedule="cosine", warmup=0.03),
    )
    module.log_every = 10
    trainer = make_trainer(tmp_path, ConsoleProgress())
    trainer.fit_loop.max_epochs = 3
    with caplog.at_level(logging.INFO, logger="lrl"):
        trainer.fit(module, datamodule=data)
    lines = [line for line in caplog.messages if line.startswith(("batch ", "collection "))]
    whole = [place for place, line in enumerate(lines) if line.startswith("collection")]
    assert [lines[place][:14] for place in whole] == ["collection 1/3", "collection 2/3", "collection 3/3"]
    parts = [-(-330 * part // 20) for part in range(1, 20)]
    assert [int(line.split("/")[0].split()[1]) for line in lines if line.startswith("batch")] == parts
    assert lines[0].startswith("batch 17/330  loss ")
    losses = [row["train/loss"] for _, row in trainer.logger.rows if "train/loss" in row]
    assert float(lines[0].split("loss ")[1].split()[0]) == pytest.approx(losses[0], abs=6e-4)


@pytest.mark.slow
def test_collections_of_many_minibatches_are_not_reported_in_parts(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    monkeypatch.setattr("lrl.training.progress._LONG_PASS", 1)
    trainer = make_trainer(tmp_path, ConsoleProgress())
    with caplog.at_level(logging.INFO, logger="lrl"):
        trainer.fit(grpo(save_tiny_model(tmp_path / "tiny")), datamodule=rollout_data("episodes"))
    assert not [line for line in caplog.messages if line.startswith("batch ")]
