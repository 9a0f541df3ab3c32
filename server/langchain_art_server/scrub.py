"""``python -m langchain_art_server.scrub``, which ``langchain-art scrub`` runs with its arguments.

Checks all digests of a data directory: files, manifests, rows. It changes nothing, so it may run
beside a server.
"""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
import typer
from rich.console import Console
from sqlalchemy.exc import DatabaseError

from langchain_art.errors import ArtError, ConfigError, Damaged
from langchain_art_server.backends.models.adapter_files import check_files
from langchain_art_server.config import sqlite_url
from langchain_art_server.gateway.keys.tenants import FOLDER, url_of
from langchain_art_server.policies.mirrored_store import objects_of
from langchain_art_server.storage.schema import check_schema, connect, place_of
from langchain_art_server.storage.seals import intact
from langchain_art_server.storage.tables import CHECKPOINTS, META, SCHEMA

_BACKUP = "restore it from a backup"
console = Console(soft_wrap=True, highlight=False, markup=False)
cli = typer.Typer(add_completion=False)


class Scrub:
    """Progress of the check so far, and how much is damaged."""

    def __init__(self, data_dir: Path, url: str) -> None:
        self._adapters, self._engine = data_dir / "adapters", connect(url)
        self._objects = objects_of(self._adapters)
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
        there = _published(self._adapters) if self._objects is None else self._objects.published()
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
                self._check_version(policy, version)
            except Damaged as error:
                damaged[version] = str(error).rstrip(".")
        whole = sorted(there & kept - set(damaged))
        for words in damaged.values():
            yield f"{words}; {_BACKUP}" + (f", or roll back to one of {whole}" if whole else "")

    def _check_version(self, policy: str, version: int) -> None:
        """Raises Damaged. What is in an object store is downloaded for it."""
        if self._objects is None:
            check_files(self._adapters / policy / str(version))
            return
        with tempfile.TemporaryDirectory(prefix="langchain-art-") as scratch:
            folder = Path(scratch, policy, str(version))
            folder.mkdir(parents=True)
            if not self._objects.copy(policy, version, folder):
                raise Damaged(f"{policy}@{version} is not in {self._objects}.")


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return [one for one in path.iterdir() if one.is_dir() and not one.name.startswith(".")]


def _published(adapters: Path) -> set[tuple[str, int]]:
    found = (two for one in _folders(adapters) for two in _folders(one) if two.name.isdecimal())
    return {(one.parent.name, int(one.name)) for one in found}


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
    for place in sorted(_folders(data_dir / FOLDER)):
        yield place, url_of(database_url, place.name) or sqlite_url(place)


@cli.command()
def main(
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
    try:
        require_data_dir(data_dir, database_url)
        damaged = rows = versions = 0
        for place, url in databases_of(data_dir, database_url):
            scrub = Scrub(place, url)
            for line in scrub.run():
                damaged += 1
                console.print(line)
            rows, versions = rows + scrub.rows, versions + scrub.versions
    except ArtError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", soft_wrap=True)
        sys.exit(1)
    console.print(f"{rows} rows and {versions} versions checked, {damaged} damaged")
    sys.exit(1 if damaged else 0)


if __name__ == "__main__":
    cli(prog_name="langchain-art scrub")
