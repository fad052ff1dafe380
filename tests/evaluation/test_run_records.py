"""Records of runs: what damaged files of one run change for another one."""

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
