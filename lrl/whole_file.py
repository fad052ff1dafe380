"""Text files that are written completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def write_whole(path: str | Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file that takes the place of ``path`` when the ``with`` block ends without an error.

    Until then it lies beside it, so that an error, such as a full disk, leaves the former content as it was. Missing
    folders are created. What is no regular file, such as a pipe, is written directly.

    Args:
        path: the file.
        newline: see :func:`open`.

    Raises:
        OSError: the file cannot be written; the error names it.
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
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
