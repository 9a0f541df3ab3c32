"""``python -m langchain_art_server.backups``: the commands ``backup`` and ``scrub``.

A backup is a data directory on which a server starts. It is of one moment: versions are copied
before the database is copied and again after. A version is published before it is in the database,
and its row is deleted before its files, so each one that the copy names was there before or is
there after; if one came and went in between, both are copied once more. Versions that the copy does
not name are what a killed server leaves, too, and their numbers stay used.

A scrub checks all digests of a data directory: files, manifests, rows. It changes nothing. Both may
run beside a server.
"""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
import typer
from rich.console import Console
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError

from langchain_art.errors import ArtError, ConfigError, Damaged
from langchain_art_server.backends.models.adapter_files import check_files
from langchain_art_server.config import sqlite_url
from langchain_art_server.gateway.keys.tenants import FOLDER, url_of
from langchain_art_server.policies.adapter_store import fsync, names_in, versions_below
from langchain_art_server.storage.schema import check_schema, connect, place_of, snapshot
from langchain_art_server.storage.seals import intact
from langchain_art_server.storage.tables import CHECKPOINTS, META, SCHEMA

cli = typer.Typer(add_completion=False)
console = Console(soft_wrap=True, highlight=False, markup=False)
_BACKUP = "restore it from a backup"
DUMP = "database.dump"
#: Copies that are made, at most, because versions came and went meanwhile.
_TRIES = 20
#: Place of a server's or a tenant's directory below the data directory -> its versions.
Named = dict[Path, set[tuple[str, int]]]
DataDir = Annotated[Path, typer.Argument(help="A server's --data-dir.")]
DatabaseUrl = Annotated[
    str | None, typer.Option(help="Its database. Default: SQLite in the directory.")
]


@contextmanager
def ended_in_words() -> Generator[None]:
    """Print a refusal, and a full disk, in words; exit with status 1."""
    try:
        yield
    except (ArtError, OSError, sqlite3.Error, DBAPIError) as error:
        why = error.orig if isinstance(error, DBAPIError) else error
        words = f"{type(error).__name__}: {why}"
        Console(stderr=True).print(words, soft_wrap=True, markup=False, highlight=False)
        sys.exit(1)


def back_up(data_dir: Path, target: Path, database_url: str | None) -> tuple[Named, list[str]]:
    """Copy a data directory to a new one, whether or not a server runs on it: whole or not at all.

    Returns:
        The versions that the copy's databases name, and a line for each thing that is damaged.

    Raises:
        ConfigError: the target exists or cannot be made, or what is to be backed up is not this
            server's.
    """
    require_data_dir(data_dir, database_url)
    places = {one.relative_to(data_dir): url for one, url in databases_of(data_dir, database_url)}
    is_sqlite = sa.make_url(places[Path()]).get_backend_name() == "sqlite"
    target = target.absolute()
    partial = target.with_name(f"{target.name}.partial")
    if target.exists():
        raise ConfigError(f"got the backup {str(target)!r}, which exists; expected a new name")
    try:
        partial.mkdir()
    except FileExistsError as error:
        raise ConfigError(
            f"{partial} cannot be made: it is there. If no other backup writes it, one was killed: "
            "remove it."
        ) from error
    except OSError as error:
        raise ConfigError(f"{partial} cannot be made: {error}") from error
    try:
        missing: set[tuple[Path, str, int]] = set()
        for _ in range(_TRIES):
            _copy_versions(data_dir, partial, places)
            named = (_copy_sqlite if is_sqlite else _dump_postgresql)(partial, places)
            there = _copy_versions(data_dir, partial, places)
            former, missing = missing, _flat(named) - there
            if missing <= former:  # none is missing, or the server has lost them
                break
        else:
            raise ConfigError(
                f"Versions were published and removed {_TRIES} times while the backup was made. "
                "Try again with a higher keep_checkpoints, or while less is trained."
            )
        for place in named:  # numbers that were used
            notes = Path(place, "adapters", ".deleted")
            for name in names_in(data_dir / notes):
                (partial / notes).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(data_dir / notes / name, partial / notes / name)
        damaged = [line for place in named for line in _check_copy(partial / place, named[place])]
        for path in [*partial.rglob("*"), partial]:
            fsync(path)
        partial.rename(target)
        fsync(target.absolute().parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return named, damaged


def _flat(named: Named) -> set[tuple[Path, str, int]]:
    return {(place, *one) for place, some in named.items() for one in some}


def _copy_versions(
    data_dir: Path, folder: Path, places: dict[Path, str]
) -> set[tuple[Path, str, int]]:
    """Copy the versions that the copy lacks. Returns all that it has."""
    adapters = {place: data_dir / place / "adapters" for place in places}
    for place, policy, version in _flat({p: versions_below(root) for p, root in adapters.items()}):
        source = adapters[place] / policy / str(version)
        target = folder / place / "adapters" / policy / str(version)
        if target.exists():
            continue
        target.mkdir(parents=True)
        try:
            for file in source.iterdir():
                shutil.copyfile(file, target / file.name)
        except FileNotFoundError:
            pass
        if not source.is_dir():  # it is moved away before its first file is removed
            shutil.rmtree(target)
    return _flat({place: versions_below(folder / place / "adapters") for place in places})


def _copy_sqlite(folder: Path, places: dict[Path, str]) -> Named:
    """Copy each database by SQLite's backup, in one read transaction; the server goes on."""
    named: Named = {}
    for place, url in places.items():
        file, target = Path(sa.make_url(url).database or ""), folder / place / "art.sqlite3"
        if place != Path() and not file.is_file():
            continue  # the tenant is being made
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        engine = connect(url)
        with engine.connect() as connection, closing(sqlite3.connect(target)) as copy:
            connection.connection.driver_connection.backup(copy)  # type: ignore[union-attr]
        engine.dispose()
        _name(named, place, sqlite_url(folder / place))
    return named


def _dump_postgresql(folder: Path, places: dict[Path, str]) -> Named:
    """Dump all schemas by ``pg_dump``, and read what they name, in one exported snapshot."""
    if (program := shutil.which("pg_dump")) is None:
        raise ConfigError(
            "got a database of PostgreSQL, whose program 'pg_dump' is not on the PATH. Install its "
            "client (Debian: postgresql-client), of the server's release or a later one."
        )
    named: Named = {}
    url = sa.make_url(places[Path()]).set(drivername="postgresql")
    engine = connect(places[Path()])
    with snapshot(engine.connect()) as connection:
        exported = str(connection.scalar(sa.text("SELECT pg_export_snapshot()")))
        for place, one in places.items():
            _name(named, place, one, exported)
        argv = [program, "--format=custom", f"--snapshot={exported}", f"--file={folder / DUMP}"]
        argv.append(f"--dbname={url._replace(password=None).render_as_string(False)}")
        # Not for all to read in `ps`.
        secret = {} if url.password is None else {"PGPASSWORD": str(url.password)}
        done = subprocess.run(argv, env=os.environ | secret, capture_output=True, text=True)
    engine.dispose()
    if done.returncode:
        raise ConfigError(f"pg_dump ended with status {done.returncode}: {done.stderr.strip()}")
    return named


def _name(named: Named, place: Path, url: str, exported: str | None = None) -> None:
    """Note what a database names, unless it has no tables, since its tenant is being made."""
    engine = connect(url)
    with snapshot(engine.connect()) as connection:
        if exported:
            connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{exported}'")
        if place == Path() or sa.inspect(connection).has_table(SCHEMA.name):
            check_schema(connection)
            rows = connection.execute(sa.select(CHECKPOINTS.c.policy, CHECKPOINTS.c.version))
            named[place] = {(row.policy, row.version) for row in rows}
    engine.dispose()


def _check_copy(directory: Path, named: set[tuple[str, int]]) -> Iterator[str]:
    if (directory / "art.sqlite3").is_file():
        yield from Scrub(directory, sqlite_url(directory)).run()
    else:
        yield from (line for _, line in damaged_versions(directory / "adapters", named))


@cli.command("backup")
def back_up_server(
    data_dir: DataDir,
    target: Annotated[Path, typer.Argument(help="A new directory, such as art-2026-11-25.")],
    database_url: DatabaseUrl = None,
) -> None:
    """Back up a server, which may run meanwhile: one moment of its database, and its adapters.

    The backup has the runs, calls, jobs, reviews, policies, hashed API keys and adapters of all
    tenants. It is checked as by `scrub` before it gets its name. To restore it, start a server on
    it, or on a copy of it. Of PostgreSQL it has a dump beside the adapters: load it with pg_restore
    first. Exit status 1 if it could not be made, or if what was backed up is damaged.

    \b
    Examples:
      langchain-art backup art-data /backups/art-2026-11-25
      langchain-art serve MODEL --data-dir /backups/art-2026-11-25
    """
    os.umask(0o077)
    with ended_in_words():
        named, damaged = back_up(data_dir, target, database_url)
    for line in damaged:
        console.print(line)
    versions, tenants = sum(map(len, named.values())), len(named) - 1
    console.print(
        f"{target}: {versions} versions, {tenants} tenants beside the server's own; "
        f"checked: {len(damaged)} damaged, as in the server's own data."
    )
    sys.exit(1 if damaged else 0)


class Scrub:
    """Progress of the check so far, and how much is damaged."""

    def __init__(self, data_dir: Path, url: str) -> None:
        self._adapters, self._engine = data_dir / "adapters", connect(url)
        self._kept = set[tuple[str, int]]()
        self.rows = self.versions = 0

    def run(self) -> Iterator[str]:
        """Check everything. Yields a line for each thing that is damaged."""
        try:
            with self._engine.connect() as connection:
                if connection.dialect.name == "sqlite":
                    for problem in connection.exec_driver_sql("PRAGMA integrity_check").scalars():
                        if problem != "ok":
                            yield f"database: {problem}; {_BACKUP}"
                check_schema(connection)
                for table in META.sorted_tables:
                    if table is not SCHEMA:
                        yield from self._check_rows(connection, table)
        except DatabaseError as error:
            if isinstance(error, OperationalError) and self._engine.dialect.name == "postgresql":
                raise  # it cannot be reached, which is no damage
            yield f"database {place_of(self._engine)}: {error.orig}; {_BACKUP}"
        finally:
            self._engine.dispose()
        there = versions_below(self._adapters) | self._kept
        self.versions = len(there)
        damaged = dict(damaged_versions(self._adapters, there))
        for (policy, _), words in damaged.items():
            whole = sorted(version for name, version in self._kept - set(damaged) if name == policy)
            yield words + (f", or roll back to one of {whole}" if whole else "")

    def _check_rows(self, connection: sa.Connection, table: sa.Table) -> Iterator[str]:
        query = sa.select(table).execution_options(yield_per=100)
        for row in connection.execute(query):
            self.rows += 1
            try:
                intact(table, row)
            except Damaged as error:
                yield f"{str(error).partition(':')[0]}; {_BACKUP}"
                continue
            if table is CHECKPOINTS:
                self._kept.add((row.policy, row.version))


def damaged_versions(
    adapters: Path, versions: set[tuple[str, int]]
) -> Iterator[tuple[tuple[str, int], str]]:
    """Each of the versions whose files are missing or not what was written, with its line."""
    for policy, version in sorted(versions):
        try:
            check_files(adapters / policy / str(version))
        except Damaged as error:
            yield (policy, version), f"{str(error).rstrip('.')}; {_BACKUP}"


def require_data_dir(data_dir: Path, database_url: str | None) -> None:
    """Raises ConfigError if no server has stored anything there."""
    if database_url is not None:
        engine = connect(database_url)
        if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").is_file():
            raise ConfigError(f"got the database {place_of(engine)}, which is not there")
    elif not (data_dir / "art.sqlite3").is_file():
        raise ConfigError(
            f"got {str(data_dir)!r}, expected the --data-dir of a server: it has no "
            "art.sqlite3. For another database give --database-url."
        )


def databases_of(data_dir: Path, database_url: str | None) -> Iterator[tuple[Path, str]]:
    """The directory and database of the server, and of each of its tenants."""
    yield data_dir, database_url or sqlite_url(data_dir)
    for place in (data_dir / FOLDER / name for name in names_in(data_dir / FOLDER)):
        if place.is_dir():
            yield place, url_of(database_url, place.name) or sqlite_url(place)


@cli.command("scrub")
def scrub_data(data_dir: DataDir, database_url: DatabaseUrl = None) -> None:
    """Check all that a server has stored against the digests that it wrote.

    Says what is damaged and from what it can be restored; exit status 1 if anything is. It changes
    nothing, and may run beside the server.

    \b
    Example:
      langchain-art scrub art-data
    """
    damaged = rows = versions = 0
    with ended_in_words():
        require_data_dir(data_dir, database_url)
        for place, url in databases_of(data_dir, database_url):
            scrub = Scrub(place, url)
            for line in scrub.run():
                damaged += 1
                console.print(line)
            rows, versions = rows + scrub.rows, versions + scrub.versions
    console.print(f"{rows} rows and {versions} versions checked, {damaged} damaged")
    sys.exit(1 if damaged else 0)


if __name__ == "__main__":
    cli(prog_name="langchain-art")
