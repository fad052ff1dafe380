"""One directory per launch: what was run, from which commit, and everything that it printed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_VARIABLE = "LRL_RUN_DIRECTORY"


@dataclass(frozen=True)
class RunDirectory:
    """A directory of this launch alone; its ranks share it."""

    path: Path

    @classmethod
    def create(cls, wanted: str | None, experiment: str, seed: int) -> RunDirectory:
        """Make it, and start ``run.log``.

        Args:
            wanted: a path the user gave; None takes ``runs/<experiment>/<date>-seed<k>``.
            experiment: ``<env>/<algorithm>``.
            seed: the run's seed.

        Raises:
            ValueError: the user's path is taken.
        """
        path = Path(os.environ.get(_VARIABLE) or wanted or _fresh(Path("runs") / experiment, seed)).resolve()
        first = (
            _VARIABLE not in os.environ and int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", 0))) == 0
        )
        requeued = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
        if first and not requeued and path.exists() and any(path.iterdir()):
            raise ValueError(f"run_directory is {str(path)!r}, which is not empty; name a new one.")
        path.mkdir(parents=True, exist_ok=True)
        os.environ[_VARIABLE] = str(path)  # the ranks that this process starts
        _start_log(path, quiet=not first)
        if first:
            (path / "command.txt").write_text(" ".join(sys.argv) + "\n", encoding="utf-8")
            (path / "commit.txt").write_text(commit() + "\n", encoding="utf-8")
            logging.getLogger("lrl").info("run directory %s", os.path.relpath(path))
        return cls(path)


def experiment_name(configs: list[str]) -> str:
    """``<env>/<algorithm>`` from the first configuration file that is not an overlay."""
    for config in configs:
        path = Path(config)
        if path.parent.name not in ("overlays", "") and path.name != "base.yaml":
            return f"{path.parent.name}/{path.stem}"
    return "unnamed"


def commit() -> str:
    """The git commit of the code, with ``-dirty`` where files are changed; ``unknown`` outside a repository."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


def _fresh(parent: Path, seed: int) -> Path:
    """A path of this launch; Slurm's and torchrun's processes share the job's name instead of a date."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    stem = f"{f'job{job}' if job else datetime.now().strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    path, count = parent / stem, 1
    while not job and path.exists():
        count += 1
        path = parent / f"{stem}-{count}"
    return path


def _start_log(path: Path, quiet: bool) -> None:
    """Our messages go to the terminal and, with times and everything of the trace, to ``run.log``."""
    logger = logging.getLogger("lrl")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers.clear()
    page = logging.FileHandler(path / "run.log", encoding="utf-8")
    page.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [page]
    if not quiet:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.INFO)
        terminal.setFormatter(logging.Formatter("%(message)s"))
        handlers.append(terminal)
    for handler in handlers:
        logger.addHandler(handler)
    warned = logging.getLogger("py.warnings")
    warned.addHandler(page)
    logging.captureWarnings(True)
