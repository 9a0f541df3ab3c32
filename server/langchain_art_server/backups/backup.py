"""``python -m langchain_art_server.backups.backup``, which ``langchain-art backup`` runs."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
import typer

from langchain_art.errors import ConfigError
from langchain_art_server.backups.archive import Contents, unpack, write_archive
from langchain_art_server.backups.cut import Cut
from langchain_art_server.backups.databases import PostgresDump, SqliteFiles
from langchain_art_server.backups.restored import check_restored, ended_in_words, told
from langchain_art_server.policies.adapter_store import fsync
from langchain_art_server.scrub import databases_of, require_data_dir

cli = typer.Typer(add_completion=False)


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


@cli.command()
def main(
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


if __name__ == "__main__":
    cli(prog_name="langchain-art backup")
