"""The rule that headline seeds are drawn by, and the runs that are made of it."""

import subprocess

import pytest

from lrl.evaluation import seeds
from lrl.evaluation.seeds import headline_seed, run_seeds


def test_headline_seeds_are_the_first_bits_of_a_hash():
    assert headline_seed(0) == int("eaf6d797", 16)
    assert len({headline_seed(index) for index in range(40)}) == 40


def test_finished_runs_are_left_alone_and_broken_ones_started_again(tmp_path, monkeypatch):
    started = []

    def fit(command, **settings):
        assert settings["env"]["OMP_NUM_THREADS"] == "1"
        started.append(command[command.index("--seed_everything") + 1])
        return subprocess.CompletedProcess(command, returncode=int(started[-1] == str(headline_seed(2))))

    monkeypatch.setattr(seeds.subprocess, "run", fit)
    for index, line in enumerate(("finished after 1.00 minutes", "a first line")):
        folder = tmp_path / f"seed{headline_seed(index)}"
        folder.mkdir()
        (folder / "run.log").write_text(line)
    with pytest.raises(ValueError, match="1 of 3 runs failed"):
        run_seeds("some.yaml", 3, tmp_path)
    assert started == [str(headline_seed(1)), str(headline_seed(2))]


@pytest.mark.parametrize("setting", ["count", "jobs"])
def test_counts_below_one_are_refused(tmp_path, setting):
    with pytest.raises(ValueError, match=f"--{setting} is 0; it must be at least 1"):
        run_seeds("some.yaml", **({"count": 1} | {setting: 0}), folder=tmp_path)
