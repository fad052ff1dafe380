"""Shipped files, names of replaced run directories, locked folders, text files, YAML, and optional packages."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from lrl.faults import writing

_PACKAGE = Path(__file__).parent
_FOLDERS = ("assets", "configs")


def checkout() -> Path | None:
    """Return the repository that this package is imported from; None if it is installed from a wheel."""
    return _PACKAGE.parent if (_PACKAGE.parent / "pyproject.toml").is_file() else None


def shipped(name: str) -> str | None:
    """Return the path of a shipped file or folder; None if there is none with this name.

    Args:
        name: relative path that begins with ``assets`` or ``configs``.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or path.parts[:1] not in [(folder,) for folder in _FOLDERS]:
        return None
    roots = [root for root in (_PACKAGE / "files", checkout()) if root is not None]
    return next((str(root / path) for root in roots if (root / path).exists()), None)


def resolve(name: str) -> str:
    """Return the path of the shipped file or folder ``name``; ``name`` itself if it exists or is not shipped."""
    return name if Path(name).exists() else shipped(name) or name


def resolve_config(name: str) -> str:
    """Resolve the name of a configuration like :func:`resolve`, where the leading ``configs/`` may be omitted."""
    if not name.endswith((".yaml", ".yml")) or Path(name).exists():
        return name
    return shipped(name) or shipped(str(Path("configs") / name)) or name


def replaced_name(run: Path) -> Path:
    """Return the path to which the directory of an interrupted run is renamed before the run is started again."""
    return run.with_name(f"{run.name}-interrupted-{datetime.now():%Y%m%d-%H%M%S}")


def is_replaced(run: Path) -> bool:
    """Return whether a directory has a name that :func:`replaced_name` made, and so is not a result."""
    return re.search(r"-interrupted-\d{8}-\d{6}$", run.name) is not None


@contextmanager
def write_whole(path: str | Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file for writing, and replace ``path`` only if the ``with`` block ends without an error.

    The text is first written to a temporary file in the same folder. After an error, such as a full disk, ``path``
    therefore has its previous content. Missing folders are created. A path that is not a regular file, such as a pipe,
    is written directly.

    Args:
        path: the file to write.
        newline: see :func:`open`.

    Raises:
        OSError: If the file cannot be written; the error contains its path
            (:class:`~lrl.faults.DiskFullError` if the disk is full).
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8", newline=newline) as file:
            yield file
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise
        with writing("the file", path):
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def from_yaml(text: str) -> Any:
    """Return the content of YAML; the parser in C, where PyYAML has it, is ten times as fast as that in Python."""
    import yaml

    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def encodable(text: str) -> str:
    """Return a text in which question marks replace unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def require(package: str, extra: str, user: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: name of the package, as in an import statement.
        extra: the extra of lrl that installs it.
        user: what needs the package, as the subject of the error message.

    Raises:
        ValueError: If the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{user} needs the package {package}, which is not installed; run pip install 'lrl[{extra}]'.")


def lock_folder(folder: Path, patience: float = 0.0) -> int | None:
    """Lock a folder for this process and for those that inherit the descriptor.

    Args:
        folder: an existing folder.
        patience: number of seconds to wait for another process.

    Returns:
        The descriptor, for :func:`unlock_folder`; None if the file system has no locks.

    Raises:
        BlockingIOError: If another process holds the lock.
    """
    until = time.monotonic() + patience
    while True:
        descriptor = os.open(folder, os.O_RDONLY)  # again each time, because the folder may be replaced meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= until:
                raise
            time.sleep(0.1)
        except OSError:
            os.close(descriptor)
            return None
        else:
            return descriptor


def unlock_folder(descriptor: int) -> None:
    """End a lock of :func:`lock_folder`, also for processes that have inherited the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
