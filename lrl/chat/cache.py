"""Cache of chat models' responses on disk: an interrupted run can be resumed without repeating its requests."""

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
from lrl.faults import full_disk

_VERSION = 1
"""Version of the file format, which is stored in SQLite's ``user_version``."""
_BUSY_TIMEOUT = 60.0
"""Maximum number of seconds to wait for another process that writes to the file."""
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS completions (request TEXT PRIMARY KEY, model TEXT NOT NULL, text TEXT NOT NULL, "
    "finish_reason TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL) WITHOUT ROWID"
)
_FIELDS = "text, finish_reason, prompt_tokens, completion_tokens"
_REPLACE_ONLY_EMPTY = (
    "ON CONFLICT (request) DO UPDATE SET text = excluded.text, finish_reason = excluded.finish_reason, "
    "prompt_tokens = excluded.prompt_tokens, completion_tokens = excluded.completion_tokens "
    "WHERE trim(completions.text, char(9, 10, 13, 32)) = '' AND completions.finish_reason <> 'length' "
    "AND trim(excluded.text, char(9, 10, 13, 32)) <> ''"
)
"""SQL clause that replaces a stored response only if it is empty, which an earlier run may have accepted."""


def request_key(api_url: str, body: Mapping[str, Any], seed: int) -> str:
    """Return a hash of a request: of the server's URL, of the seed, and of all that is sent except the API key.

    Args:
        api_url: base URL of the server.
        body: model, messages and sampling settings as JSON values.
        seed: seed of the response. It is part of the hash even if it is not sent, because otherwise all samples of a
            prompt would be the same cached response.
    """
    text = json.dumps([api_url, body, int(seed)], sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@final
class CompletionCache:
    """SQLite file with one response per request, which several threads and processes can use at the same time.

    Each response is written in one transaction, so that the file stays valid if the process is killed.

    Args:
        path: path of the file; the file and its folder are created if they do not exist.

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
        """Return the number of responses in the file."""
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
        """Store a response unless the file has a response to this request that is not empty; return the stored one.

        Args:
            key: result of :func:`request_key`.
            model: name of the model, which is stored with the response.
            completion: the response.
        """
        fields = completion.text, completion.finish_reason, completion.prompt_tokens, completion.completion_tokens
        with self._use() as connection:
            written = connection.execute(
                f"INSERT INTO completions (request, model, {_FIELDS}) VALUES (?, ?, ?, ?, ?, ?) {_REPLACE_ONLY_EMPTY}",
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
        """Return the connection for use by one thread at a time; SQLite errors become a ``ValueError``."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _open(self.path)
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                if reason := full_disk(error):
                    raise ValueError(
                        f"there is no space left on the disk for the cache {str(self.path)!r}, to which the response "
                        f"was not added ({reason}); free some, or set cache to a file on another disk."
                    ) from error
                raise ValueError(
                    f"cache is {str(self.path)!r}, which cannot be used ({error}); it must be a new file or one that "
                    "lrl wrote, in a folder that can be written to."
                ) from error


def _open(path: Path) -> sqlite3.Connection:
    """Open or create the file.

    Raises:
        sqlite3.DatabaseError: If the file has not been written by this version of lrl.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without isolation level, each statement is a transaction. Threads are excluded by the lock of CompletionCache.
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    try:
        with closing(connection.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")  # another process may be creating the same file
            version = cursor.execute("PRAGMA user_version").fetchone()[0]
            tables = cursor.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
            if version != _VERSION and (version or tables):
                raise sqlite3.DatabaseError("it was not written by this version of lrl")
            cursor.execute(_SCHEMA)
            cursor.execute(f"PRAGMA user_version = {_VERSION}")
            cursor.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection
