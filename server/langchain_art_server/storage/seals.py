"""A digest in every row, of all that it holds: a row that the disk changed is not used.

`insert` and `update` compute it, `intact` checks it. What it does not show is a row that is gone;
SQLite's own check of its pages does (``langchain-art scrub``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import sqlalchemy as sa

from langchain_art.errors import Damaged

#: The column of the digest, and the one of numbers that the database gives.
SEAL, NUMBER = "seal", "number"
RowT = TypeVar("RowT", bound=sa.Row[Any])
#: Of fewer bytes hashlib keeps the interpreter's lock. Given up for each call's row, it is waited
#: for while the event loop has it, and both threads lose time. From `_LONG` bytes on, the loop
#: should not wait for the hash.
_NO_SWITCH, _LONG = 2047, 1 << 17


class Blob(sa.LargeBinary):
    """Bytes, as the drivers give them: SQLAlchemy would convert what a damaged row has instead."""

    def bind_processor(self, dialect: sa.Dialect) -> None:
        """None: both drivers take bytes as they are."""

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> None:
        """None: there is nothing to convert."""


def seal(table: sa.Table, row: Mapping[str, Any]) -> bytes:
    """SHA-256 of a row's values."""
    names, floats, binary = _columns(table)
    values: list[Any] = [row.get(name) for name in names]
    for index in floats:  # as they are read: SQLite keeps -0.0 as 0
        if isinstance(values[index], (int, float)):  # a damaged row may have text there
            values[index] += 0.0
    blobs: list[bytes] = []
    for index in binary:
        if type(value := values[index]) is bytes:
            blobs.append(value)
            values[index] = len(value)
        elif value is not None:  # a damaged row's, and no length
            values[index] = [value]
    whole, found = b"".join([repr(values).encode(), *blobs]), hashlib.sha256()
    part = _NO_SWITCH if len(whole) < _LONG else len(whole)
    for start in range(0, len(whole), part):
        found.update(whole[start : start + part])
    return found.digest()


@cache
def _columns(table: sa.Table) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """The columns that a seal covers; which are floats, which binary. Once: each call asks."""
    covered = [column for column in table.columns if column.name not in (SEAL, NUMBER)]
    floats, binary = (
        tuple(index for index, one in enumerate(covered) if isinstance(one.type, kind))
        for kind in (sa.Float, sa.LargeBinary)
    )
    return tuple(column.name for column in covered), floats, binary


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

    Raises Damaged: one is damaged; a new seal would hide it.
    """
    # Locked: another server's transaction may not change it in between.
    chosen = sa.select(table).where(where).with_for_update()
    for row in connection.execute(chosen).all():
        known = values_of(table, intact(table, row))
        mine = sa.and_(*(key == known[key.name] for key in table.primary_key))
        changed = sealed(table, {**known, **values})
        connection.execute(sa.update(table).where(mine).values(changed))


def intact(table: sa.Table, row: RowT) -> RowT:
    """The row, if it is what was written. Raises Damaged: it is not."""
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
    """Name of a row in messages: ``call 'chatcmpl-1'``."""
    names: Sequence[str] = table.info["named_by"]
    return f"{table.info['kind']} {' '.join(repr(row[name]) for name in names)}"
