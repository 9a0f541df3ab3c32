"""``python -m langchain_art_server.backups.restore``, which ``langchain-art restore`` runs."""

# ruff: noqa: D301 - click reads a real backspace in a docstring as "keep these lines apart"
from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from langchain_art.errors import ConfigError
from langchain_art_server.backups.archive import Contents, unpack
from langchain_art_server.backups.backup import own_folder
from langchain_art_server.backups.databases import DUMP, load_dump
from langchain_art_server.backups.restored import check_restored, ended_in_words, told
from langchain_art_server.policies.adapter_store import fsync, make_directory

cli = typer.Typer(add_completion=False)


def restore(archive: Path, data_dir: Path, database_url: str | None) -> tuple[Contents, list[str]]:
    """Restore an archive into a data directory that is not there, or empty: whole or not at all.

    Returns:
        What the archive has, and a line for each thing that was damaged when it was backed up.

    Raises:
        ConfigError: the directory is not empty, or the archive is of a later release.
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


@cli.command()
def main(
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


if __name__ == "__main__":
    cli(prog_name="langchain-art restore")
