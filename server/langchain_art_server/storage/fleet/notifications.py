"""Notifications between the servers of one PostgreSQL (LISTEN and NOTIFY).

A notification says only that there is something to be read. It is sent when the transaction is
committed, and may be lost: a server that listens also looks now and then without one.
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


def notify(connection: sa.Connection) -> None:
    """Have the other servers look when this transaction is committed."""
    connection.execute(sa.text(f"SELECT pg_notify('{_CHANNEL}', '')"))


async def listen(engine: sa.Engine, look: Callable[[], None]) -> None:
    """Call `look` at each notification, for ever."""
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
            log.warning("No notifications from the database (%s); it is polled meanwhile.", error)
        await asyncio.sleep(_RETRY_SECONDS)
