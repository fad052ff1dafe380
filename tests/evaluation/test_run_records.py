"""Records of runs: what damaged files of one run change for another one."""

from importlib import import_module

import pytest
import yaml

from lrl.evaluation.run_records import commands_of
from lrl.evaluation.run_report import read_run

DAMAGED = {
    "config.yaml": [
        "{[",
        "trainer:",
        "trainer: []",
        "model: {init_args: null}",
        "data: {init_args: [1]}",
        "model: 3",
        "",
    ],
    "metrics.csv": ["", f"{'9' * 200_000},val/return\n8,1\n"],
    "run.log": ["finished after", " INFO run directory 1 INFO run directory 2 finished after 2.00 minutes"],
}
"""Texts that replace a file, or follow the seed and the environment in config.yaml."""


@pytest.mark.parametrize("env", [{"id": "CartPole-v1"}, None])
@pytest.mark.parametrize(("name", "text"), [(name, text) for name in DAMAGED for text in DAMAGED[name]])
def test_a_damaged_run_does_not_change_the_commands_of_the_run_beside_it(name, text, env, tmp_path):
    for lr, run in enumerate((tmp_path / "run", tmp_path / "damaged")):
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / "last.ckpt").touch()
        data = {} if env is None else {"data": {"env": env}}
        (run / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 7, "lr": lr, **data}))
        (run / "metrics.csv").write_text("clock/env_steps,val/return\n8,1\n")
        (run / "run.log").write_text(" INFO run directory run\n INFO finished after 2.00 minutes\n")
    names = ("evaluate", "compare", "resume")
    assert list(commands_of(tmp_path / "run", names)) == list(names)
    (tmp_path / "damaged" / name).write_text(f"seed_everything: 7\n{text}" if name == "config.yaml" else text)
    if text or name != "config.yaml":  # a configuration with a seed alone is whole
        assert list(commands_of(tmp_path / "run", names)) == ["evaluate", "resume"]
    assert list(commands_of(tmp_path / "damaged", ("evaluate",))) == ["evaluate"]
    read_run(tmp_path / "damaged")


@pytest.fixture
def evaluated(tmp_path):
    """Return two training runs of each of two settings, and the folder of an evaluation beside each."""
    for lr in (1, 2):
        for seed in (3, 4):
            for name, command in ((f"seed{seed}", "lrl fit"), (f"seed{seed}-validate-20260101-120000", "lrl validate")):
                run = tmp_path / f"lr={lr}" / name
                run.mkdir(parents=True)
                (run / "command.txt").write_text(f"{command} --config x.yaml\n")
                (run / "config.yaml").write_text(yaml.safe_dump({"seed_everything": seed, "lr": lr}))
                (run / "metrics.csv").write_text(
                    f"step,clock/env_steps,val/return\n0,8,{seed * lr}\n0,16,{seed * lr}\n"
                )
                (run / "run.log").write_text(" INFO run directory run\n INFO finished after 2.00 minutes\n")
    return tmp_path


@pytest.mark.parametrize("command", ["compare", "report", "plot", "table"])
def test_evaluations_beside_training_runs_are_left_out(command, evaluated, capsys, monkeypatch):
    def said(ours, theirs):
        options = {
            "compare": [*ours, "--baseline", *theirs, "--metric", "val/return"],
            "report": [*ours, "--baseline", *theirs, "--out", str(evaluated / "report.html")],
            "plot": [*ours, *theirs, "--metric", "val/return", "--out", str(evaluated / "curves.png")],
            "table": [*ours, *theirs],
        }[command]
        monkeypatch.setattr("sys.argv", ["lrl", command, *options])
        import_module(f"lrl.cli.{command}").main("lrl", options)
        written = [path.read_bytes() for path in evaluated.iterdir() if path.is_file()]
        return capsys.readouterr().out, written

    mixed = said(*([str(run) for run in sorted((evaluated / f"lr={lr}").iterdir())] for lr in (1, 2)))
    training = said(*([str(evaluated / f"lr={lr}" / f"seed{seed}") for seed in (3, 4)] for lr in (1, 2)))
    assert mixed == training


def test_the_evaluation_of_a_run_samples_as_its_validation(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    data = {"class_path": "RolloutDataModule", "init_args": {"validation": {"temperature": 0.5}}}
    for temperature, option in ((0.5, " --temperature 0.5"), (0.0, "")):
        data["init_args"]["validation"]["temperature"] = temperature
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
        command = commands_of(tmp_path, ("evaluate",))["evaluate"]
        assert command == f"lrl evaluate --checkpoint {tmp_path}{option}"
