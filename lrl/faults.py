"""Errors that a full disk or too little memory causes, whichever library raises them, and errors as text."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL_DISK = re.compile(
    r"No space left on device|os error 28|Disk quota exceeded|database or disk is full"
    r"|PytorchStreamWriter failed writing|inline_container\.cc.* unexpected pos"
)
"""How safetensors, h5py, sqlite3 and torch report a full disk."""
_NO_MEMORY = re.compile("out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of the messages of a ``RuntimeError`` that torch raises if memory runs out."""


class DiskFullError(OSError):
    """Raised if a file cannot be written because the disk is full; the message is one sentence."""


@contextmanager
def writing(what: str, path: str | Path, size: int | None = None) -> Iterator[None]:
    """Raise an error that names what was being written if the disk is full.

    Args:
        what: the file or folder, as the subject of a sentence.
        path: where it is written.
        size: number of bytes that it needs; None or 0 if it is not known.

    Raises:
        DiskFullError: If the disk is full.
    """
    try:
        yield
    except Exception as error:
        found = full_disk(error)
        if found is None or isinstance(error, DiskFullError):
            raise
        needs = "" if not size else f", which needs about {megabytes(size)},"
        raise DiskFullError(
            errno.ENOSPC,
            f"there is no space left on the disk: {what} {str(path)!r}{needs} was not written ({found}); free some, or "
            "write to another disk.",
        ) from error


@contextmanager
def appending(what: str, *paths: Path) -> Iterator[None]:
    """Restore the previous sizes of files that are appended to if the disk is full.

    Args:
        what: see :func:`writing`.
        paths: the files, which need not exist.

    Raises:
        DiskFullError: If the disk is full.
    """
    sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
    with writing(what, paths[0]):
        try:
            yield
        except OSError:
            for path, size in zip(paths, sizes, strict=True):
                if path.exists() and path.stat().st_size > size:
                    os.truncate(path, size)
                    if not size:
                        path.unlink()
            raise


def megabytes(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size} bytes" if size < 10**5 else f"{size / 1e6:.1f} MB"


def full_disk(error: BaseException) -> str | None:
    """Return the reason if an error, or one that caused it, reports a full disk; else None."""
    seen: BaseException | None = error
    while seen is not None:
        text, number = " ".join(str(seen).split()), getattr(seen, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or _FULL_DISK.search(text):
            return text[:200].rstrip(".")
        seen = seen.__cause__ or seen.__context__
    return None


def out_of_memory(error: BaseException) -> str | None:
    """Return the reason if an error reports that a device, or the computer, has too little memory; else None."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return " ".join(str(error).split())[:200].rstrip(".") or "MemoryError"
    return None


def reason_of(error: BaseException) -> str:
    """Return an error's type and its message, on one line without a full stop."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.') or 'no reason given'}"
