"""News between the servers of one PostgreSQL: who writes tells, and the others look (NOTIFY).

News say only that there is something to be read. They are told when the transaction is committed,
and may be lost: who waits for them looks now and then without any, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

log = logging.getLogger(__name__)
_CHANNEL = "langchain_art"
#: Seconds until a lost connection is made anew.
_RETRY_SECONDS = 1.0


def tell(connection: sa.Connection) -> None:
    """Have the other servers look when this transaction is committed."""
    connection.execute(sa.text(f"SELECT pg_notify('{_CHANNEL}', '')"))


async def listen(engine: sa.Engine, look: Callable[[], None]) -> None:
    """Call `look` at each news, for ever."""
    psycopg: Any = engine.dialect.dbapi
    args, options = engine.dialect.create_connect_args(engine.url)
    while True:
        try:
            made = await psycopg.AsyncConnection.connect(*args, **options, autocommit=True)
            async with made as connection:
                await connection.execute(f"LISTEN {_CHANNEL}")
                look()
                async for _ in connection.notifies():
                    look()
        except (psycopg.Error, OSError) as error:
            log.warning("No news from the database (%s); it is asked all the same.", error)
        await asyncio.sleep(_RETRY_SECONDS)
