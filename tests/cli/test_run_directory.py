"""Tests of the files that a launch writes."""

import json
import logging
import os
import re
import shlex
import signal
import sys
from csv import DictReader

import pytest
import torch
from commands import run_command, run_words

import lrl.cli.main
import lrl.cli.run_directory
from lrl.cli.run_directory import RunDirectory, _unused
from lrl.evaluation.run_records import minutes_of
from lrl.files import lock_folder, unlock_folder
from lrl.ranges import LateSettingError
from lrl.training.checkpoint import CollectionCheckpoint
from lrl.training.collect import VectorEnvRollouts

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
    """Start a run of a small network in this process; return its exit status and its output."""
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
def test_the_directory_of_a_failed_launch_can_be_reused(launch, tmp_path):
    run = tmp_path / "runs" / "one"
    command = ["fit", "--run_directory", run, "--data.init_args.validation.env"]
    for _ in range(2):
        status, _, said = launch(*command, "{class_path: GymnasiumEnvs, init_args: {id: CartPoole-v1}}")
        assert status == 2 and "data.validation.env: env.id is 'CartPoole-v1', which is not registered" in said
        assert "collection 1" not in said and not run.parent.exists()


@pytest.mark.parametrize("job", [None, "5"])
def test_a_setting_that_only_the_first_collection_can_check_leaves_no_directory(launch, tmp_path, monkeypatch, job):
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    run = tmp_path / "runs" / "one"
    settings = ["--run_directory", run, "--model.init_args.credit.kind", "bandit"]
    reason = "data.num_steps is 4; it must be null, because bandit credit needs whole episodes"
    for _ in range(2):
        status, _, said = launch("fit", *settings)
        assert status == 2 and reason in said and not run.parent.exists()


def test_the_directory_of_a_run_with_another_error_in_its_first_collection_is_kept(launch, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("a wrong reward")

    monkeypatch.setattr(VectorEnvRollouts, "on_train_epoch_start", fail)
    run = tmp_path / "run"
    status, _, said = launch("fit", "--run_directory", run)
    assert status == 2 and "a wrong reward" in said and "a wrong reward" in (run / "run.log").read_text()


def test_a_setting_that_is_wrong_only_later_keeps_what_was_trained(launch, tmp_path, monkeypatch):
    collect, collected = VectorEnvRollouts.on_train_epoch_start, []

    def fail(*given):
        if collected:
            raise LateSettingError("a prompt is too long")
        collected.append(True)
        collect(*given)

    monkeypatch.setattr(VectorEnvRollouts, "on_train_epoch_start", fail)
    run = tmp_path / "run"
    status, _, said = launch("fit", "--run_directory", run, "--trainer.max_epochs", "2")
    assert status == 2 and "a prompt is too long" in said and (run / "checkpoints" / "last.ckpt").exists()


def test_an_existing_directory_and_files_of_a_user_are_kept(launch, tmp_path):
    run = tmp_path / "mine"
    run.mkdir()
    assert launch("fit", "--run_directory", run, "--model.init_args.optimizer.lr", "-1")[0] == 2
    assert run.is_dir() and not any(run.iterdir())
    (run / "notes.txt").write_text("mine")
    status, _, said = launch("fit", "--run_directory", run)
    assert status == 2 and "which is not empty" in said and os.listdir(run) == ["notes.txt"]


@pytest.mark.slow
def test_the_directory_of_a_run_that_began_training_is_kept(launch, tmp_path):
    run = tmp_path / "begun"
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "no_such"}}
    callbacks = json.dumps([stop])
    status, _, said = launch("fit", "--run_directory", run, "--trainer.callbacks", callbacks)
    assert status == 2 and "trainer.callbacks: Early stopping conditioned on metric `no_such`" in said
    assert {"run.log", "command.txt", "config.yaml", "metrics.csv"} <= set(os.listdir(run))


# -- a launch that goes on in the directory of another one ------------------------------------------------------------


class KilledError(BaseException):
    """Ends a run like a killed process, because nothing handles it."""


CALLBACKS = json.dumps([
    {"class_path": "Transcripts", "init_args": {"every_n_collections": 1}},
    {"class_path": "CollectionCheckpoint", "init_args": {"every_n_collections": 2}},
])  # fmt: skip
LONGER = ("--trainer.max_epochs", "5", "--trainer.callbacks", CALLBACKS)


def rows_of(run):
    """Return the rows of metrics.csv, without columns that depend on time."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row.items() for row in DictReader(file)]
    return [{k: v for k, v in row if v and "per_second" not in k and "minutes" not in k} for row in rows]


def kill_in(monkeypatch, collection):
    collect = VectorEnvRollouts._collect

    def killed(self, trainer, *given):
        if trainer.current_epoch == collection:
            raise KilledError
        collect(self, trainer, *given)

    monkeypatch.setattr(VectorEnvRollouts, "_collect", killed)


@pytest.mark.slow
def test_a_restarted_job_continues_and_loses_no_row(launch, tmp_path, monkeypatch):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert launch("fit", "--run_directory", whole, *LONGER)[0] == 0
    with monkeypatch.context() as patch:
        kill_in(patch, 3)  # the third collection was logged, and is not in the checkpoint
        with pytest.raises(KilledError):
            launch("fit", "--run_directory", run, *LONGER)
    assert len(rows_of(run)) == 6 and torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    status, _, said = launch("fit", "--run_directory", run, *LONGER)
    assert status == 0 and "the job was restarted: resuming" in said
    assert rows_of(run) == rows_of(whole)
    for name in ("transcripts.jsonl", "transcripts.txt"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    assert len((run / "earlier" / "1" / "whole_metrics.csv").read_text().splitlines()) == 7
    assert "ckpt_path: null" in (run / "config.yaml").read_text()
    assert re.search(r"the job was restarted: resuming .*last\.ckpt", (run / "run.log").read_text())
    ended = [torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for path in (run, whole)]
    assert all(torch.equal(weight, ended[1][name]) for name, weight in ended[0].items())


@pytest.mark.slow
def test_a_run_resumed_inside_a_collection_loses_no_transcript(launch, tmp_path, monkeypatch):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert launch("fit", "--run_directory", whole, *LONGER)[0] == 0

    def fail(self, trainer, module):
        if trainer.current_epoch == 1:
            raise ValueError("the run fails here")

    with monkeypatch.context() as patch:
        patch.setattr(CollectionCheckpoint, "on_validation_end", fail)
        status, _, said = launch("fit", "--run_directory", run, *LONGER)
    assert status == 2 and "an error ends the run: wrote" in said
    assert launch("fit", "--run_directory", run, *LONGER, "--ckpt_path", run)[0] == 0
    assert rows_of(run) == rows_of(whole)
    for name in ("transcripts.jsonl", "transcripts.txt"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_a_job_that_is_restarted_before_its_first_checkpoint_begins_again(launch, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_in(patch, 1)
        with pytest.raises(KilledError):
            launch("fit", "--run_directory", run, *LONGER)
    assert not (run / "checkpoints").exists()
    before = rows_of(run)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert launch("fit", "--run_directory", run, *LONGER)[0] == 0
    assert len(rows_of(run)) == 10 and rows_of(run)[: len(before)] == before


@pytest.mark.slow
def test_a_checkpoint_is_resumed_in_its_own_directory_and_in_no_other_that_exists(launch, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    assert launch("fit", "--run_directory", run)[0] == 0
    before = rows_of(run)
    last = run / "checkpoints" / "last.ckpt"
    status, _, said = launch("fit", "--run_directory", other, "--ckpt_path", last)
    assert status == 2 and f"the run of {os.path.relpath(last)} had already reached" in said and not other.exists()
    command = ["fit", "--ckpt_path", last, "--trainer.max_epochs", "2", "--run_directory"]
    assert launch(*command, run)[0] == 0
    assert rows_of(run)[: len(before)] == before and len(rows_of(run)) == 2 * len(before)
    assert "max_epochs: 1\n" in (run / "earlier" / "1" / "config.yaml").read_text()
    assert "max_epochs: 2\n" in (run / "config.yaml").read_text()
    assert "ckpt_path: null\n" in (run / "config.yaml").read_text()  # a run with it is a new one
    files = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    changed = ("--model.init_args.policy.init_args.observation_clip", "2")
    status, _, said = launch(*command, run, *changed)
    assert status == 2 and "model.policy.observation_clip is 2.0, in the checkpoint it was 10.0; resume" in said
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == files
    other.mkdir()
    (other / "notes.txt").touch()
    for words in ((*command, other), (*command, tmp_path), ("validate", *command[1:3], *command[-1:], run)):
        status, _, said = launch(*words)
        assert status == 2 and "not empty; name a new one, or continue the run in it with lrl fit --resume" in said
    assert len(rows_of(run)) == 2 * len(before) and os.listdir(other) == ["notes.txt"]


def test_a_directory_is_used_by_one_process_at_a_time(launch, tmp_path, monkeypatch):
    run, collect, held = tmp_path / "run", VectorEnvRollouts.on_train_epoch_start, []

    def try_to_lock(*given):
        with pytest.raises(BlockingIOError):
            lock_folder(run)
        held.append(True)
        collect(*given)

    monkeypatch.setattr(VectorEnvRollouts, "on_train_epoch_start", try_to_lock)
    assert launch("fit", "--run_directory", run)[0] == 0 and held
    monkeypatch.setattr(VectorEnvRollouts, "on_train_epoch_start", collect)
    files = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "run.log"}
    monkeypatch.setattr(lrl.cli.run_directory, "_PATIENCE", 0.1)
    again = ("--ckpt_path", run / "checkpoints" / "last.ckpt", "--run_directory", run, "--trainer.max_epochs", "2")
    held = lock_folder(run)
    status, _, said = launch("fit", *again)
    unlock_folder(held)
    assert status == 2 and f"run_directory is '{run}', in which another process is training; wait until" in said
    assert {file: file.read_bytes() for file in files} == files and not (run / "earlier").exists()
    assert launch("fit", *again)[0] == 0


@pytest.mark.slow
def test_a_run_ends_well_without_a_configuration_or_metrics_of_its_own(launch, tmp_path):
    run = tmp_path / "run"
    assert launch("fit", "--run_directory", tmp_path / "short", "--trainer.fast_dev_run", "true")[0] == 0
    assert launch("fit", "--run_directory", run)[0] == 0
    again = ("--ckpt_path", run / "checkpoints" / "last.ckpt", "--run_directory", run, "--trainer.max_epochs", "2")
    status, _, said = launch("fit", *again, "--trainer.logger", "false")
    assert status == 0, said
    assert f"resume      lrl fit --resume {run}" in said


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["--trainer.max_epochs", "--data.max_env_steps"])
def test_a_run_is_continued_from_its_own_configuration_in_place_or_beside_it(launch, tmp_path, limit):
    run = tmp_path / "run"
    assert launch("fit", "--run_directory", run, "--trainer.max_epochs", "9", limit, "2")[0] == 0
    before = rows_of(run)
    collections, minutes = len({row["clock/env_steps"] for row in before}), minutes_of(run)
    for option in ("--ckpt_path", "--resume"):
        done = run_words(["lrl", "fit", option, str(run)])
        sentence = f"lrl: nothing was trained: the run of .* had already reached {limit[2:]} = [248]; continue the .*"
        assert done.returncode == 2 and re.fullmatch(sentence, done.stderr.splitlines()[-1])
    assert os.listdir(tmp_path) == ["network.yaml", "run"] and not (run / "earlier").exists()
    assert minutes is not None and minutes_of(run) == minutes  # the run counts as finished
    assert run_words(["lrl", "fit", "--ckpt_path", str(run), limit, "17"]).returncode == 0
    (beside,) = tmp_path.glob("run-resumed-20*")
    assert run_words(["lrl", "fit", "--resume", str(run), limit, "17"]).returncode == 0
    assert rows_of(run) == before + rows_of(beside)
    assert len({row["clock/env_steps"] for row in rows_of(run)}) > collections
    assert run_words(["lrl", "validate", "--ckpt_path", str(beside)]).returncode == 0
    assert len(list(tmp_path.glob("run-validate-20*"))) == 1


def test_results_and_commands_name_what_a_run_has(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("lrl"), "propagate", True)
    caplog.set_level(logging.INFO, logger="lrl")
    names = ("checkpoint", "evaluate", "plot", "compare", "resume")
    run, other = RunDirectory(tmp_path / "a run"), tmp_path / "other"
    not_compared = ("another seed", "same settings", "unfinished", "another env", "other-interrupted-20260101-120000")
    for folder in (run.path, other, *map(tmp_path.joinpath, not_compared)):
        folder.mkdir()
        (folder / "config.yaml").write_text(
            f"seed_everything: {folder.name == 'another seed':d}\n"
            f"data: {{env: {folder.name == 'another env':d}, "
            f"num_envs: {1 if folder == run.path or folder.name == 'same settings' else 2}}}\n"
        )
        if folder.name != "unfinished":
            (folder / "run.log").write_text("INFO finished after 2.00 minutes\n")
        (folder / "metrics.csv").write_text("clock/env_steps,val/return,rollout/return\n8,,3\n16,2,5\n24,1,4\n")
    os.utime(other, (0, 0))  # the other folders are newer
    run.log_results()
    run.log_commands(*names)
    assert caplog.messages == [
        "val/return        best 2 (after 16 env steps), last 1",
        "plot        lrl plot 'a run' --metric val/return --out 'a run/val_return.png'",
        "compare     lrl compare 'a run' --baseline other --metric val/return",
    ]
    caplog.clear()
    (run.path / "metrics.csv").write_text("clock/optimizer_steps,train/loss\n4,0.5\n8,0.25\n12,0.375\n")
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / "last.ckpt").touch()
    run.log_results()
    (run.path / "run.log").write_text("INFO finished after 2.00 minutes\n")
    (run.path / "config.yaml").write_text(
        "{trainer: {max_epochs: 3, max_steps: -1}, data: {init_args: {max_env_steps: 40}}}"
    )
    run.log_commands(*names)
    assert caplog.messages == [
        "train/loss        best 0.25 (after 8 optimizer steps), last 0.375",
        "checkpoint  'a run/checkpoints/last.ckpt'",
        "evaluate    lrl evaluate --checkpoint 'a run'",
        "plot        lrl plot 'a run' --metric train/loss --clock minutes --out 'a run/train_loss.png'",
        "resume      lrl fit --resume 'a run' --trainer.max_epochs 6 --data.max_env_steps 80",
    ]
    caplog.clear()
    (run.path / "checkpoints" / "best.ckpt").touch()
    run.log_commands("checkpoint", "evaluate")
    assert caplog.messages[1] == "evaluate    lrl evaluate --checkpoint 'a run/checkpoints/best.ckpt'"


@pytest.mark.slow
def test_the_commands_at_the_end_of_a_run_can_be_run(launch, tmp_path):
    assert launch("fit", "--run_directory", tmp_path / "earlier", "--model.init_args.ent_coef", "0.1")[0] == 0
    status, _, said = launch("fit", "--run_directory", tmp_path / "run")
    lines = [line.split("  ", 1) for line in said.partition("finished after ")[2].splitlines()[1:]]
    results = [name for name, _ in lines if name.startswith("val/")]
    commands = {name: command.strip() for name, command in lines[len(results) :]}
    assert status == 0 and results == ["val/return", "val/success_rate"]
    assert list(commands) == ["checkpoint", "evaluate", "watch", "plot", "compare", "resume"]
    assert os.path.exists(commands.pop("checkpoint")) and commands["resume"].endswith("--trainer.max_epochs 2")
    for command in commands.values():
        assert run_command(command).returncode == 0, command
    assert (tmp_path / "run" / "val_return.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_the_command_that_resumes_it(launch, tmp_path, monkeypatch, number):
    collect = VectorEnvRollouts._collect

    def sending(self, trainer, *given):
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), number)
        collect(self, trainer, *given)

    with monkeypatch.context() as patch:
        patch.setattr(VectorEnvRollouts, "_collect", sending)
        status, _, said = launch("fit", "--run_directory", tmp_path / "run", "--trainer.max_epochs", "3")
    assert status == 128 + number and "Traceback" not in said
    command = said.splitlines()[-1]
    assert command == f"resume      lrl fit --resume {tmp_path / 'run'}"
    assert run_command(command.removeprefix("resume")).returncode == 0
    assert len({row["clock/env_steps"] for row in rows_of(tmp_path / "run")}) == 3


@pytest.fixture
def create(tmp_path, monkeypatch):
    """Create the default run directory of a launch in a Slurm job; return its name."""
    monkeypatch.chdir(tmp_path)
    for name in ("RESTART_COUNT", "STEP_ID", "STEP_NUM_TASKS", "NTASKS", "PROCID"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def make(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LRL_RUN_DIRECTORY", "")
        monkeypatch.delenv("LRL_RUN_DIRECTORY")
        return RunDirectory.create(None, "frozen_lake/grpo", 0).path.name

    return make


def test_each_launch_in_an_allocation_has_a_directory_which_a_restart_finds_again(create):
    assert [create(), create()] == ["job7-seed0", "job7-seed0-2"]
    for count in ("1", "2"):
        launches = [create(SLURM_RESTART_COUNT=count) for _ in range(3)]
        assert launches == ["job7-seed0", "job7-seed0-2", "job7-seed0-3"]


def test_ranks_that_are_started_together_find_the_same_directory(create):
    ranks = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert create(**ranks, SLURM_PROCID="0") == create(SLURM_PROCID="1") == "job7.0-seed0"
    assert create(SLURM_STEP_ID="1", SLURM_PROCID="0") == create(SLURM_PROCID="1") == "job7.1-seed0"
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "SLURM_PROCID": "0", "LOCAL_RANK": "0"}  # on two nodes
    assert create(**torchrun, RANK="0") == create(RANK="1") == "job7.1.a-seed0"


def test_a_restart_continues_from_the_newest_readable_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    names = (folder / "last.ckpt", tmp_path / "hpc_ckpt_1.ckpt", tmp_path / "hpc_ckpt_2.ckpt")
    for age, path in enumerate(names):
        torch.save({"lrl": {}}, path)
        os.utime(path, (age, age))
    run = RunDirectory(tmp_path)
    assert run.restart_from() is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run.restart_from() == names[2]
    names[2].write_bytes(b"half")
    assert run.restart_from() == names[1]
    os.utime(names[0], (9, 9))
    assert run.restart_from() == names[0]


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


def test_a_failed_launch_leaves_no_line_in_the_log_of_the_run_that_it_continues(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    (tmp_path / "command.txt").write_text("lrl fit\n")
    (tmp_path / "run.log").write_text("2026-01-01 INFO run directory x\n2026-01-01 INFO finished after 1.00 minutes\n")
    before = (tmp_path / "run.log").read_bytes()
    monkeypatch.setenv("LRL_RUN_DIRECTORY", "")  # so that it is restored
    monkeypatch.delenv("LRL_RUN_DIRECTORY")
    run = RunDirectory.create(str(tmp_path), "", 0, resumed=str(checkpoint))
    rank = RunDirectory.create(str(tmp_path), "", 0, resumed=str(checkpoint))  # finds the variable of the first rank
    logging.getLogger("lrl").info("a line")
    rank.discard()
    assert minutes_of(tmp_path) is None
    run.discard()
    logging.getLogger("lrl").info("another line")
    run.close()
    assert (tmp_path / "run.log").read_bytes() == before and minutes_of(tmp_path) == 1


def test_files_of_an_earlier_launch_are_not_overwritten_if_others_were_deleted(tmp_path):
    (tmp_path / "earlier" / "2").mkdir(parents=True)
    assert _unused(tmp_path) == tmp_path / "earlier" / "3"
    assert _unused(tmp_path / "new") == tmp_path / "new" / "earlier" / "1"


def test_a_directory_that_cannot_be_written_to_is_named_in_a_sentence(launch, tmp_path):
    (tmp_path / "file").touch()
    status, _, said = launch("fit", "--run_directory", tmp_path / "file" / "run")
    assert status == 2 and "Traceback" not in said
    assert said.startswith("lrl: run_directory is '") and "which cannot be written to (Not a directory)" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_a_full_disk_does_not_print_a_traceback_for_every_line_of_the_log(tmp_path, capsys):
    (tmp_path / "run.log").symlink_to("/dev/full")
    logs = [logging.getLogger(name) for name in ("lrl", "py.warnings")]
    RunDirectory(tmp_path, ())._begin(quiet=True)
    try:
        logs[0].warning("one line")
    finally:
        for log in logs:
            for handler in [*log.handlers]:
                handler.stream = None  # nothing is left to be flushed at exit
                log.removeHandler(handler)  # it would open the file again in later tests
    os.environ.pop("LRL_RUN_DIRECTORY")
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_validate_prints_the_table_and_warns_that_nothing_was_loaded(launch, tmp_path):
    status, printed, said = launch("validate", "--run_directory", tmp_path / "run")
    assert status == 0 and "no --ckpt_path: validate evaluates the untrained policy" in said
    assert all(word in printed for word in ("policy before training in CartPole-v1", "return", "seeds 10000 to 10001"))
