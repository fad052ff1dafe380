"""Tests of the progress output of a run."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import COLLECTIONS, grpo, make_trainer, rollout_data, save_tiny_model, text_policy

from lrl.algorithms.sft import SFTModule
from lrl.data.demonstrations import DemonstrationsDataModule
from lrl.data.run_data import ValidationConfig
from lrl.data.sources import ExpertDemonstrations
from lrl.envs.factory import GymnasiumEnvs
from lrl.envs.frozen_lake import ExpertQRows
from lrl.training.optimizer import OptimizerConfig
from lrl.training.progress import _TRAINING, ConsoleProgress, _figures, _gpu_memory


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
    validations = [line for line in caplog.messages if line.startswith("validation ")]
    for metric, shown in (("rollout/return", lines), ("val/return", validations)):
        logged = [row[metric] for _, row in trainer.logger.rows if metric in row]
        figures = [float(re.findall(r"  return (-?[\d.]+)", line)[0]) for line in shown]
        assert figures == pytest.approx(logged, abs=6e-4)


@pytest.mark.slow
def test_validation_figures_are_logged_only_when_they_are_new(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    trainer = make_trainer(tmp_path, ConsoleProgress(), limit_val_batches=1, check_val_every_n_epoch=2)
    with caplog.at_level(logging.INFO, logger="lrl"):
        trainer.fit(grpo(save_tiny_model(tmp_path / "tiny")), datamodule=rollout_data("episodes"))
    lines = [line.split("/")[0] for line in caplog.messages if line.startswith(("collection ", "validation "))]
    assert lines == ["collection 1", "collection 2", "validation 2", "collection 3"]


class Terminal(io.StringIO):
    """Stands for a terminal that keeps everything that is written to it."""

    def isatty(self):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_lines_above_the_bar_and_nothing_is_wider_than_it(tmp_path, monkeypatch, columns):
    terminal, log = Terminal(), logging.getLogger("lrl")
    handler = logging.StreamHandler(terminal)
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    monkeypatch.setattr("lrl.training.progress._gpu_memory", lambda trainer: "GPU 12.3/80 GiB")
    trainer = make_trainer(tmp_path, ConsoleProgress(), limit_val_batches=1)
    trainer.fit(grpo(save_tiny_model(tmp_path / "tiny")), datamodule=rollout_data("episodes"))
    assert sys.stderr is handler.stream is terminal
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", terminal.getvalue())
    written = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert max(map(len, written)) <= columns
    first, *_, last = (line for line in written if re.search(r"━ (0/3 0|3/3 \d)", line))
    assert re.match(r"collecting +━+ 0/3 0.0 min$", first)
    assert re.match(r"validating +━+ 3/3 \d.\d min, 0.0 left GPU 12.3/80 GiB$", last)
    logged = [line for line in written if "env steps" in line]
    assert [line.split("  ")[0] for line in logged] == ["collection 1/3", "collection 2/3", "collection 3/3"]
    assert all(("entropy" in line) == (columns == 120) for line in logged)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_there_is_no_bar_if_an_output_is_no_terminal(tmp_path, monkeypatch, name):
    streams = {"stdout": Terminal(), "stderr": Terminal()} | {name: io.StringIO()}
    for each, stream in streams.items():
        monkeypatch.setattr(sys, each, stream)
    monkeypatch.setattr(logging.getLogger("lrl"), "handlers", [logging.StreamHandler(streams["stderr"])])
    monkeypatch.setattr(logging.getLogger("lrl"), "level", logging.INFO)
    trainer = make_trainer(tmp_path, ConsoleProgress(), max_epochs=1)
    trainer.fit(grpo(save_tiny_model(tmp_path / "tiny")), datamodule=rollout_data("episodes"))
    text = streams["stderr"].getvalue()
    assert "collection 1/1  " in text and "\x1b" not in text + streams["stdout"].getvalue() and "━" not in text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"rollout/return": 12345.6, "train/loss": -0.01234}, ["return 12346", "loss -0.012"]),
        ({"rollout/return": 499.96, "rollout/invalid_action_rate": 0.0}, ["return 500.0"]),
        ({"rollout/invalid_action_rate": 0.25, "rollout/return": -1}, ["return -1.000", "invalid 0.250"]),
    ],
)
def test_figures_are_rounded_and_invalid_actions_are_shown_only_if_there_are_any(values, shown):
    assert _figures(SimpleNamespace(callback_metrics=values), _TRAINING) == shown


def test_a_resumed_run_says_with_which_collection_and_minute_it_continues(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    trainer = SimpleNamespace(current_epoch=4, max_epochs=9, ckpt_path="last.ckpt", is_global_zero=True)
    with caplog.at_level(logging.INFO, logger="lrl"):
        progress = ConsoleProgress()
        progress.on_train_start(trainer, SimpleNamespace(clocks={"minutes": 61.24}))
        progress._log("collection 5/9")
    assert caplog.messages == ["continues with collection 5/9", "collection 5/9  61.2 min"]


def test_the_memory_of_a_gpu_is_shown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=79.6 * 2**30))
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")))
    assert _gpu_memory(trainer) == "GPU 3.0/80 GiB"


@pytest.mark.slow
def test_a_run_that_a_number_of_env_steps_ends_counts_them_and_reports_its_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    trainer, data = make_trainer(tmp_path, ConsoleProgress()), rollout_data("episodes")
    trainer.fit_loop.max_epochs, data.max_env_steps = 1000, 200
    with caplog.at_level(logging.INFO, logger="lrl"):
        trainer.fit(grpo(save_tiny_model(tmp_path / "tiny"), optimizer={"schedule": "constant"}), datamodule=data)
    first, *_, last = [line for line in caplog.messages if line.startswith("collection ")]
    pattern = r"collection (\d+)  \d.\d min  env steps (\d+)/200  return"
    assert re.match(pattern, first)[1] == "1"
    count, steps = map(int, re.match(pattern, last).groups())
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
    trainer.fit_loop.max_epochs = 2
    with caplog.at_level(logging.INFO, logger="lrl"):
        trainer.fit(module, datamodule=data)
    lines = [line for line in caplog.messages if line.startswith(("batch ", "collection "))]
    whole = [place for place, line in enumerate(lines) if line.startswith("collection")]
    assert [lines[place][:14] for place in whole] == ["collection 1/2", "collection 2/2"]
    parts = [11 * part for part in range(1, 20) if part != 10]  # there the first pass ends
    assert [int(line.split("/")[0].split()[1]) for line in lines if line.startswith("batch")] == parts
    assert re.match(r"batch 11/220  \d.\d min  loss ", lines[0])
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
