"""The check of what was restored, and what the two commands say."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from sqlalchemy.exc import DBAPIError

from langchain_art.errors import ArtError, Damaged
from langchain_art_server.backends.models.adapter_files import check_files
from langchain_art_server.backups.archive import Contents
from langchain_art_server.backups.databases import DUMP, check_dump
from langchain_art_server.scrub import Scrub, databases_of
from langchain_art_server.storage.schema.opening import connect
from langchain_art_server.storage.tables import SCHEMA_VERSION

console = Console(soft_wrap=True, highlight=False, markup=False)


def check_restored(folder: Path, contents: Contents, database_url: str | None) -> list[str]:
    """Open what was restored, and check it as ``langchain-art scrub`` does.

    A dump of PostgreSQL is only read to its end if there is no `database_url` that it is loaded
    into. Of a database of an earlier schema the rows are not checked.

    Returns:
        A line for each thing that was damaged before it was backed up.

    Raises:
        ConfigError: the dump cannot be read.
    """
    opens = contents.schema == SCHEMA_VERSION
    if contents.database == "postgresql" and database_url is None:
        check_dump(folder / DUMP)
        opens = False
    if opens:
        places = databases_of(folder, database_url)
        return [line for place, url in places for line in Scrub(place, url).run()]
    lines = list[str]()
    for place, versions in contents.versions.items():
        for name in versions:
            policy, _, version = name.partition("@")
            try:
                check_files(folder / place / "adapters" / policy / version)
            except Damaged as error:
                lines.append(str(error))
        if contents.database == "sqlite":
            lines += _check_file(f"sqlite:///{folder / place / 'art.sqlite3'}")
    return lines


def _check_file(url: str) -> list[str]:
    engine = connect(url)
    with engine.connect() as connection:
        found = list(connection.exec_driver_sql("PRAGMA integrity_check").scalars())
    engine.dispose()
    return [f"database: {problem}" for problem in found if problem != "ok"]


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
