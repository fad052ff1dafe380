"""Short runs of the command line, with models of random weights."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import folder

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "frozen_lake/grpo_gemma": "llama-3.2-1b",
    "babyai/ppo_llama3b": "llama-3.2-3b",
    "half_cheetah/grpo_qwen": "llama-3.2-3b",
    "half_cheetah/sft_smollm2_1.7b": "llama-3.2-1b",
    "half_cheetah/trpo_gpt2": "smollm2-135m",
}
"""Configurations that need a GPU, with the model that replaces theirs."""
NAME = "--model.init_args.policy.init_args.language_model.name"


def config_run(device: str, name: str, model: str) -> dict[str, Any]:
    """Run a configuration with random weights and, where it reads a data set, episodes of random actions."""
    words = ["--config", f"configs/{name}.yaml", NAME, folder(model, device)]
    data_sets = {"grpo_qwen": ["medium"], "sft_smollm2_1.7b": ["quarters", "expert"]}
    for data_set in data_sets.get(Path(name).name, ()):
        collect = ["collect", "--policy", "random", "--env_id", "HalfCheetah-v5", "--episodes", "4"]
        collected = command([*collect, "--dataset_id", f"lrl/half_cheetah/{data_set}-v0"])
        if collected["exit_status"] and "exists" not in str(collected["error"]):
            return collected
    if "sft" in name:
        words += ["--trainer.callbacks", '[{"class_path": "ConsoleProgress"}]']  # early stopping needs the validation
        words += ["--data.init_args.demonstrations.init_args.num_rows", "200"]
        words += ["--data.init_args.validation_demonstrations.init_args.num_rows", "100"]
    if "trpo" in name:
        words += ["--data.init_args.num_steps", "20"]
    return fit(device, words)


def fit(device: str, words: Sequence[str]) -> dict[str, Any]:
    """Run ``lrl fit`` for two collections or passes without validation; see :func:`command`."""
    accelerator = "gpu" if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as place:
        settings = {
            "--trainer.accelerator": accelerator,
            "--trainer.devices": "1",
            "--trainer.max_epochs": "2",
            "--trainer.limit_val_batches": "0",
            "--run_directory": f"{place}/run",
        }
        return command(["fit", *words, *(word for pair in settings.items() for word in pair)])


def command(words: Sequence[str]) -> dict[str, Any]:
    """Run a command of lrl, and return its exit status, seconds and, if it failed, its last lines.

    The exit status is that of a killed process if the command takes longer than four minutes.
    """
    data_sets = Path(tempfile.gettempdir(), "lrl-benchmark-data-sets")
    environment = os.environ | {"MINARI_DATASETS_PATH": str(data_sets), "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lrl", *words], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    found = {"command": " ".join(words), "exit_status": process.returncode, "seconds": time.monotonic() - started}
    return found | ({"error": ending(text)} if process.returncode else {})


def ending(text: str) -> list[str]:
    """Return the last lines of a text."""
    return [line[:400] for line in text.strip().splitlines()[-12:]]
