"""Tests of ``scripts/benchmark.py gpu``, on the CPU with a model of a few thousand weights."""

import json
import time

import pytest
from benchmarks import gpu, runs
from commands import run_words, shorten

from lrl.cli.main import LRLCLI

COMMAND = "python scripts/benchmark.py gpu --device cpu --models tiny --repeats 1 --json"


@pytest.mark.slow
def test_each_measurement_is_taken_once(tmp_path):
    command = f"{COMMAND} {tmp_path} --parts decode grpo sft parity memory"
    done = run_words(command.split())
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "benchmark_gpu.json").read_text())["items"]
    assert not [name for name, found in first.items() if "error" in found]
    assert {name.partition("/")[0] for name in first} == {"decode", "grpo", "sft", "parity", "memory"}
    for name, found in first.items():
        if name.startswith("parity"):
            assert found["tokens"] == 32 and found["max_ratio_recomputed"] == pytest.approx(1, abs=1e-6), name
        if name.startswith("decode"):
            assert found["comparison"]["all_tokens_sampled"] and 0 < found["comparison"]["roofline_ours"] < 1
        if name.startswith("grpo"):
            assert "comparison" in found or found["completions_per_second"][0] > 0  # without TRL, lrl alone
    done = run_words(command.split())
    assert done.returncode == 0 and "---" not in done.stdout
    assert json.loads((tmp_path / "benchmark_gpu.json").read_text())["items"] == first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen_lake/grpo_gemma", "half_cheetah/sft_smollm2_1.7b"])
def test_a_configuration_for_a_gpu_runs_with_the_model_that_replaces_its_own(name, tmp_path, monkeypatch):
    commands = []

    def command(words):
        few = ["--max_episode_steps", "100"] if words[0] == "collect" else ["--trainer.limit_train_batches", "2"]
        done = run_words(["lrl", *words, *few], MINARI_DATASETS_PATH=str(tmp_path))
        commands.append(words[0])
        return {"exit_status": done.returncode, "error": done.stderr}

    make = LRLCLI.instantiate_classes
    monkeypatch.setattr(LRLCLI, "instantiate_classes", lambda cli: (make(cli), shorten(cli)))
    monkeypatch.setattr(runs, "command", command)
    found = runs.config_run("cpu", name, "tiny")
    assert found["exit_status"] == 0, found["error"]
    assert commands[-1] == "fit"


@pytest.mark.slow
def test_a_failed_measurement_is_kept_with_its_error():
    found = gpu.measured(lambda: {"share": 1 / 0}, 10)
    assert found["error"][-1] == "ZeroDivisionError: division by zero" and found["out_of_time"] == 0


@pytest.mark.slow
def test_a_measurement_ends_at_its_time_limit_although_it_handles_errors():
    found = gpu.measured(lambda: gpu.tried({}, "error", time.sleep, 20) or {}, 0)
    assert found["out_of_time"] == 1 and found["measured_in_seconds"] < 10
