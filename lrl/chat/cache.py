"""Cache of chat models' responses on disk, so that an interrupted run resumes without repeating requests."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, final

from lrl.chat.model import Completion

_VERSION = 1
"""Version of the file format, in SQLite's ``user_version``."""
_BUSY = 60.0
"""Maximum number of seconds to wait while another process writes."""
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
"""Keeps the first response to a request, unless it is empty: an earlier run may have accepted empty responses."""


def request_key(api_url: str, body: Mapping[str, Any], seed: int) -> str:
    """Hash a request: the address of the server, and everything that is sent except the API key.

    Args:
        api_url: base URL of the server.
        body: model, messages and sampling as JSON values.
        seed: seed of the response. It is hashed even if it is not sent, because all samples would be equal otherwise.
    """
    text = json.dumps([api_url, body, int(seed)], sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@final
class CompletionCache:
    """An SQLite file with one response per request, which several threads and processes can use at once.

    Each response is written in one transaction, so the file stays valid if the process is killed.

    Args:
        path: the file; it and its folder are created if they do not exist.

    Raises:
        ValueError: If the file cannot be opened or written, or if another program wrote it.
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
        """Return the response to the request with this key; None if there is none."""
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
        """Write a response, and return the one that is kept: the first response to the request that is not empty."""
        fields = completion.text, completion.finish_reason, completion.prompt_tokens, completion.completion_tokens
        with self._use() as connection:
            written = connection.execute(
                f"INSERT INTO completions (request, model, {_FIELDS}) VALUES (?, ?, ?, ?, ?, ?) {_UNLESS_EMPTY}",
                (key, model, *fields),
            ).rowcount
        return completion if written else self.find(key) or completion

    def close(self) -> None:
        """Close the file; the next access opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection to one thread at a time, and convert errors of SQLite to a ``ValueError``."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _open(self.path)
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                raise ValueError(
                    f"cache is {str(self.path)!r}, which cannot be used ({error}); it must be a new file or one that "
                    "lrl wrote, in a folder that can be written to."
                ) from error


def _open(path: Path) -> sqlite3.Connection:
    """Open or create the file, and check that lrl wrote it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each statement is a transaction; the lock of the cache lets one thread at a time use the connection.
    connection = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")  # another process may be creating the same file
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
