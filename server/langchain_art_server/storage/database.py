"""One database, with one thread that writes and any number that read. By SQLAlchemy.

SQLite (in WAL mode, ``synchronous=FULL``) is the default, PostgreSQL is chosen by URL. Call records
that arrive during a transaction are written together in the next one, so that durability costs one
`fsync`, and two changes of thread, per batch of replies.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DataError, OperationalError

from langchain_art.errors import ConfigError, EngineUnavailable, InvalidRequest
from langchain_art_server.storage.tables import CALLS, META, CallRecord

T = TypeVar("T")
#: PostgreSQL's advisory lock (they are per database) that a server holds.
_ADVISORY_LOCK = int.from_bytes(b"lc-art", "big")


class Database:
    """Reads and writes in threads, for coroutines.

    Args:
        url: SQLAlchemy's; missing tables are created.

    Raises:
        ConfigError: the URL is not one of SQLite or PostgreSQL, the driver is not installed, the
            database cannot be reached, or another server uses it.
    """

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        try:
            self._owner, self._owner_lost = _own(self.engine), False
            META.create_all(self.engine)
        except (ConfigError, OperationalError) as error:
            self.engine.dispose()
            if isinstance(error, ConfigError):
                raise
            place = self.engine.url.render_as_string(hide_password=True)
            raise ConfigError(f"got database_url={place!r}, which fails: {error.orig}") from error
        self._work: queue.SimpleQueue[tuple[Any, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._calls: list[tuple[Sequence[CallRecord], asyncio.Future[None]]] = []
        self._writing_calls = False
        self._writer = threading.Thread(target=self._write_loop, name="store", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write what is queued, then close."""
        self._work.put(None)
        self._writer.join()
        if self._owner is not None:
            self._owner.close()
        self.engine.dispose()

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a transaction of its own. Returns when it is on disk.

        Raises:
            EngineUnavailable: the database cannot be written to; nothing was written.
        """
        return await self._submit(work)

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        """Insert records. Returns, and raises, as `write`."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._calls.append((records, written))
        if not self._writing_calls:
            self._writing_calls = True
            loop.call_soon(self._write_calls)  # with all that come in this turn of the loop
        await written

    def _write_calls(self) -> None:
        batch, self._calls = self._calls, []

        def insert(connection: sa.Connection) -> None:
            rows = [record.row() for records, _ in batch for record in records]
            connection.execute(sa.insert(CALLS), rows)

        def settle(inserted: asyncio.Future[None]) -> None:
            error = inserted.exception()
            for _, written in batch:
                _settle(written, None, error)
            self._writing_calls = bool(self._calls)
            if self._calls:
                inserted.get_loop().call_soon(self._write_calls)

        self._submit(insert).add_done_callback(settle)

    def _submit(self, work: Callable[[sa.Connection], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._work.put((work, future))
        return future

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a thread, on a connection of its own.

        Raises:
            EngineUnavailable: the database cannot be read.
        """

        def run() -> T:
            try:
                with self.engine.connect() as connection:
                    return work(connection)
            except OperationalError as failure:
                raise EngineUnavailable(
                    f"The store could not read ({failure.orig}). Mend the database, then send the "
                    "request again.",
                    retry_after=5,
                ) from failure

        return await asyncio.to_thread(run)

    def _write_loop(self) -> None:
        with self.engine.connect() as connection:
            while (item := self._work.get()) is not None:
                work, future = item
                result, error = self._transact(connection, work)
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)

    def _transact(
        self, connection: sa.Connection, work: Callable[[sa.Connection], Any]
    ) -> tuple[Any, Exception | None]:
        try:
            if self._owner_lost and self._owner is not None:
                self._owner.invalidate()  # closes the connection and so releases the lock
                self._owner, self._owner_lost = _own(self.engine), False
            with connection.begin():
                return work(connection), None
        except OperationalError as failure:  # disk full, read-only, gone
            self._owner_lost = True
            return None, EngineUnavailable(
                f"The store could not write ({failure.orig}); nothing was acknowledged. "
                "Free disk space or mend the database, then send the request again.",
                retry_after=5,
            )
        except ConfigError as failure:  # another server took the lock meanwhile
            return None, EngineUnavailable(str(failure), retry_after=5)
        except DataError as failure:  # PostgreSQL's text holds no NUL
            return None, InvalidRequest(f"The database does not take a value: {failure.orig}")
        except Exception as failure:  # noqa: BLE001 - handed to the caller who waits for it
            return None, failure


def select_among(
    connection: sa.Connection,
    query: sa.Select[*tuple[Any, ...]],
    column: sa.Column[str],
    ids: Iterable[str],
) -> Iterator[sa.Row[Any]]:
    """Rows of `query` whose `column` is among `ids`. SQLite limits a statement's parameters."""
    for part in batched(dict.fromkeys(ids), 500):
        yield from connection.execute(query.where(column.in_(part)))


def batched(values: Iterable[str], size: int) -> Iterator[list[str]]:
    """The values in lists of `size`."""
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        kind = parsed.get_backend_name()
        if kind == "sqlite":
            engine = sa.create_engine(parsed)
            event.listen(engine, "connect", _sqlite_pragmas)
            return engine
        if kind == "postgresql":  # replaces connections that broke while they were idle
            psycopg = parsed.set(drivername="postgresql+psycopg")
            return sa.create_engine(psycopg, pool_pre_ping=True)
    except ArgumentError as error:
        raise ConfigError(f"got a database_url that is none of SQLAlchemy's: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            'PostgreSQL\'s driver is not installed here; run: pip install "langchain-art[postgres]"'
        ) from error
    raise ConfigError(f"got a database_url of {kind!r}, expected one of sqlite or postgresql")


def _own(engine: sa.Engine) -> sa.Connection | None:
    """Lock a PostgreSQL database, so that no second server uses it.

    Returns:
        The connection that holds the lock; None for SQLite, whose directory is locked.
    """
    if engine.dialect.name == "sqlite":
        return None
    owner = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    if not owner.scalar(sa.select(sa.func.pg_try_advisory_lock(_ADVISORY_LOCK))):
        owner.close()
        place = engine.url.render_as_string(hide_password=True)
        raise ConfigError(
            f"Another server uses the database {place}. Stop it, or give this one another."
        )
    return owner


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
