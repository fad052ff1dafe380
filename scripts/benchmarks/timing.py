"""Functions that benchmarks share: timing of two implementations, a quiet trainer, and whole training runs."""

from __future__ import annotations

import csv
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from lrl.cli.run_directory import commit

Measure = Callable[[], float]
"""Runs an implementation and returns its rate in units per second."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rates of lrl and of another library in each repeat."""

    name: str
    unit: str
    """Unit of what a rate counts per second."""
    ours: list[float]
    theirs: list[float]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Return the median rate of lrl over the median rate of the other library."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def ratios(self) -> tuple[float, float]:
        """Return the smallest and the largest ratio within a repeat."""
        each = [own / other for own, other in zip(self.ours, self.theirs, strict=True)]
        return min(each), max(each)

    def line(self) -> str:
        """Return one row of the printed table."""
        rates = (f"{statistics.median(rates):10.1f}" for rates in (self.ours, self.theirs))
        low, high = self.ratios
        return f"{self.name:36s} {' '.join(rates)} {self.unit + '/s':14s} {self.ratio:6.2f}x  ({low:.2f} to {high:.2f})"

    def report(self) -> dict[str, Any]:
        """Return all numbers for the JSON file."""
        low, high = self.ratios
        figures = {"ratio": self.ratio, "ratio_min": low, "ratio_max": high, "ours": self.ours, "theirs": self.theirs}
        return {"name": self.name, "unit": f"{self.unit}/s", **figures, **self.notes}


def alternate(ours: Measure, theirs: Measure, repeats: int, warm: bool = False) -> tuple[list[float], list[float]]:
    """Measure two implementations alternately, so that other load on the machine affects both.

    Args:
        ours: Measures lrl.
        theirs: Measures the other implementation.
        repeats: Number of measurements of each; the order changes from repeat to repeat.
        warm: Whether both have run before; otherwise both run once first, without being measured.

    Returns:
        The rates of both.
    """
    for warm_up in () if warm else (ours, theirs):
        warm_up()
    rates: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        for which in ((0, 1), (1, 0))[repeat % 2]:
            rates[which].append((ours, theirs)[which]())
    return rates


def compared(title: str, bar: float | None, comparisons: list[Comparison], **notes: Any) -> dict[str, Any]:
    """Print the table of comparisons, and return the report for the JSON file.

    Args:
        title: Title of the report.
        bar: Ratio that lrl should reach; None if there is none.
        comparisons: Rows of the table.
        notes: Further entries of the report.
    """
    print(f"{'':36s} {'ours':>10s} {'theirs':>10s} {'':14s} {'ratio':>7s}  (smallest to largest of the repeats)")
    for comparison in comparisons:
        print(comparison.line())
    if bar is not None:
        print(f"bar: {bar:g}x")
    return {"bar": bar, "title": title, **notes, "comparisons": [comparison.report() for comparison in comparisons]}


def provenance() -> dict[str, Any]:
    """Return the command, the commit and the machine, on which the figures depend."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    machine = {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {"command": "python " + shlex.join(sys.argv), "commit": commit(), "machine": machine}


def trl_settings() -> dict[str, Any]:
    """Return settings with which TRL neither logs nor saves, on the CPU."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "lr_scheduler_type": "constant",
    }


def trl_clock(count: Callable[[], float]) -> Any:
    """Return a callback of TRL that records the time and ``count()`` at the end of each step."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.counts: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())
            self.counts.append(count())

    return StepClock()


class WholeRuns(ABC):
    """Whole training runs with equal settings of ``lrl fit`` and of another library, each with a seed of its own.

    Args:
        config: Configuration of the runs of lrl, including its parsing, logging and checkpoints.
        env_steps: Number of environment steps of both, rounded up to whole collections.
        figure: Column of ``metrics.csv`` whose last value is kept; held-out episodes are played only for ``val/...``.
        keep_runs: Folder for the run directories of lrl, each named after its seed; None deletes them.
    """

    def __init__(self, config: str, env_steps: int, figure: str, keep_runs: Path | None = None) -> None:
        self.config, self.figure, self.keep_runs = config, figure, keep_runs
        content = yaml.safe_load(Path(config).read_text())
        self.model: dict[str, Any] = content["model"]["init_args"]
        self.data: dict[str, Any] = content["data"]["init_args"]
        self.trainer: dict[str, Any] = content["trainer"]
        per_collection = self.data["num_envs"] * self.data["num_steps"]
        self.collections = -(-env_steps // per_collection)
        self.steps = self.collections * per_collection
        self.seed = {"ours": 0, "theirs": 0}
        self.returns: dict[str, list[float]] = {"ours": [], "theirs": []}

    def ours(self) -> float:
        """Return environment steps per second of ``lrl fit``."""
        from lrl.cli.main import LRLCLI

        folder = Path(tempfile.mkdtemp())
        run = (self.keep_runs or folder) / str(self.seed["ours"])
        changes = {
            "seed_everything": self.seed["ours"],
            "data.init_args.max_env_steps": self.steps,
            "trainer.max_epochs": self.collections,
            "trainer.check_val_every_n_epoch": self.collections + (not self.figure.startswith("val/")),
            "run_directory": run,
        }
        arguments = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
        self.seed["ours"] += 1
        os.environ.pop("LRL_RUN_DIRECTORY", None)  # set by the previous run
        started = time.perf_counter()
        LRLCLI(["fit", "--config", self.config, *arguments])
        rate = self.steps / (time.perf_counter() - started)
        with (run / "metrics.csv").open() as file:
            found = [row[self.figure] for row in csv.DictReader(file) if row.get(self.figure)]
        self.returns["ours"].append(float(found[-1]))
        shutil.rmtree(folder)
        return rate

    @abstractmethod
    def theirs(self) -> float:
        """Return environment steps per second of the other library."""
