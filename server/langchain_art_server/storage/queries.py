"""Queries for all tables: the time, more ids than a statement takes parameters, lists by page.

Pages are bounded in items and in bytes, so that no list is larger than memory allows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from langchain_art.errors import Damaged, InvalidRequest
from langchain_art_server.storage.tables import JOBS

#: Ids in one statement: SQLite limits a statement's parameters.
MAX_PARAMETERS = 500


def now_of(connection: sa.Connection) -> float:
    """The database's time, in seconds since the epoch: the same for all servers that use it."""
    if connection.dialect.name == "postgresql":
        clock = sa.func.extract("epoch", sa.func.clock_timestamp())
        return float(connection.execute(sa.select(clock)).scalar_one())
    return time.time()


def select_among(
    connection: sa.Connection,
    query: sa.Select[*tuple[Any, ...]],
    column: sa.Column[str],
    ids: Iterable[str],
) -> Iterator[sa.Row[Any]]:
    """Rows of `query` whose `column` is among `ids`."""
    distinct = list(dict.fromkeys(ids))
    for start in range(0, len(distinct), MAX_PARAMETERS):
        some = column.in_(distinct[start : start + MAX_PARAMETERS])
        yield from connection.execute(query.where(some))


def count_of(connection: sa.Connection, rows: sa.FromClause, *where: sa.ColumnElement[bool]) -> int:
    """Number of the rows that `where` chooses."""
    query = sa.select(sa.func.count()).select_from(rows).where(*where)
    return connection.execute(query).scalar_one()


def counts_by(
    connection: sa.Connection, column: sa.Column[str], *where: sa.ColumnElement[bool]
) -> dict[str, int]:
    """Number of the rows that `where` chooses, by the value of a column."""
    query = sa.select(column, sa.func.count()).where(*where).group_by(column)
    return {row[0]: row[1] for row in connection.execute(query)}


def with_jobs(marks: sa.Table) -> sa.Select[*tuple[Any, ...]]:
    """Marks of training, each with its job's version as `made` and the policy of it as `of`."""
    job = JOBS.c.target_version.label("made"), JOBS.c.policy.label("of")
    return sa.select(marks, *job).join(JOBS, JOBS.c.id == marks.c.job_id, isouter=True)


log = logging.getLogger(__name__)
T = TypeVar("T")
#: A page ends before the item that would make it larger; its first item may be larger by itself.
MAX_PAGE_BYTES = 8 << 20
#: The most items of one.
MAX_PAGE = 1000


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some of a list, and whether more follow."""

    items: list[T]
    last_id: str | None
    """The cursor: the next page begins after the row of this id."""
    has_more: bool
    damaged: tuple[str, ...] = ()
    """A message for each row that is damaged, and so not among the items."""


def take_page(
    connection: sa.Connection,
    query: sa.Select[*tuple[Any, ...]],
    limit: int,
    cursor: str,
    read: Callable[[sa.Row[Any]], tuple[T, int]],
    *,
    at_once: int = 100,
) -> Page[T]:
    """A page of the first rows: at most `limit`, those that are damaged and left out included.

    `cursor` is the column of a row's id; `read` gives its item and the item's bytes, or raises
    Damaged; `at_once` rows are in memory.
    """
    items, damaged = list[T](), list[str]()
    last, size, options = None, 0, {"yield_per": at_once}
    with connection.execute(query.limit(limit + 1), execution_options=options) as rows:
        for row in rows:
            if len(items) + len(damaged) == limit:
                return Page(items, last, True, tuple(damaged))
            try:
                item, more = read(row)
            except Damaged as error:
                damaged.append(str(error))
                log_once(str(error))
            else:
                size += more
                if items and size > MAX_PAGE_BYTES:
                    return Page(items, last, True, tuple(damaged))
                items.append(item)
            last = str(getattr(row, cursor))
    return Page(items, last, False, tuple(damaged))


@lru_cache(maxsize=MAX_PAGE)
def log_once(message: str) -> None:
    """Log it, unless it is among the last that were logged."""
    log.error("A list leaves a row out. %s", message)


def behind(
    connection: sa.Connection, table: sa.Table, after: str | None, *, newest_first: bool = False
) -> sa.ColumnElement[bool]:
    """The condition of the rows that come after the one of the id `after`; None: all do.

    Raises InvalidRequest: there is no such row, or no longer.
    """
    if after is None:
        return sa.true()
    number = table.c.number
    last = connection.scalar(sa.select(number).where(table.c.id == after))
    if last is None:
        raise InvalidRequest(
            f"got after={after!r}, expected the last_id of a page; if it was deleted meanwhile, "
            "begin again without `after`",
            param="after",
        )
    return number < last if newest_first else number > last
