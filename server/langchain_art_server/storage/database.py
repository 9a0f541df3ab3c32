"""One database, with one thread that writes and any number that read. By SQLAlchemy.

SQLite (in WAL mode, ``synchronous=FULL``) is the default, PostgreSQL is chosen by URL. Call records
that arrive during a transaction are written together in the next one, so that durability costs one
`fsync`, and two changes of thread, per batch of replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DataError, OperationalError

from langchain_art.errors import ConfigError, EngineUnavailable, InvalidRequest
from langchain_art_server.storage.tables import CALLS, META, POLICIES, CallRecord

T = TypeVar("T")
_INSERT_CALLS = sa.insert(CALLS)
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
        self._connection = self.engine.connect()  # the writer's
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._waiting: list[tuple[Sequence[CallRecord], asyncio.Future[None]]] = []
        self._insertion: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Write what is queued, then close."""
        self._writer.shutdown()
        self._connection.close()
        if self._owner is not None:
            self._owner.close()
        self.engine.dispose()

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a transaction of its own. Returns when it is on disk.

        Raises:
            EngineUnavailable: the database cannot be written to; nothing was written.
        """
        loop = asyncio.get_running_loop()
        # Shielded: a caller that leaves takes nothing along that is queued.
        return await asyncio.shield(loop.run_in_executor(self._writer, self._transact, work))

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        """Insert call records. Returns, and raises, as `write`."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((records, written))
        if self._insertion is None:
            self._insertion = asyncio.create_task(self._insert_calls())
        await written  # a caller that leaves takes no record along

    async def _insert_calls(self) -> None:
        """Write what waits, and in the next transaction what arrived meanwhile."""
        while batch := self._waiting:
            self._waiting = []
            error = None
            try:
                await self.write(lambda c, batch=batch: c.execute(_INSERT_CALLS, _rows(batch)))
            except Exception as failure:  # noqa: BLE001 - raised where the records came from
                error = failure
            for _, written in batch:
                if not written.done():
                    written.set_exception(error) if error else written.set_result(None)
        self._insertion = None

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a thread, on a connection of its own.

        Raises:
            EngineUnavailable: the database cannot be read.
            InvalidRequest: it does not take a value.
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
            except DataError as failure:
                raise _refused(failure) from failure

        return await asyncio.to_thread(run)

    async def probe(self) -> None:
        """Write the policies as they are, and read. Raises, as `write` and `read`, if it fails."""
        same = sa.update(POLICIES).values(created_at=POLICIES.c.created_at)
        await self.write(lambda c: c.execute(same))
        await self.read(lambda c: c.execute(sa.select(POLICIES.c.name).limit(1)).all())

    def _transact(self, work: Callable[[sa.Connection], T]) -> T:
        try:
            if self._owner_lost and self._owner is not None:
                self._owner.invalidate()  # closes the connection and so releases the lock
                self._owner, self._owner_lost = _own(self.engine), False
            with self._connection.begin():
                return work(self._connection)
        except OperationalError as failure:  # disk full, read-only, gone
            self._owner_lost = True
            raise EngineUnavailable(
                f"The store could not write ({failure.orig}); nothing was acknowledged. "
                "Free disk space or mend the database, then send the request again.",
                retry_after=5,
            ) from failure
        except ConfigError as failure:  # another server took the lock meanwhile
            raise EngineUnavailable(str(failure), retry_after=5) from failure
        except DataError as failure:
            raise _refused(failure) from failure


def _refused(failure: DataError) -> InvalidRequest:
    """PostgreSQL's text holds no NUL."""
    return InvalidRequest(f"The database does not take a value: {failure.orig}")


def _rows(batch: Iterable[tuple[Sequence[CallRecord], object]]) -> list[dict[str, Any]]:
    return [record.row() for records, _ in batch for record in records]


def select_among(
    connection: sa.Connection,
    query: sa.Select[*tuple[Any, ...]],
    column: sa.Column[str],
    ids: Iterable[str],
) -> Iterator[sa.Row[Any]]:
    """Rows of `query` whose `column` is among `ids`. SQLite limits a statement's parameters."""
    distinct = list(dict.fromkeys(ids))
    for start in range(0, len(distinct), 500):
        yield from connection.execute(query.where(column.in_(distinct[start : start + 500])))


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


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
