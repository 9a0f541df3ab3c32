"""Queries of more ids than a statement takes parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa

#: Ids in one statement: SQLite limits a statement's parameters.
MAX_PARAMETERS = 500


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
