"""``python -m langchain_art_server.backups.commands``: backup, restore and scrub.

They are commands of ``langchain-art``. A scrub checks all digests of a data directory: files,
manifests, rows. It changes nothing, so it may run beside a server.
"""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import sys

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
import typer
from rich.console import Console
from sqlalchemy.exc import DatabaseError, DBAPIError

from langchain_art.errors import ArtError, ConfigError, Damaged
from langchain_art_server.backends.models.adapter_files import check_files
from langchain_art_server.backups.cut import (
    DUMP,
    Contents,
    Cut,
    PostgresDump,
    SqliteFiles,
    check_dump,
    load_dump,
    unpack,
    write_archive,
)
from langchain_art_server.config import sqlite_url
from langchain_art_server.gateway.keys.tenants import FOLDER, url_of
from langchain_art_server.policies.adapter_store import (
    fsync,
    make_directory,
    names_in,
    versions_below,
)
from langchain_art_server.storage.schema import check_schema, connect, place_of
from langchain_art_server.storage.seals import intact
from langchain_art_server.storage.tables import CHECKPOINTS, META, SCHEMA

cli = typer.Typer(add_completion=False)
console = Console(soft_wrap=True, highlight=False, markup=False)
_BACKUP = "restore it from a backup"


@contextmanager
def own_folder(path: Path, what: str) -> Generator[Path]:
    """A new empty folder that no other process has; at the end it is removed, unless it has moved.

    What a killed process left in it is removed first.

    Raises:
        ConfigError: another process works in it, or it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{what} cannot be made: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ConfigError(f"{what} is being made by another process; wait for its end.") from error
    try:
        for one in path.iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        yield path
    finally:
        if path.exists():
            shutil.rmtree(path)
        os.close(handle)


def back_up(data_dir: Path, archive: Path, database_url: str | None) -> tuple[Contents, list[str]]:
    """Back up a data directory, whether or not a server runs on it.

    Returns:
        What the archive has, and a line for each thing that was damaged in the data directory.

    Raises:
        ConfigError: the archive exists, or what is to be backed up is not this server's.
        Damaged: the archive could not be read back as it was written.
    """
    require_data_dir(data_dir, database_url)
    if archive.exists():
        raise ConfigError(f"got the archive {str(archive)!r}, which exists; expected a new name")
    places = {one.relative_to(data_dir): url for one, url in databases_of(data_dir, database_url)}
    is_sqlite = sa.make_url(places[Path()]).get_backend_name() == "sqlite"
    databases = (SqliteFiles if is_sqlite else PostgresDump)(places)
    partial = archive.with_name(f"{archive.name}.partial")
    with (
        own_folder(data_dir / ".backup", f"A backup of {data_dir}") as pins,
        own_folder(partial, f"The archive {archive}") as work,
    ):
        cut = Cut(data_dir, places, pins, work)
        cut.take(databases)
        about = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "database": "sqlite" if is_sqlite else "postgresql",
            "versions": {
                str(place): sorted(f"{policy}@{version}" for policy, version in named)
                for place, named in cut.named.items()
            },
        }
        written, scratch = work / "archive", work / "restored"
        contents = write_archive(written, cut.files, about)
        scratch.mkdir()
        unpack(written, scratch)
        damaged = check_restored(scratch, contents, None)
        if archive.exists():  # since then
            raise ConfigError(f"got the archive {str(archive)!r}, which another process made")
        written.rename(archive)
        fsync(archive.parent)
    return contents, damaged


@cli.command("backup")
def back_up_server(
    data_dir: Annotated[Path, typer.Argument(help="A server's --data-dir.")],
    archive: Annotated[Path, typer.Argument(help="A new file, such as art-2026-11-25.tar.")],
    database_url: Annotated[
        str | None, typer.Option(help="Its database. Default: SQLite in the directory.")
    ] = None,
) -> None:
    """Back up a server, which may run meanwhile: one moment of its database, and its adapters.

    The archive has the runs, calls, jobs, reviews, policies, hashed API keys and adapters of all
    tenants. It is restored into a scratch folder beside it and checked before it gets its name.
    Exit status 1 if it could not be made, or if what was backed up is damaged.

    \b
    Example:
      langchain-art backup art-data /backups/art-2026-11-25.tar
    """
    os.umask(0o077)
    with ended_in_words():
        contents, damaged = back_up(data_dir, archive, database_url)
        size = archive.stat().st_size
        told(contents, damaged, f"{archive} ({size / 1e6:,.1f} MB)", "backed up")


def check_restored(folder: Path, contents: Contents, database_url: str | None) -> list[str]:
    """Open what was restored, and check it as ``langchain-art scrub`` does.

    A dump of PostgreSQL is only read to its end if there is no `database_url` that it is loaded
    into.

    Returns:
        A line for each thing that was damaged before it was backed up.

    Raises:
        ConfigError: the dump cannot be read.
    """
    if contents.database == "sqlite" or database_url is not None:
        places = databases_of(folder, database_url)
        return [line for place, url in places for line in Scrub(place, url).run()]
    check_dump(folder / DUMP)
    lines = list[str]()
    for place, versions in contents.versions.items():
        for name in versions:
            policy, _, version = name.partition("@")
            try:
                check_files(folder / place / "adapters" / policy / version)
            except Damaged as error:
                lines.append(str(error))
    return lines


def told(contents: Contents, damaged: list[str], where: str, done: str) -> None:
    """Print what was backed up or restored; exit with status 1 if a part of it is damaged."""
    versions = sum(map(len, contents.versions.values()))
    tenants = len(contents.versions) - 1
    checked = "restored into a scratch folder and checked"
    if contents.database == "postgresql":
        checked = "read back; the adapters are checked, the dump was read and not loaded"
    if done == "restored":
        checked = "checked"
    console.print(
        f"{where}: {done} as of {contents.time}, schema version {contents.schema}, "
        f"{len(contents.files)} files, {versions} versions"
        + (f", {tenants} tenants beside the server's own" if tenants else "")
        + f". {checked.capitalize()}: {len(damaged)} damaged"
    )
    for line in damaged:
        console.print(line)
    if damaged:
        console.print("The server's own data was damaged so when it was backed up.")
        sys.exit(1)


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


def restore(archive: Path, data_dir: Path, database_url: str | None) -> tuple[Contents, list[str]]:
    """Restore an archive into a data directory that is not there, or empty: whole or not at all.

    Returns:
        What the archive has, and a line for each thing that was damaged when it was backed up.

    Raises:
        ConfigError: the directory is not empty, or the archive is of another release.
        Damaged: the archive is not what was written; names the file.
    """
    if data_dir.exists() and (not data_dir.is_dir() or any(data_dir.iterdir())):
        raise ConfigError(
            f"got the data directory {str(data_dir)!r}, which is not empty; expected a new one. "
            "Move it away first: a restore replaces nothing."
        )
    make_directory(data_dir.parent.resolve())
    partial = data_dir.with_name(f"{data_dir.name}.partial")
    with own_folder(partial, f"The data directory {data_dir}"):
        contents = unpack(archive, partial)
        dump = partial / DUMP
        if dump.exists() != (database_url is not None):
            needed = "needs" if dump.exists() else "takes no"
            raise ConfigError(
                f"got an archive with a database of {contents.database}, which {needed} "
                "--database-url; SQLite's is restored as DATA_DIR/art.sqlite3"
            )
        if database_url is not None:
            load_dump(dump, database_url)
            dump.unlink()
        damaged = check_restored(partial, contents, database_url)
        for path in [*partial.rglob("*"), partial]:
            fsync(path)
        try:
            partial.rename(data_dir)
        except OSError as error:
            raise ConfigError(f"{data_dir} was written to meanwhile: {error}") from error
        fsync(data_dir.parent)
    return contents, damaged


@cli.command("restore")
def restore_archive(
    archive: Annotated[Path, typer.Argument(help="Of `langchain-art backup`.")],
    data_dir: Annotated[Path, typer.Argument(help="A new directory, or an empty one.")],
    database_url: Annotated[
        str | None, typer.Option(help="Of PostgreSQL: an empty database, if it was one.")
    ] = None,
) -> None:
    """Restore a backup into a new data directory, and check it: whole, or not at all.

    Then start the server on it as before. What the server did after the backup is not in it.

    \b
    Example:
      langchain-art restore /backups/art-2026-11-25.tar art-data
    """
    os.umask(0o077)
    with ended_in_words():
        contents, damaged = restore(archive, data_dir, database_url)
        told(contents, damaged, str(data_dir), "restored")


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
            yield f"database {place_of(self._engine)}: {error.orig}; {_BACKUP}"
        finally:
            self._engine.dispose()
        kept = self._kept
        there = versions_below(self._adapters)
        for policy in sorted({name for name, _ in there | kept}):
            yield from self._check_policy(
                policy, *({v for name, v in some if name == policy} for some in (there, kept))
            )

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

    def _check_policy(self, policy: str, there: set[int], kept: set[int]) -> Iterator[str]:
        damaged: dict[int, str] = {}
        for version in sorted(there | kept):
            self.versions += 1
            try:
                check_files(self._adapters / policy / str(version))
            except Damaged as error:
                damaged[version] = str(error).rstrip(".")
        whole = sorted(there & kept - set(damaged))
        for words in damaged.values():
            yield f"{words}; {_BACKUP}" + (f", or roll back to one of {whole}" if whole else "")


def require_data_dir(data_dir: Path, database_url: str | None) -> None:
    """Raises ConfigError if no server has stored anything there."""
    if database_url is None and not (data_dir / "art.sqlite3").is_file():
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
def scrub_data(
    data_dir: Annotated[Path, typer.Argument(help="A server's --data-dir.")],
    database_url: Annotated[
        str | None, typer.Option(help="Its database. Default: SQLite in the directory.")
    ] = None,
) -> None:
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
