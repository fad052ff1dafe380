"""The run directory: one per launch, with its command, commit, configuration and log."""

from __future__ import annotations

import csv
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger

from lrl.evaluation.run_records import commands_of, results_of
from lrl.files import checkout, lock_folder, unlock_folder
from lrl.functional.distributed import read_checkpoint

_VARIABLE = "LRL_RUN_DIRECTORY"
_EVENTS = "events.out.*"
"""Pattern of TensorBoard's files, of which each launch creates one as soon as its trainer is set up."""
_RECORDS = (
    "run.log",
    "command.txt",
    "commit.txt",
    "config.yaml",
    "hparams.yaml",
    "metrics.csv",
    _EVENTS,
    "transcripts.*",
    ".restart",
    "wandb",
)
"""Files that a launch writes before its first update."""

_EARLIER = "earlier"
"""Folder of the files that are replaced when a launch continues in a run directory; each such launch adds a numbered
folder."""
_WHOLE = "whole_"
"""Prefix of the name of a complete file there whose copy in the run directory was cut."""
_LOCKS: dict[Path, int] = {}
"""Descriptor of each run directory that this process has locked."""
_PATIENCE = 5.0
"""Number of seconds for which a launch waits for a directory whose run is just ending."""
_RESTART = ".restart"
"""File with the number of restarts of the Slurm job when the directory was last used."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one launch, shared by its ranks."""

    path: Path
    """Path of the directory."""
    made: tuple[Path, ...] | None = None
    """Directories that this launch created, innermost first; None if ``path`` may contain files of other launches."""
    earlier: Path | None = None
    """Folder to which the records of the previous launch were moved, if this launch continues in the same directory."""
    logged: int | None = None
    """Size of ``run.log`` in bytes before this launch; None on ranks other than the first."""
    events: frozenset[Path] = frozenset()
    """TensorBoard's files of earlier launches."""

    @classmethod
    def create(
        cls,
        wanted: str | None,
        experiment: str,
        seed: int,
        resumed: str | None = None,
        beside: Path | None = None,
        advice: str = "",
    ) -> RunDirectory:
        """Create the run directory and start ``run.log``.

        A directory that is not empty is used by a Slurm job that was restarted, and by a launch that resumes a
        checkpoint in it.

        Args:
            wanted: the path that the user gave; None takes ``runs/<experiment>/<date>-seed<k>``.
            experiment: ``<env>/<algorithm>``.
            seed: the run's seed.
            resumed: the checkpoint from which training continues, if any.
            beside: path to which a date is added for the default path, instead of that made of experiment and seed.
            advice: how to continue the run in a directory that is not empty, for the error message.

        Raises:
            ValueError: If the directory is not empty, is used by a process that still runs, or cannot be written to.
        """
        default = (Path("runs") / experiment, "", f"-seed{seed}")
        if beside is not None:
            default = (beside.parent, f"{beside.name}-", "")
        path = Path(os.environ.get(_VARIABLE) or wanted or _default(*default)).resolve()
        first = _is_first()
        continues = _restarts() > 0 or (resumed is not None and _contains(path, Path(resumed).resolve()))
        made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        not_empty = f"run_directory is {str(path)!r}, which is not empty; name a new one{advice}."
        if first and path.is_file():
            raise ValueError(not_empty)
        try:
            path.mkdir(parents=True, exist_ok=True)
            others = [one for one in path.iterdir() if one.name != "run.log"]  # another rank may have begun the log
            if first and not continues and others:
                raise ValueError(not_empty)
            if first:
                _lock(path)
        except OSError as error:
            _remove_empty(made)
            raise ValueError(_not_written(path, error)) from error
        log = path / "run.log"
        run = cls(
            path,
            made if first and not continues else None,
            _unused(path) if first and others else None,
            (os.path.getsize(log) if os.path.isfile(log) else 0) if first else None,
            frozenset(path.glob(_EVENTS)),
        )
        try:
            run._begin(quiet=not first)
        except OSError as error:
            run.discard()
            raise ValueError(_not_written(path, error)) from error
        return run

    def _begin(self, quiet: bool) -> None:
        """Keep the records of an earlier launch, and write the command and the commit."""
        os.environ[_VARIABLE] = str(self.path)  # read by the ranks that this process starts
        _start_log(self.path, quiet)
        if quiet:
            return
        for name in ("command.txt", "commit.txt", "config.yaml", "hparams.yaml"):
            if self.earlier is not None and (self.path / name).exists():
                self.earlier.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.path / name, self.earlier / name)
        (self.path / "command.txt").write_text(shlex.join(sys.argv) + "\n", encoding="utf-8")
        (self.path / "commit.txt").write_text(commit() + "\n", encoding="utf-8")
        if "SLURM_JOB_ID" in os.environ:
            (self.path / _RESTART).write_text(f"{_restarts()}\n", encoding="utf-8")
        logging.getLogger("lrl").info("run directory %s", os.path.relpath(self.path))
        logging.getLogger("lrl").debug("machine: %s", _machine())

    def restart_from(self) -> Path | None:
        """Return the newest checkpoint in the directory if a Slurm job was restarted; None if there is none.

        Checkpoints that Lightning writes on a signal of Slurm are considered as well. Files that cannot be read are
        skipped.
        """
        if not _restarts():
            return None
        folder = self.path / "checkpoints"
        found = [folder / "last.ckpt", folder / ".last.ckpt.old", *self.path.glob("hpc_ckpt_*.ckpt")]
        for checkpoint in sorted(filter(Path.exists, found), key=lambda file: file.stat().st_mtime, reverse=True):
            try:
                read_checkpoint(checkpoint, weights=False)
            except ValueError as error:
                logging.getLogger("lrl").warning("skipped a checkpoint: %s", error)
            else:
                return checkpoint
        return None

    def lengths(self) -> dict[str, int]:
        """Return the lengths of the files that a run appends to: rows of CSV files, bytes of others."""
        return {file.name: _length(file) for file in self.path.iterdir() if _is_appended(file)}

    def rewind(self, lengths: Mapping[str, int]) -> None:
        """Remove what was appended after a checkpoint was written, because the continued run appends it again.

        The complete files are kept in :attr:`earlier`.

        Args:
            lengths: what :meth:`lengths` returned when the checkpoint was written.
        """
        assert self.earlier is not None
        for file in [file for file in self.path.iterdir() if _is_appended(file)]:
            kept = lengths.get(file.name, 0)
            if _length(file) <= kept:
                continue
            self.earlier.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, self.earlier / f"{_WHOLE}{file.name}")
            if not kept:
                file.unlink()
            elif file.suffix == ".csv":
                rows = file.read_bytes().splitlines(keepends=True)[: kept + 1]
                _replace(file, b"".join(rows))
            else:
                _replace(file, file.read_bytes()[:kept])

    def log_results(self) -> None:
        """Log the best and the last value of each validation metric, or of a training metric if there is none."""
        for line in results_of(self.path):
            logging.getLogger("lrl").info("%s", line)

    def log_commands(self, *names: str) -> None:
        """Log the :func:`commands_of` the run with these names; their paths are relative to the current folder."""
        folder = Path.cwd()
        inside = self.path != folder and self.path.is_relative_to(folder)
        for name, command in commands_of(self.path.relative_to(folder) if inside else self.path, names).items():
            logging.getLogger("lrl").info("%-10s  %s", name, command)

    def unlock(self) -> None:
        """Let other processes write to the directory."""
        _unlock(self.path)

    def close(self) -> None:
        """Close ``run.log``, for a program that continues after the run, and let others use the directory."""
        _stop_log()
        self.unlock()
        logger = logging.getLogger("lrl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
        logging.captureWarnings(False)
        os.environ.pop(_VARIABLE, None)

    def discard(self) -> None:
        """Remove the records of a launch that failed before its first update, so that the same command can be repeated.

        Files that lrl does not write are kept, and so is a directory that existed before, with its earlier records.
        """
        if self.earlier is not None and self.earlier.exists():
            for record in self.earlier.iterdir():
                os.replace(record, self.path / record.name.removeprefix(_WHOLE))
            self.earlier.rmdir()
            with suppress(OSError):  # raised if the folder contains records of other launches
                self.earlier.parent.rmdir()
        log = self.path / "run.log"
        if self.logged is not None and log.is_file() and log.stat().st_size > self.logged:
            _stop_log()
            os.truncate(log, self.logged)  # otherwise a finished run would be read as one that is being continued
            for file in {*self.path.glob(_EVENTS)} - self.events:
                file.unlink()
        if self.made is not None and not (self.path / "checkpoints").exists():
            _stop_log()
            os.environ.pop(_VARIABLE, None)
            for record in [found for name in _RECORDS for found in self.path.glob(name)]:
                shutil.rmtree(record) if record.is_dir() else record.unlink()
            _remove_empty(self.made)
        self.unlock()


def _lock(path: Path) -> None:
    """Keep other processes from writing to a run directory until this process ends or calls :func:`_unlock`.

    Raises:
        ValueError: If another process writes to it.
    """
    _unlock(path)
    try:
        descriptor = lock_folder(path, _PATIENCE)
    except BlockingIOError as error:
        raise ValueError(
            f"run_directory is {str(path)!r}, in which another process is training; wait until it has ended."
        ) from error
    if descriptor is not None:
        _LOCKS[path] = descriptor


def _unlock(path: Path) -> None:
    """Let other processes write to a run directory."""
    if path in _LOCKS:
        unlock_folder(_LOCKS.pop(path))


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that are empty, innermost first."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _not_written(path: Path, error: OSError) -> str:
    """Return the error for a run directory that cannot be written to."""
    return f"run_directory is {str(path)!r}, which cannot be written to ({error.strerror}); name another one."


def experiment_name(configs: list[str]) -> str:
    """Return ``<folder>/<file>`` of the first configuration that is not an overlay, or ``<file>`` without a folder."""
    for config in configs:
        path = Path(config)
        if path.parent.name != "overlays" and path.name != "base.yaml":
            return "/".join(filter(None, (path.parent.name, path.stem)))
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


def _machine() -> str:
    """Return the system, the number of CPU cores and the versions of the main packages."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "lightning", "gymnasium"))
    return f"{platform.platform()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, {packages}"


def _contains(run: Path, checkpoint: Path) -> bool:
    """Return whether a checkpoint is in a run directory; folders above the run directory are none."""
    return checkpoint.is_relative_to(run) and any((run / name).is_file() for name in ("config.yaml", "command.txt"))


def _is_first() -> bool:
    """Return whether this process writes the records of the launch: the first of its ranks, on the first node."""
    if _VARIABLE in os.environ:  # another process started this one
        return False
    if "RANK" in os.environ:  # of torchrun; srun may have started torchrun
        return int(os.environ["RANK"]) == 0
    names = ("LOCAL_RANK", "NODE_RANK") if "LOCAL_RANK" in os.environ else ("SLURM_PROCID", "NODE_RANK")
    return all(int(os.environ.get(name, 0)) == 0 for name in names)


def _restarts() -> int:
    """Return how often Slurm has restarted the job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def _default(parent: Path, prefix: str, suffix: str) -> Path:
    """Return the default path, whose name contains the date, or the ID of a job, between a prefix and a suffix.

    Processes that Slurm or torchrun start together compute the same name independently. In a job with a single process,
    each further launch has a new name. After a restart of such a job, its n-th launch has the name of the n-th launch
    before the restart, so that it continues that run.
    """
    job, group = os.environ.get("SLURM_JOB_ID"), os.environ.get("TORCHELASTIC_RUN_ID")
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", 1)))
    step = os.environ.get("SLURM_STEP_ID") if tasks > 1 else None
    name = ".".join(part for part in (job, step, group) if part)
    stem = f"job{name}" if name else datetime.now().strftime("%Y%m%d-%H%M%S")
    path, count = parent / f"{prefix}{stem}{suffix}", 1
    while not (step or group) and path.exists() and not _awaits_restart(path):
        count += 1
        path = parent / f"{prefix}{stem}{suffix}-{count}"
    return path


def _awaits_restart(path: Path) -> bool:
    """Return whether a run of this job has not been continued since the job was restarted."""
    file = path / _RESTART
    return _restarts() > (int(file.read_text(encoding="utf-8")) if file.exists() else 0)


def _unused(path: Path) -> Path:
    """Return a new folder for the files that the next launch in a run directory replaces."""
    numbers = [int(folder.name) for folder in (path / _EARLIER).glob("*") if folder.name.isdecimal()]
    return path / _EARLIER / str(1 + max(numbers, default=0))


def log_to(logger: Namespace, path: Path, origin: Path | None = None) -> None:
    """Set the directory and the run name of a logger, if its class has settings for them.

    Args:
        logger: the class path and arguments of the logger.
        path: the run directory.
        origin: the run from which the settings of the logger come, if any.
    """
    settings = logger.init_args
    if "save_dir" in settings:
        settings.save_dir = str(path)
    if logger.class_path.endswith((".CSVLogger", ".TensorBoardLogger")):
        settings.name, settings.version = "", ""
    elif "name" in settings:
        settings.name = path.name if origin is not None and settings.name == origin.name else settings.name or path.name


def append_rows(logger: CSVLogger) -> None:
    """Make a logger append to the rows of an earlier run; Lightning 2.6.6 would delete them."""
    file = Path(logger.log_dir) / "metrics.csv"
    if not file.exists():
        return
    kept = file.with_name(".metrics.csv.kept")
    os.replace(file, kept)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Experiment logs directory")  # its files are kept
        writer = logger.experiment
    os.replace(kept, file)
    with file.open(newline="", encoding="utf-8") as rows:
        writer.metrics_keys = list(next(csv.reader(rows), []))


def _is_appended(file: Path) -> bool:
    """Return whether a run appends to a file."""
    return file.suffix in (".csv", ".jsonl", ".txt") and file.name not in ("command.txt", "commit.txt")


def _length(file: Path) -> int:
    """Return the number of rows of a CSV file below its header, and the number of bytes of another file."""
    if file.suffix == ".csv":
        return max(0, len(file.read_bytes().splitlines()) - 1)
    return file.stat().st_size


def _replace(file: Path, content: bytes) -> None:
    """Replace the content of a file in one step."""
    draft = file.with_name(f".{file.name}.draft")
    draft.write_bytes(content)
    os.replace(draft, file)


class _RunLog(logging.FileHandler):
    """Handler of ``run.log`` that ignores write errors: on a full disk, other files of a run raise clearer errors."""

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
