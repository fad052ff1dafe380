"""The time until the first line and the memory of each configuration for two collections or ten batches."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SHORT = {"trainer.max_epochs": 2, "trainer.limit_val_batches": 0}
FIRST = re.compile(r"(collection|batch|epoch|proposal|pass) \d+/")
"""Beginning of a line about the progress of a run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--only", default="*/*", help="pattern of configurations, such as frozen_lake/*")


def main(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run each configuration that is for a CPU in a process of one thread, and yield the report after each of them."""
    configs = sorted(path for path in (ROOT / "configs").glob(f"{options.only}.yaml") if path.parent.name != "overlays")
    runs = []
    for config in configs:
        if re.search(r"\bGPU\b", config.read_text(encoding="utf-8").partition("\nmodel:")[0]):
            continue
        runs.append(run(config))
        print(runs[-1], flush=True)
        yield {"title": "First line and memory of configurations", "configurations": runs}


def run(config: Path) -> dict[str, Any]:
    """Train with a configuration, without the weights from which it would start.

    Returns:
        CPU seconds until the first line about progress, CPU seconds in total, the largest resident memory in GB, and
        for a run that failed, its last line.
    """
    settings: dict[str, object] = dict(SHORT)
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    if "init_from" in content["model"].get("init_args", {}):
        settings["model.init_args.init_from"] = "null"
    if content["data"]["class_path"] != "RolloutDataModule":
        settings |= {"trainer.max_epochs": 1, "trainer.limit_train_batches": 10}
    with tempfile.TemporaryDirectory() as place:
        words = ["fit", "--config", str(config), "--run_directory", f"{place}/run"]
        words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "lrl", *words]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        first, line = None, ""
        assert process.stdout is not None
        for line in process.stdout:
            if first is None and FIRST.search(line):
                first = cpu_seconds(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    measured = {
        "config": str(config.relative_to(ROOT)),
        "first_line_cpu_s": first,
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
    }
    return measured if process.returncode == 0 else measured | {"error": line.strip()}


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
