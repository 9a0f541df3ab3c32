"""A cache of verdicts on disk, so that a question is paid for once."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.evaluators.base import Score

_WAIT = 30  # seconds for another process's write
_TABLE = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, scores TEXT NOT NULL, judge TEXT NOT NULL, created REAL NOT NULL
)"""


class VerdictCache:
    """An SQLite file of verdicts, created if missing; for any threads and processes at once."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path).expanduser()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # SQLite's default journal mode: changing it fails while others use the file.
            self._execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"got {str(path)!r} as the verdicts' file, expected an SQLite database that can be "
                f"written, or a path where one can be made: {error}"
            ) from error

    def get(self, key: str) -> list[Score] | None:
        """The scores stored under `key`, in the order in which they were put."""
        rows = self._execute("SELECT scores FROM verdicts WHERE key = ?", key)
        return [Score(*score) for score in json.loads(rows[0][0])] if rows else None

    def put(self, key: str, scores: Sequence[Score], judge: str) -> None:
        """Store a verdict; the first for a key stays. `judge` is the model's name, for people."""
        text = json.dumps([[score.value, score.explanation] for score in scores])
        insert = "INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)"
        self._execute(insert, key, text, judge, time.time())

    def _execute(self, statement: str, *values: str | float) -> list[Any]:
        # A connection for each use: SQLite's must not pass between threads, or survive a fork.
        with closing(sqlite3.connect(self._path, timeout=_WAIT)) as database, database:
            return database.execute(statement, values).fetchall()
