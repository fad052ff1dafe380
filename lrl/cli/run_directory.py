"""The run directory: one per launch, with its command, commit, configuration and log."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lrl.shipped import checkout

_VARIABLE = "LRL_RUN_DIRECTORY"
_RECORDS = (
    "run.log",
    "command.txt",
    "commit.txt",
    "config.yaml",
    "hparams.yaml",
    "metrics.csv",
    "events.out.*",
    "wandb",
)
"""Files that a launch writes before training."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one launch, shared by its ranks."""

    path: Path
    made: tuple[Path, ...] | None = None
    """Directories that this launch created, innermost first; None where others may have written into ``path``."""

    @classmethod
    def create(cls, wanted: str | None, experiment: str, seed: int) -> RunDirectory:
        """Create the run directory and start ``run.log``.

        Args:
            wanted: the path that the user gave; None takes ``runs/<experiment>/<date>-seed<k>``.
            experiment: ``<env>/<algorithm>``.
            seed: the run's seed.

        Raises:
            ValueError: the path is not empty, or cannot be written to.
        """
        path = Path(os.environ.get(_VARIABLE) or wanted or _fresh(Path("runs") / experiment, seed)).resolve()
        first = (
            _VARIABLE not in os.environ and int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", 0))) == 0
        )
        requeued = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
        others = [found for found in path.iterdir() if found.name != "run.log"] if path.is_dir() else []
        if first and not requeued and (others or path.is_file()):  # another rank may have begun the log
            raise ValueError(f"run_directory is {str(path)!r}, which is not empty; name a new one.")
        made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        run = cls(path, made if first and not requeued else None)
        try:
            run._begin(quiet=not first)
        except OSError as error:
            run.discard()
            raise ValueError(
                f"run_directory is {str(path)!r}, which cannot be written to ({error.strerror}); name another one."
            ) from error
        return run

    def _begin(self, quiet: bool) -> None:
        """Create the directory and write the command and the commit."""
        self.path.mkdir(parents=True, exist_ok=True)
        os.environ[_VARIABLE] = str(self.path)  # read by the ranks that this process starts
        _start_log(self.path, quiet)
        if not quiet:
            (self.path / "command.txt").write_text(shlex.join(sys.argv) + "\n", encoding="utf-8")
            (self.path / "commit.txt").write_text(commit() + "\n", encoding="utf-8")
            logging.getLogger("lrl").info("run directory %s", os.path.relpath(self.path))

    def discard(self) -> None:
        """Remove the records of a launch that failed before training, so that the same command can be repeated.

        Files that lrl does not write are kept, and so is a directory that existed before.
        """
        if self.made is None or (self.path / "checkpoints").exists():
            return
        _stop_log()
        os.environ.pop(_VARIABLE, None)
        for record in [found for name in _RECORDS for found in self.path.glob(name)]:
            shutil.rmtree(record) if record.is_dir() else record.unlink()
        for folder in self.made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def experiment_name(configs: list[str]) -> str:
    """Return ``<env>/<algorithm>`` of the first configuration file that is not an overlay."""
    for config in configs:
        path = Path(config)
        if path.parent.name not in ("overlays", "") and path.name != "base.yaml":
            return f"{path.parent.name}/{path.stem}"
    return "unnamed"


def commit() -> str:
    """Return the git commit of the code, with ``-dirty`` if files have changed, or ``unknown`` outside a repository."""
    folder = checkout()
    if folder is None:  # installed, perhaps inside another repository
        return "unknown"
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


def _fresh(parent: Path, seed: int) -> Path:
    """Return the default path: named by the date, or by the job that all processes of Slurm or torchrun share."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    stem = f"{f'job{job}' if job else datetime.now().strftime('%Y%m%d-%H%M%S')}-seed{seed}"
    path, count = parent / stem, 1
    while not job and path.exists():
        count += 1
        path = parent / f"{stem}-{count}"
    return path


class _RunLog(logging.FileHandler):
    """Handler of ``run.log``, silent on a full disk: the run's own files fail there with a clearer error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Print the traceback of an error, unless writing failed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _stop_log() -> None:
    """Close the file ``run.log``."""
    for logger in (logging.getLogger("lrl"), logging.getLogger("py.warnings")):
        for handler in [handler for handler in logger.handlers if isinstance(handler, _RunLog)]:
            logger.removeHandler(handler)
            handler.close()


def _start_log(path: Path, quiet: bool) -> None:
    """Send messages of lrl to the terminal, and with times and debug messages to ``run.log``."""
    logger = logging.getLogger("lrl")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers.clear()
    page = _RunLog(path / "run.log", encoding="utf-8")
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
