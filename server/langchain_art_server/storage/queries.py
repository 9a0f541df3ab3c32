"""Queries for all tables: of the time, and of more ids than a statement takes parameters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa

from langchain_art_server.storage.tables import JOBS

#: Ids in one statement: SQLite limits a statement's parameters.
MAX_PARAMETERS = 500
_IDENTITY = sa.text(
    "SELECT system_identifier::text || '/' || oid::text FROM pg_control_system(), pg_database "
    "WHERE datname = current_database()"
)


def now_of(connection: sa.Connection) -> float:
    """The database's time, in seconds since the epoch: the same for all servers that use it."""
    if connection.dialect.name == "postgresql":
        clock = sa.func.extract("epoch", sa.func.clock_timestamp())
        return float(connection.execute(sa.select(clock)).scalar_one())
    return time.time()


def database_identity(connection: sa.Connection) -> str:
    """PostgreSQL's number of the cluster and of the database in it; a restored copy has another."""
    return str(connection.execute(_IDENTITY).scalar_one())


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


def with_jobs(marks: sa.Table) -> sa.Select[*tuple[Any, ...]]:
    """Marks of training, each with its job's version as `made` and the policy of it as `of`."""
    job = JOBS.c.target_version.label("made"), JOBS.c.policy.label("of")
    return sa.select(marks, *job).join(JOBS, JOBS.c.id == marks.c.job_id, isouter=True)
