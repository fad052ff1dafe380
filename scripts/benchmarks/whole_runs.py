"""The documented command on a config, timed as a whole, against another library with the same settings."""

from __future__ import annotations

import csv
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import yaml


class WholeRuns(ABC):
    """Two runs with the same settings; each repeat has a seed of its own.

    Args:
        config: Of ours, with its parsing, logging and checkpoints.
        env_steps: That both take, rounded up to whole collections.
        figure: Column of ``metrics.csv`` whose last value is kept; held-out episodes are played only if it is theirs.
        keep_runs: Folder for our run directories, each named by its seed; None throws them away.
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
        """Return env steps per second of the command."""
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
        os.environ.pop("LRL_RUN_DIRECTORY", None)  # of the run before
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
        """Return env steps per second of the other library."""
