"""Tests of ``lrl sweep``: combinations of values, their checks, and the table of results."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import run_command, run_words

import lrl.cli.run_seeds as seeds
import lrl.cli.sweep as sweeps
from lrl.cli.run_seeds import first_error
from lrl.cli.sweep import parsed_settings
from lrl.evaluation.statistics import headline_seed

LR = "model.init_args.optimizer.lr"
SIZES = "model.init_args.policy.init_args.hidden_sizes"


def sweep(*words):
    return run_words(["lrl", "sweep", "--config", "cartpole/ppo_mlp.yaml", *map(str, words)])


@pytest.fixture
def started(monkeypatch):
    """Arguments of the runs that are started; each writes what a run of ``lrl fit`` writes, and none is checked."""
    commands, start = [], subprocess.run

    def fit(command, **settings):
        if command[0] != sys.executable:
            return start(command, **settings)
        commands.append(command[3:])
        options = dict(option.removeprefix("--").split("=", 1) for option in command if re.match("--[^=]+=", option))
        lr, run = options.get(LR, "0"), Path(command[command.index("--run_directory") + 1])
        if lr == "7":
            return subprocess.CompletedProcess(command, 2, stderr="noise\nlrl: a sentence.\n")
        run.mkdir(parents=True, exist_ok=True)
        seed = int(command[command.index("--seed_everything") + 1])
        config = {"seed_everything": seed, "model": {"init_args": {"optimizer": {"lr": float(lr)}}}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "command.txt").write_text(shlex.join(["lrl", *command[3:]]) + "\n")
        (run / "run.log").write_text("finished after 1.50 minutes")
        (run / "metrics.csv").write_text(f"val/return\n9\n{float(lr) + (seed == headline_seed(1))}\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(seeds.subprocess, "run", fit)
    monkeypatch.setattr(sweeps, "_check", lambda *_: None)
    return commands


def test_every_combination_is_trained_once_with_every_seed_and_makes_one_table(started, tmp_path):
    words = ["--set", f"{LR}=2,4", "--seeds", "2", "--folder", tmp_path, "--trainer.max_epochs", "3"]
    done = sweep(*words)
    assert done.returncode == 0, done.stderr
    places = [f"{LR.rpartition('.')[2]}={lr}/seed{headline_seed(index)}" for index in range(2) for lr in (2, 4)]
    assert [command[-1] for command in started] == [str(tmp_path / place) for place in places]
    assert all(command[3:5] == ["--trainer.max_epochs", "3"] for command in started)
    assert done.stderr.splitlines()[0] == f"[1/4] {places[0]}: val/return 2, best 9, 1.50 minutes"
    assert done.stdout.splitlines() == [
        "| lr | seeds | last val/return | best | minutes |",
        "|---|---|---|---|---|",
        "| 2.0 | 2 | 2.500 (2.000, 3.000) | 9.000 (9.000, 9.000) | 1.5 |",
        "| 4.0 | 2 | 4.500 (4.000, 5.000) | 9.000 (9.000, 9.000) | 1.5 |",
    ]
    again = sweep(*words)
    assert len(started) == 4 and again.stdout == done.stdout and "4 of 4 runs have finished before" in again.stderr
    more = sweep("--set", f"{LR}=2,4,5", *words[2:])
    assert len(started) == 6 and "| 5.0 | 2 |" in more.stdout


def test_settings_are_multiplied_and_lists_are_one_value(started, tmp_path):
    done = sweep("--set", f"{LR}=2,4", "--set", f"{SIZES}=[64, 64],[256]", "--folder", tmp_path, "--seeds", 1)
    assert done.returncode == 0, done.stderr
    folders = [f"lr={lr},hidden_sizes={sizes}" for lr in (2, 4) for sizes in ("64-64", "256")]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == sorted(folders)
    assert [f"--{LR}=2", f"--{SIZES}=[64, 64]"] == started[0][3:5]


def test_a_failure_is_reported_below_the_table_of_the_other_runs(started, tmp_path):
    done = sweep("--set", f"{LR}=7,4", "--seeds", 1, "--folder", tmp_path)
    assert done.returncode == 2 and len(started) == 2 and "| 1 | 4.000 |" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == f"[1/2] lr=7/seed{headline_seed(0)}: lrl: a sentence."
    assert lines[-1] == "lrl sweep: 1 of 2 runs failed; the first error is: lrl: a sentence."


def test_if_all_runs_fail_their_error_is_reported_and_no_table(started, tmp_path, monkeypatch):
    fit = seeds.subprocess.run

    def failing(command, **settings):
        if command[0] == sys.executable:
            run = Path(command[command.index("--run_directory") + 1])
            run.mkdir(parents=True)
            (run / "config.yaml").write_text("{}")
        return fit(command, **settings)

    monkeypatch.setattr(seeds.subprocess, "run", failing)
    done = sweep("--set", f"{LR}=7", "--seeds", 1, "--folder", tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1] == "lrl sweep: 1 of 1 runs failed; the first error is: lrl: a sentence."


def test_without_settings_it_is_run_seeds_in_a_folder_named_after_the_experiment(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sweep("--seeds", 1, "--config", "overlays/bf16.yaml").returncode == 0
    configs = ["--config", "cartpole/ppo_mlp.yaml", "--config", "overlays/bf16.yaml"]
    run = f"runs/cartpole/ppo_mlp-sweep/seed{headline_seed(0)}"
    assert started == [["fit", *configs, "--seed_everything", str(headline_seed(0)), "--run_directory", run]]


def test_an_interrupted_sweep_starts_no_further_run(started, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(seeds, "_say", stop)
    assert sweep("--set", f"{LR}=1,2,3,4,5,6,8,9", "--folder", tmp_path).returncode == 130
    assert len(started) < 24


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ("2e-4,1e-3", ["2e-4", "1e-3"]),
        ("[64,64],[32]", ["[64,64]", "[32]"]),
        ("{a: [1, 2], b: 3},null", ["{a: [1, 2], b: 3}", "null"]),
        ("'a, b',don't,\"c\"", ["a, b", "don't", "c"]),
        ("['a]', b]", ["['a]', b]"]),
    ],
)
def test_values_are_separated_by_commas_outside_brackets_and_quotes(values, found):
    assert parsed_settings([f"key={values}"]) == {"key": found}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([LR], "--set is 'model.init_args.optimizer.lr'; it must be KEY=VALUE,VALUE"),
        ([f"{LR}=1,"], "with all brackets and quotes closed."),
        ([f"{SIZES}=[1,2"], "with all brackets and quotes closed."),
        ([f"{LR}=1,1"], "in which 1 is given twice; give it once."),
        ([f"{LR}=1", f"{LR}=2"], f"in which {LR} is given twice; give it once."),
        (["seed_everything=1,2"], "but the command itself sets seed_everything; it must be another key."),
        ([f"{LR}r=1"], "model.init_args.optimizer.lrr is not an argument of OptimizerConfig; did you mean 'lr'?"),
    ],
)
def test_a_wrong_setting_is_one_sentence_before_any_run(words, sentence, tmp_path):
    done = sweep(*(part for word in words for part in ("--set", word)), "--folder", tmp_path / "new")
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_values_of_a_wrong_type_are_found_by_the_parser():
    command = ["fit", "--config", "cartpole/ppo_mlp.yaml"]
    assert first_error([command, [*command, f"--{LR}=2e-4", f"--{SIZES}=[8,8]"]]) == ""
    assert (
        first_error([command, [*command, f"--{LR}=abc"]])
        == "model.optimizer.lr is 'abc'; it must be a number that is positive."
    )


def test_a_job_array_has_one_task_for_each_run_that_has_not_finished(started, tmp_path):
    words = ["--seeds", 2, "--folder", tmp_path, "--set"]
    sweep(*words, f"{LR}=2")
    done = sweep(*words, f"{LR}=2,4", "--slurm")
    assert len(started) == 2 and "#SBATCH --array=0-1\n" in done.stdout
    script = "srun() { printf '%s\n' \"${@:2}\"; }\n" + done.stdout
    shell = {"input": script, "capture_output": True, "text": True, "check": True}
    tasks = [subprocess.run(["bash"], env={"SLURM_ARRAY_TASK_ID": str(task)}, **shell).stdout for task in range(2)]
    assert [f"--{LR}=4\n" in task and task.startswith("-m\nlrl\nfit\n") for task in tasks] == [True, True]
    assert [task.splitlines()[-1] for task in tasks] == [
        str(tmp_path / "lr=4" / f"seed{headline_seed(index)}") for index in range(2)
    ]
    assert "all runs have finished" in sweep(*words, f"{LR}=2", "--slurm").stderr


@pytest.mark.slow
def test_the_documented_sweep_runs(tmp_path, monkeypatch):
    (command,) = re.findall(r"^lrl sweep .*$", Path("docs/guides/runs.md").read_text(encoding="utf-8"), re.MULTILINE)
    shorter = "--trainer.max_epochs 1 --trainer.check_val_every_n_epoch 1 --data.validation.episodes 2 --seeds 1"

    start = subprocess.run

    def run(words, **settings):
        if words[0] != sys.executable:
            return start(words, **settings)
        done = run_words(["python", *words[1:]])
        return subprocess.CompletedProcess(words, done.returncode, stderr=done.stderr)

    monkeypatch.setattr(seeds.subprocess, "run", run)  # in this process, because another would import torch again
    monkeypatch.setattr(sweeps, "_check", lambda config, options, settings: None)
    done = run_command(f"{command} {shorter} --folder {tmp_path} --jobs 1")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[0].startswith("| lr | seeds | last val/return |") and len(rows) == 4
