"""Copies of the databases of a server and its tenants, each of one moment; and back."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from langchain_art.errors import ConfigError, Damaged
from langchain_art_server.storage.schema import check_schema, connect, place_of
from langchain_art_server.storage.tables import CHECKPOINTS, SCHEMA

SQLITE, DUMP = "art.sqlite3", "database.dump"
_REPEATABLE = {"isolation_level": "REPEATABLE READ"}
_NO_PROGRAM = (
    "got a database of PostgreSQL, whose program {0!r} is not on the PATH. Install its client "
    "(Debian: postgresql-client), of the server's release or a later one. A cut by hand that "
    "matches the adapters: `cp -al DATA_DIR/adapters COPY` first, then pg_dump, then the same cp "
    "with -n for what was published meanwhile; or stop the server for it."
)


def named_versions(connection: sa.Connection) -> set[tuple[str, int]]:
    """The versions (policy, number) that a database names."""
    rows = connection.execute(sa.select(CHECKPOINTS.c.policy, CHECKPOINTS.c.version))
    return {(row.policy, row.version) for row in rows}


class Databases(ABC):
    """Databases of a server: by the place of each tenant's directory, its URL."""

    def __init__(self, places: dict[Path, str]) -> None:
        self.places = places
        #: Place -> the versions that its copy names.
        self.named: dict[Path, set[tuple[str, int]]] = {}

    @abstractmethod
    def copy(self, folder: Path) -> dict[str, Path]:
        """Write the copies below a folder, over earlier ones. Returns name in archive -> file.

        Raises:
            ConfigError: a database is not one of this server.
            Damaged: one could not be read, or its copy not be written.
        """

    def _read(self, place: Path, url: str, snapshot: str | None = None) -> bool:
        """Note what a database names; False: it has no tables, for its tenant is being made."""
        engine = connect(url)
        with engine.connect().execution_options(
            **({} if snapshot is None else _REPEATABLE)
        ) as connection:
            if snapshot is not None:
                connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            made = place == Path() or sa.inspect(connection).has_table(SCHEMA.name)
            self.named.pop(place, None)
            if made:
                check_schema(connection)
                self.named[place] = named_versions(connection)
        engine.dispose()
        return made


class SqliteFiles(Databases):
    """Each copied by SQLite's backup, in one read transaction; the server goes on meanwhile."""

    def copy(self, folder: Path) -> dict[str, Path]:
        """See `Databases.copy`."""
        files: dict[str, Path] = {}
        for place, url in self.places.items():
            file, target = Path(sa.make_url(url).database or ""), folder / place / SQLITE
            if place != Path() and not file.is_file():
                continue  # the tenant is being made
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            engine = connect(url)
            try:
                with engine.connect() as connection, closing(sqlite3.connect(target)) as copy:
                    source = connection.connection.driver_connection
                    source.backup(copy)  # type: ignore[union-attr] - it is sqlite3's
                if self._read(place, f"sqlite:///{target}"):
                    files[str(place / SQLITE)] = target
            except (sqlite3.Error, DBAPIError) as error:
                why = error.orig if isinstance(error, DBAPIError) else error
                free = shutil.disk_usage(folder).free
                raise Damaged(
                    f"{file} could not be copied to {folder}, whose disk has {free} bytes free: "
                    f"{why}. See that the disk is not full, and what `langchain-art scrub` says."
                ) from error
            finally:
                engine.dispose()
        return files


class PostgresDump(Databases):
    """All schemas in one dump, and what it names, of one exported snapshot."""

    def copy(self, folder: Path) -> dict[str, Path]:
        """See `Databases.copy`."""
        program, target = _program("pg_dump"), folder / DUMP
        target.unlink(missing_ok=True)
        engine = connect(self.places[Path()])
        with engine.connect().execution_options(**_REPEATABLE) as connection:
            snapshot = str(connection.scalar(sa.text("SELECT pg_export_snapshot()")))
            for place, url in self.places.items():
                self._read(place, url, snapshot)
            options = ["--format=custom", f"--snapshot={snapshot}", f"--file={target}"]
            _run([program, *options], self.places[Path()])
        engine.dispose()
        return {DUMP: target}


def check_dump(dump: Path) -> None:
    """Read a dump to its end. Raises ConfigError."""
    _run([_program("pg_restore"), "--file=/dev/null", str(dump)], None)


def load_dump(dump: Path, url: str) -> None:
    """Load a dump into an empty database, all of it or nothing. Raises ConfigError."""
    program, engine = _program("pg_restore"), connect(url)
    with engine.connect() as connection:
        if tables := sa.inspect(connection).get_table_names():
            raise ConfigError(
                f"got the database {place_of(engine)}, which has the table {tables[0]!r}; expected "
                "an empty one: make it with createdb."
            )
    engine.dispose()
    options = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"]
    _run([program, *options, str(dump)], url)


def _program(name: str) -> str:
    if (found := shutil.which(name)) is None:
        raise ConfigError(_NO_PROGRAM.format(name))
    return found


def _run(argv: Sequence[str], url: str | None) -> None:
    """Run a program of PostgreSQL; with a `url`, on that database."""
    environment = dict(os.environ)
    if url is not None:
        whole = sa.make_url(url).set(drivername="postgresql")
        if whole.password is not None:
            environment["PGPASSWORD"] = str(whole.password)  # not for all to read in `ps`
        argv = [*argv, f"--dbname={whole._replace(password=None).render_as_string(False)}"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise ConfigError(f"{Path(argv[0]).name} failed: {said}")
