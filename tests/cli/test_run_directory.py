"""What a launch leaves behind."""

import json
import logging
import os
import shlex
import sys

import pytest

import lrl.cli.main
from lrl.cli.run_directory import RunDirectory

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # which a run writes to its run.log
NETWORK = """
model:
  class_path: PPOValueHeadModule
  init_args: {policy: {class_path: MLPPolicy, init_args: {hidden_sizes: [4], init_seed: 0}}}
data:
  class_path: RolloutDataModule
  init_args:
    env: {class_path: GymnasiumEnvs, init_args: {id: CartPole-v1}}
    num_envs: 2
    num_steps: 4
    validation: {episodes: 2}
trainer: {max_epochs: 1, accelerator: cpu}
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Starts a run of a small network in this process; gives its exit status and what it said."""
    config = tmp_path / "network.yaml"
    config.write_text(NETWORK)
    monkeypatch.setattr(sys, "argv", ["lrl"])

    def start(subcommand, *arguments):
        monkeypatch.setenv("LRL_RUN_DIRECTORY", "")  # so that it is restored
        monkeypatch.delenv("LRL_RUN_DIRECTORY")
        status = 0
        try:
            lrl.cli.main.run([subcommand, "--config", str(config), *map(str, arguments)])
        except SystemExit as stopped:
            status = stopped.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return start


@pytest.mark.slow
def test_the_directory_of_a_failed_launch_can_be_used_again(launch, tmp_path):
    run = tmp_path / "runs" / "one"
    command = ["fit", "--run_directory", run, "--data.init_args.validation.env"]
    for _ in range(2):
        status, _, said = launch(*command, "{class_path: GymnasiumEnvs, init_args: {id: CartPoole-v1}}")
        assert status == 2 and "data.validation.env: env.id is 'CartPoole-v1', which is not registered" in said
        assert "collection 1" not in said and not run.parent.exists()


def test_a_directory_that_was_there_and_what_a_user_put_there_stay(launch, tmp_path):
    run = tmp_path / "mine"
    run.mkdir()
    assert launch("fit", "--run_directory", run, "--model.init_args.optimizer.lr", "-1")[0] == 2
    assert run.is_dir() and not any(run.iterdir())
    (run / "notes.txt").write_text("mine")
    status, _, said = launch("fit", "--run_directory", run)
    assert status == 2 and "which is not empty" in said and os.listdir(run) == ["notes.txt"]


def test_a_run_that_had_begun_training_is_kept(launch, tmp_path):
    run = tmp_path / "begun"
    stop = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "no_such"}}
    callbacks = json.dumps([{"class_path": "lrl.callbacks.collect.VectorEnvRollouts"}, stop])
    with pytest.raises(RuntimeError, match="no_such"):
        launch("fit", "--run_directory", run, "--trainer.callbacks", callbacks)
    assert {"run.log", "command.txt", "config.yaml", "metrics.csv"} <= set(os.listdir(run))


def test_a_directory_in_which_another_rank_has_begun_the_log_is_free(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.log").touch()
    monkeypatch.setenv("LRL_RUN_DIRECTORY", "")  # so that it is restored
    monkeypatch.delenv("LRL_RUN_DIRECTORY")
    assert RunDirectory.create(str(run), "frozen_lake/grpo", 0).path == run
    assert {"run.log", "command.txt", "commit.txt"} == set(os.listdir(run))


def test_the_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("LRL_RUN_DIRECTORY", "")  # so that it is restored
    monkeypatch.delenv("LRL_RUN_DIRECTORY")
    command = ["lrl", "fit", "--model.rewards", '[{"class_path": "some.Reward"}]']
    monkeypatch.setattr("sys.argv", command)
    run = RunDirectory.create(str(tmp_path / "run"), "frozen_lake/grpo", 0)
    assert shlex.split((run.path / "command.txt").read_text()) == command


def test_a_directory_that_cannot_be_written_to_is_named_in_a_sentence(launch, tmp_path):
    (tmp_path / "file").touch()
    status, _, said = launch("fit", "--run_directory", tmp_path / "file" / "run")
    assert status == 2 and "Traceback" not in said
    assert said.startswith("lrl: run_directory is '") and "which cannot be written to (Not a directory)" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_does_not_print_a_traceback_for_every_line_of_the_log(tmp_path, capsys):
    (tmp_path / "run.log").symlink_to("/dev/full")
    log = logging.getLogger("lrl")
    RunDirectory(tmp_path, ())._begin(quiet=True)
    try:
        log.warning("one line")
    finally:
        for handler in log.handlers:
            handler.stream = None  # nothing is left to be flushed at exit
    os.environ.pop("LRL_RUN_DIRECTORY")
    assert capsys.readouterr().err == ""


def test_validate_prints_the_table_and_warns_that_nothing_was_loaded(launch, tmp_path):
    status, printed, said = launch("validate", "--run_directory", tmp_path / "run")
    assert status == 0 and "no --ckpt_path: validate scores the policy as it is before training" in said
    assert all(word in printed for word in ("policy before training in CartPole-v1", "return", "seeds 10000 to 10001"))
