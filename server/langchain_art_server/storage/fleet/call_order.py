"""The order in which calls begin, of all servers of a fleet.

A number of PostgreSQL's sequence, taken when a call begins, is above those of all calls that were
answered before then, whichever server answered them: no clock is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import sqlalchemy as sa

from langchain_art_server.storage.fleet.tables import CALLS_BEGAN
from langchain_art_server.storage.tables import CALLS, CallRecord

if TYPE_CHECKING:
    from langchain_art_server.storage.database import Database

_LAST = sa.text(f"SELECT last_value FROM {CALLS_BEGAN.name}")
_SET = sa.text(f"SELECT setval('{CALLS_BEGAN.name}', :floor)")
_NEXT = sa.select(CALLS_BEGAN.next_value())


def raise_above(engine: sa.Engine, floor: int) -> None:
    """Let the numbers go on above `floor`: above those of a server that was no fleet's."""
    with engine.begin() as connection:
        if connection.execute(_LAST).scalar_one() < floor:
            connection.execute(_SET, {"floor": floor})


async def begin_call(
    database: Database, run: str | None, known: Collection[str]
) -> tuple[int, Sequence[CallRecord]]:
    """A call begins.

    Args:
        database: of the fleet.
        run: the id of the trajectory that it is a call of; None: of none.
        known: the ids of that run's calls whose tokens this server's sampler knows.

    Returns:
        Its number, and the other calls of the run so far, in the order in which they began.
    """

    def read(connection: sa.Connection) -> tuple[int, Sequence[CallRecord]]:
        began = connection.execute(_NEXT).scalar_one()
        if run is None:
            return began, ()
        tagged = sa.select(CALLS.c.id).where(CALLS.c.trajectory_id == run)
        ids = set(connection.scalars(tagged)) - set(known)
        if not ids:
            return began, ()
        others = sa.select(CALLS).where(CALLS.c.id.in_(ids)).order_by(CALLS.c.began)
        return began, [CallRecord.of(row) for row in connection.execute(others)]

    return await database.read(read)
