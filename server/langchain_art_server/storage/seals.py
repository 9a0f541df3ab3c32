"""A digest in every row, of all that it holds: a row that the disk changed is not used.

`insert` and `update` compute it, `intact` checks it. What it does not show is a row that is gone;
SQLite's own check of its pages does (``langchain-art scrub``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from langchain_art.errors import Damaged

#: The column of the digest, and the one of numbers that the database gives.
SEAL, NUMBER = "seal", "number"
RowT = TypeVar("RowT", bound=sa.Row[Any])


class Blob(sa.LargeBinary):
    """Bytes, as the drivers give them: SQLAlchemy would convert what a damaged row has instead."""

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> None:
        """None: there is nothing to convert."""


def seal(table: sa.Table, row: Mapping[str, Any]) -> bytes:
    """SHA-256 of a row's values."""
    plain: list[Any] = []
    blobs: list[bytes] = []
    for column in table.columns:
        name = column.name
        if name in (SEAL, NUMBER):
            continue
        value = row.get(name)
        if isinstance(value, bytes):
            blobs.append(value)
            value = len(value)
        elif isinstance(value, int) and isinstance(column.type, sa.Float):
            value = float(value)  # as it is read
        plain.append(value)
    digest = hashlib.sha256(repr(plain).encode())
    for blob in blobs:
        digest.update(blob)
    return digest.digest()


def sealed(table: sa.Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its seal."""
    return {**row, SEAL: seal(table, row)}


def insert(connection: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert rows with their seals."""
    if whole := [sealed(table, row) for row in rows]:
        connection.execute(sa.insert(table), whole)


def update(
    connection: sa.Connection,
    table: sa.Table,
    where: sa.ColumnElement[bool],
    values: Mapping[str, Any],
) -> None:
    """Change the rows that `where` chooses, and their seals.

    Raises:
        Damaged: one is damaged; a new seal would hide it.
    """
    for row in connection.execute(sa.select(table).where(where)).all():
        known = values_of(table, intact(table, row))
        mine = sa.and_(*(key == known[key.name] for key in table.primary_key))
        changed = sealed(table, {**known, **values})
        connection.execute(sa.update(table).where(mine).values(changed))


def intact(table: sa.Table, row: RowT) -> RowT:
    """The row, if it is what was written.

    Raises:
        Damaged: it is not.
    """
    known = values_of(table, row)
    if known[SEAL] != seal(table, known):
        raise Damaged(
            f"The {title(table, known)} in the database is damaged: it is not what was written, "
            "and is not used. Put the database back from a backup; `langchain-art scrub` lists all "
            "that is damaged."
        )
    return row


def values_of(table: sa.Table, row: sa.Row[Any]) -> dict[str, Any]:
    """The values of a row by column."""
    return {column.name: getattr(row, column.name) for column in table.columns}


def title(table: sa.Table, row: Mapping[str, Any]) -> str:
    """What a row is called in messages: ``call 'chatcmpl-1'``."""
    names: Sequence[str] = table.info["named_by"]
    return f"{table.info['kind']} {' '.join(repr(row[name]) for name in names)}"
