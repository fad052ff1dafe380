"""Two implementations timed alternately within one run, so that other load on the machine affects both."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

Measure = Callable[[], float]
"""Runs an implementation and returns its rate in units per second."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rates of lrl and of the other library in every repeat."""

    name: str
    unit: str
    """Unit that a rate counts per second."""
    ours: list[float]
    theirs: list[float]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Return the median rate of lrl over that of the other library."""
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
    """Run both once unmeasured, unless they are warm, then ``repeats`` times in turns; who begins changes each time."""
    for warm_up in () if warm else (ours, theirs):
        warm_up()
    rates: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        for which in ((0, 1), (1, 0))[repeat % 2]:
            rates[which].append((ours, theirs)[which]())
    return rates


def quiet() -> None:
    """Silence progress bars and warnings between the lines of the table."""
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "trl", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, threads and versions."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def provenance() -> dict[str, Any]:
    """Return the command, the commit and the machine, for a JSON file."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {"command": "python " + shlex.join(sys.argv), "commit": commit, "machine": machine()}


def finish(comparisons: list[Comparison], bar: float | None, path: Path | None, **notes: Any) -> None:
    """Print the table, and write the JSON file where one is asked for."""
    print(f"{'':36s} {'ours':>10s} {'theirs':>10s} {'':14s} {'ratio':>7s}  (smallest to largest of the repeats)")
    for comparison in comparisons:
        print(comparison.line())
    if bar is not None:
        print(f"bar: {bar:g}x")
    write(comparisons, path, bar=bar, **notes)


def write(comparisons: list[Comparison], path: Path | None, **notes: Any) -> None:
    """Write the JSON file, where one is asked for."""
    if path is None:
        return
    document = {**provenance(), **notes, "comparisons": [comparison.report() for comparison in comparisons]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
