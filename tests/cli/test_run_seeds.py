"""Headline seeds follow from a rule, and runs are made with them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import lrl.cli.run_seeds as seeds
from lrl.cli.run_seeds import PLAN, main, run_seeds
from lrl.evaluation.statistics import headline_seed
from lrl.files import is_replaced


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Configurations that do not exist are not checked."""
    monkeypatch.setattr(seeds, "check_commands", lambda _: None)


def test_a_misspelt_key_is_an_error_before_any_run_starts(tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match="trainer.max_epoch is not an argument of Trainer; did you mean 'max_epochs'"):
        run_seeds("--trainer.max_epoch", "3", config=("cartpole/ppo_mlp.yaml",), folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_headline_seeds_are_the_first_bits_of_a_hash():
    assert headline_seed(0) == int("eaf6d797", 16)
    assert len({headline_seed(index) for index in range(40)}) == 40


def finished(folder, index, config="some.yaml", log="finished after 1.00 minutes"):
    """Return the directory of a finished run."""
    seed = headline_seed(index)
    run = folder / f"seed{seed}"
    run.mkdir()
    (run / "command.txt").write_text(f"lrl fit --config {config} --seed_everything {seed} --run_directory {run}\n")
    (run / "run.log").write_text(log)
    return run


def test_finished_runs_are_skipped_and_a_failure_is_reported(tmp_path, monkeypatch):
    started = []

    def fit(command, **settings):
        assert settings["env"]["OMP_NUM_THREADS"] == "1"
        started.append(command[command.index("--seed_everything") + 1])
        code = int(started[-1] == str(headline_seed(2)))
        return subprocess.CompletedProcess(command, code, stderr="noise\nlrl: a sentence.\n")

    monkeypatch.setattr(seeds.subprocess, "run", fit)
    finished(tmp_path, 0)
    with pytest.raises(ValueError, match=r"1 of 3 runs failed; the first error is: lrl: a sentence\."):
        run_seeds(config=("some.yaml",), folder=tmp_path, count=3)
    assert started == [str(headline_seed(1)), str(headline_seed(2))]


def test_each_run_starts_from_the_run_of_its_own_seed(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        seeds.subprocess, "run", lambda command, **_: started.append(command) or subprocess.CompletedProcess(command, 0)
    )
    options = ["--model.init_from", "runs/weak/seed{seed}", "--rewards", "[{}]"]
    run_seeds(*options, config=("some.yaml",), folder=tmp_path, count=2)
    for index, command in enumerate(started):
        assert command[command.index("--model.init_from") + 1] == f"runs/weak/seed{headline_seed(index)}"
        assert command[command.index("--rewards") + 1] == "[{}]"
        run = tmp_path / f"seed{headline_seed(index)}"
        run.mkdir()
        (run / "command.txt").write_text(shlex.join(["lrl", *command[3:]]) + "\n")
        (run / "run.log").write_text("finished after 1.00 minutes")
    monkeypatch.chdir(tmp_path.parent)
    for config, folder in (("some.yaml", tmp_path), (str(tmp_path.parent / "some.yaml"), Path(tmp_path.name))):
        run_seeds(*options, config=(config,), folder=folder, count=2)
    assert len(started) == 2


@pytest.mark.parametrize(
    ("config", "file", "sentence"),
    [
        (
            "other.yaml",
            "metrics.csv",
            r"another command \(with --config \S+/other.yaml and without --config \S+/some.yaml\); remove it or use",
        ),
        (
            "some.yaml",
            "checkpoints/best.ckpt",
            "that has checkpoints/best.ckpt but no last.ckpt to resume from; remove",
        ),
        ("some.yaml", "checkpoints/.last.ckpt.old", r"that has checkpoints/\.last\.ckpt\.old but no last.ckpt"),
        ("some.yaml", "earlier/command.txt", "that has earlier but no last.ckpt"),
        ("some.yaml", "proposals.jsonl", "that has proposals.jsonl but no last.ckpt"),
    ],
)
def test_other_runs_and_results_that_cannot_be_resumed_raise_and_are_not_removed(tmp_path, config, file, sentence):
    early = finished(tmp_path, 0, log="collection 1/45")
    run = finished(tmp_path, 1, config, log="collection 3/45")
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).touch()
    with pytest.raises(ValueError, match=sentence):
        run_seeds(config=("some.yaml",), folder=tmp_path, count=2)
    assert (run / file).exists() and (run / "run.log").exists() and early.exists()


@pytest.mark.parametrize(
    ("former", "now", "said"),
    [
        ("lrl fit --x 1 --y 2 --run_directory a", ["fit", "--x", "1", "--run_directory", "a"], " (with --y 2)"),
        ("lrl fit --x=1", ["fit", "--x", "1", "--z", "[3, 4]"], " (without --z '[3, 4]')"),
        ("lrl fit --y 2 --x 1 --ckpt_path a", ["fit", "--x", "1", "--y", "2"], ""),
        ("", ["fit", "--x", "1"], ""),
    ],
)
def test_the_difference_of_two_commands(former, now, said):
    assert seeds._difference(former, now) == said


def test_a_run_without_a_checkpoint_is_started_again_and_its_files_are_kept(tmp_path, monkeypatch, caplog):
    started, run = [], finished(tmp_path, 0, log="collection 3/45")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / ".last.ckpt.draft").touch()
    (run / "transcripts.jsonl").write_text("an episode")
    kept = {file.relative_to(run): file.read_bytes() for file in run.rglob("*") if file.is_file()}

    def fit(command, **_):
        assert not run.exists()  # otherwise lrl fit raises, because it is not empty
        started.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(seeds.subprocess, "run", fit)
    run_seeds(config=("some.yaml",), folder=tmp_path, count=1)
    assert [command[-2:] for command in started] == [["--run_directory", str(run)]]
    (former,) = tmp_path.glob("seed*")
    assert (tmp_path / PLAN).read_text() == f"{run.name}\n"
    assert re.fullmatch(rf"{run.name}-interrupted-\d{{8}}-\d{{6}}", former.name) and is_replaced(former)
    assert {file.relative_to(former): file.read_bytes() for file in former.rglob("*") if file.is_file()} == kept
    assert caplog.messages == [
        f"{run} was interrupted before its first checkpoint: starting it again; the former directory is now {former}."
    ]


def test_interrupted_runs_are_resumed_as_often_as_needed(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        seeds.subprocess, "run", lambda command, **_: started.append(command) or subprocess.CompletedProcess(command, 0)
    )
    run = finished(tmp_path, 0, log="collection 3/45")
    checkpoint = run / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    for times in (1, 2):
        run_seeds(config=("some.yaml",), folder=tmp_path, count=1)
        assert len(started) == times and started[-1][-4:] == [
            "--run_directory",
            str(run),
            "--ckpt_path",
            str(checkpoint),
        ]
        (run / "command.txt").write_text(shlex.join(["lrl", *started[-1][3:]]) + "\n")
    (run / "run.log").write_text("finished after 1.00 minutes")
    run_seeds(config=("some.yaml",), folder=tmp_path, count=1)
    assert len(started) == 2


def test_a_run_that_a_user_resumed_is_one_of_the_command_that_began_it(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        seeds.subprocess, "run", lambda command, **_: started.append(command) or subprocess.CompletedProcess(command, 0)
    )
    run = finished(tmp_path, 0, log="collection 3/45")
    for file in ("checkpoints/last.ckpt", "earlier/1/command.txt", "earlier/2/command.txt", "earlier/10/command.txt"):
        (run / file).parent.mkdir(exist_ok=True, parents=True)
        (run / file).write_text(f"lrl fit --resume {run}\n")
    (run / "command.txt").replace(run / "earlier" / "1" / "command.txt")
    (run / "command.txt").write_text(f"lrl fit --resume {run}\n")
    run_seeds(config=("some.yaml",), folder=tmp_path, count=1)
    assert [command[-2:] for command in started] == [["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]]
    with pytest.raises(ValueError, match="was made by another command"):
        run_seeds(config=("other.yaml",), folder=tmp_path, count=1)


def test_two_commands_cannot_use_one_folder_at_a_time(tmp_path, monkeypatch):
    def fit(command, **_):
        with pytest.raises(ValueError, match="in which another run_seeds is running; use another folder"):
            run_seeds(config=("some.yaml",), folder=tmp_path, count=1)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(seeds.subprocess, "run", fit)
    run_seeds(config=("some.yaml",), folder=tmp_path, count=1)
    monkeypatch.setattr(seeds.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))
    run_seeds(config=("some.yaml",), folder=tmp_path, count=1)


@pytest.mark.parametrize("setting", ["count", "jobs"])
def test_counts_below_one_raise(tmp_path, setting, capsys):
    with pytest.raises(SystemExit):
        main("lrl run_seeds", ["--config", "some.yaml", "--folder", str(tmp_path), f"--{setting}", "0"])
    assert capsys.readouterr().err == f"lrl run_seeds: --{setting} is 0; it must be at least 1.\n"
