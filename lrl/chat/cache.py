"""Keep responses of chat models on disk, so that a run resumes and replays without asking or paying twice."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, final

from lrl.chat.model import Completion

_VERSION = 1
"""``user_version`` of the file."""
_BUSY = 60.0
"""Seconds to wait while another process writes."""
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS completions (request TEXT PRIMARY KEY, model TEXT NOT NULL, text TEXT NOT NULL, "
    "finish_reason TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL) WITHOUT ROWID"
)
_FIELDS = "text, finish_reason, prompt_tokens, completion_tokens"
_UNLESS_EMPTY = (
    "ON CONFLICT (request) DO UPDATE SET text = excluded.text, finish_reason = excluded.finish_reason, "
    "prompt_tokens = excluded.prompt_tokens, completion_tokens = excluded.completion_tokens "
    "WHERE trim(completions.text, char(9, 10, 13, 32)) = '' AND completions.finish_reason <> 'length' "
    "AND trim(excluded.text, char(9, 10, 13, 32)) <> ''"
)
"""Keeps the first response, except for an empty one, which was allowed once and need not be allowed now."""


def request_key(api_url: str, body: Mapping[str, Any], seed: int) -> str:
    """Hash a whole request: the address of the server, and everything that is sent except the API key.

    Args:
        api_url: base URL of the server.
        body: model, messages and sampling, as JSON can hold them.
        seed: of the response; part of the key even where the server is not sent it, or all samples would be the same.
    """
    text = json.dumps([api_url, body, int(seed)], sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@final
class CompletionCache:
    """An SQLite file with one response per request, which several threads and processes may use at once.

    Every response is one transaction: a process that is killed leaves all that were written before, and no part of one.

    Args:
        path: the file; it and its folder are made where they are missing.

    Raises:
        ValueError: the file cannot be opened or written, or another program wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        with self._use():
            pass

    def __len__(self) -> int:
        with self._use() as connection:
            return connection.execute("SELECT COUNT(*) FROM completions").fetchone()[0]

    def find(self, key: str) -> Completion | None:
        """Return the response to the request of this key; None if there is none."""
        with self._use() as connection:
            row = connection.execute(f"SELECT {_FIELDS} FROM completions WHERE request = ?", (key,)).fetchone()
        if row is None:
            return None
        text, finish_reason, prompt_tokens, completion_tokens = row
        return Completion(
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached=True,
        )

    def add(self, key: str, model: str, completion: Completion) -> Completion:
        """Write a response, and return the one that later calls will find: the first to the same request with text."""
        fields = completion.text, completion.finish_reason, completion.prompt_tokens, completion.completion_tokens
        with self._use() as connection:
            written = connection.execute(
                f"INSERT INTO completions (request, model, {_FIELDS}) VALUES (?, ?, ?, ?, ?, ?) {_UNLESS_EMPTY}",
                (key, model, *fields),
            ).rowcount
        return completion if written else self.find(key) or completion

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection to one thread at a time, with the errors of SQLite as one sentence."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _open(self.path)
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                raise ValueError(f"cache is {str(self.path)!r}{_reason(self.path, error)} ({error}).") from error


def _reason(path: Path, error: sqlite3.Error | OSError) -> str:
    """Return how the sentence on an error goes on after the name of the file."""
    code, number = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF, getattr(error, "errno", None)
    if code == sqlite3.SQLITE_FULL or number in (errno.ENOSPC, errno.EDQUOT):
        return ", whose disk is full; free some space, and the same command resumes"
    cannot_open = code == sqlite3.SQLITE_CANTOPEN and not os.path.isdir(
        path
    )  # for Path.is_dir() a name may be too long
    if cannot_open or code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM) or number in (errno.EACCES, errno.EROFS):
        return ", which cannot be written; it and its folder must be writable, as every new response is added"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f", which another process has kept for {_BUSY:g} s; end that process, or wait for it"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return ", whose folder cannot be made"
    if code == sqlite3.SQLITE_IOERR:
        return ", which the disk does not read or write"
    return "; it must be a new file, or one that lrl wrote"


def _open(path: Path) -> sqlite3.Connection:
    """Open or make the file, and check that this program wrote it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each statement is its own transaction; threads take turns by the lock of the cache.
    connection = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")  # another process may be making the same file
            version = cursor.execute("PRAGMA user_version").fetchone()[0]
            tables = cursor.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
            if version != _VERSION and (version or tables):
                raise sqlite3.DatabaseError("it holds something else")
            cursor.execute(_SCHEMA)
            cursor.execute(f"PRAGMA user_version = {_VERSION}")
            cursor.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection
