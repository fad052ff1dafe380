"""Memory and time until the first line of each configuration for a CPU, and short runs of other commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
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
FIRST_LINE = re.compile(r"(collection|batch|epoch|proposal|pass) \d+")
"""Beginning of a line about the progress of a run."""
LIMIT = 30.0
"""CPU seconds after which a run without such a line is stopped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="*/*", help="pattern of configurations, such as frozen_lake/*")
    parser.add_argument("--skip", default="", help="pattern of configurations that are left out, such as *smollm2*")


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each configuration for a CPU, one at a time, and yield the report after each of them.

    The data sets are those of ``MINARI_DATASETS_PATH``. A run in the file of ``--json`` is not repeated.
    """
    kept = json.loads(options.json.read_text())["configurations"] if options.json and options.json.exists() else []
    found = {run["config"]: run for run in kept if "error" not in run}
    for config in sorted((ROOT / "configs").glob(f"{options.only}.yaml")):
        name, head = str(config.relative_to(ROOT / "configs")), config.read_text().partition("\nmodel:")[0]
        if (
            config.parent.name == "overlays"
            or fnmatch(name, f"{options.skip}.yaml")
            or re.search("one GPU|--trainer.accelerator gpu", head)
        ):
            continue
        if name not in found:
            found[name] = {"config": name, **first_line(config)}
            print(found[name], flush=True)
        yield {"title": "Memory and time until the first line", "configurations": [found[one] for one in sorted(found)]}


def first_line(config: Path) -> dict[str, Any]:
    """Train with a configuration, with initial instead of earlier weights, and stop the run at its first line.

    Returns:
        The line about progress (None after :data:`LIMIT` CPU seconds without one), wall and CPU seconds until then, and
        the peak resident memory in GB, of the run and the processes of its environments; for a run that failed, its
        last output.
    """
    settings: dict[str, str] = {}
    arguments = yaml.safe_load(config.read_text())["model"]["init_args"]
    if "init_from" in arguments:
        settings["--model.init_args.init_from"] = "null"
    if arguments.get("policy", {}).get("init_args", {}).get("language_model", {}).get("name", "").startswith("runs/"):
        settings[NAME] = "smollm2-135m"
    with tempfile.TemporaryDirectory() as place:
        settings["--run_directory"] = f"{place}/run"
        words = ["fit", "--config", str(config), *(word for pair in settings.items() for word in pair)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "lrl", *words],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        usage: list[tuple[float, float]] = []
        threading.Thread(target=_observe, args=(process, usage), daemon=True).start()
        assert process.stdout is not None
        last = ""
        for last in process.stdout:
            if found := FIRST_LINE.match(last):
                usage.append(_usage(process.pid))
                break
        else:
            found = None
        seconds, (cpu, memory) = round(time.monotonic() - started, 1), usage[-1]
        _stop(process)
    measured = {"seconds": seconds, "cpu_seconds": round(cpu, 1), "peak_gb": round(memory, 2)}
    if found is None and cpu < LIMIT:
        return measured | {"error": last.strip()}
    return measured | {"line": last.strip() if found else None}


def _usage(process: int) -> tuple[float, float]:
    """Return CPU seconds and the sum of peak resident GB of the processes in the session of a process."""
    cpu = memory = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == process:
                cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                peak = re.search(r"VmHWM:\s+(\d+)", stat.with_name("status").read_text())
                memory += int(peak[1]) * 1024 / 1e9 if peak else 0.0
        except OSError:  # the process has ended
            continue
    return cpu, memory


def _observe(process: subprocess.Popen[str], usage: list[tuple[float, float]]) -> None:
    """Append the usage of a run every second, and stop the run after :data:`LIMIT` CPU seconds."""
    while process.poll() is None:
        sample = _usage(process.pid)
        if process.poll() is None:  # otherwise its memory is no longer known
            usage.append(sample)
        if sample[0] > LIMIT:
            _stop(process)
        time.sleep(1.0)


def _stop(process: subprocess.Popen[str]) -> None:
    """Kill a run with the processes of its environments."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
