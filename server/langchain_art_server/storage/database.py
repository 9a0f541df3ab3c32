"""One database, with one thread that writes and any number that read. By SQLAlchemy.

SQLite (in WAL mode, ``synchronous=FULL``) is the default, PostgreSQL is chosen by URL. Call records
that arrive during a transaction are written together in the next one, so that durability costs one
`fsync`, and two changes of thread, per batch of replies.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import io
import itertools
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, DataError, IntegrityError, OperationalError

from langchain_art.errors import ConfigError, Damaged, EngineUnavailable, InvalidRequest
from langchain_art_server.storage.fleet import raise_above
from langchain_art_server.storage.queries import select_among
from langchain_art_server.storage.schema import connect, own, place_of, prepare, snapshot, take_turn
from langchain_art_server.storage.seals import insert
from langchain_art_server.storage.tables import CALL_IMAGES, CALLS, IMAGES, POLICIES, CallRecord

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
StoredT = TypeVar("StoredT", bound="Database | Tables")
#: Below are the requests of one start of the server; enough, with room for eight million starts.
_STARTS_SHIFT = 40
_NOT_WRITTEN = "); nothing was acknowledged. Free disk space or mend the database"
#: Of PostgreSQL's schema, which is a tenant's: tables with their indexes and long values.
_SCHEMA_SIZE = sa.text(
    "SELECT COALESCE(SUM(pg_total_relation_size(oid)), 0) FROM pg_class "
    "WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
)


class Database:
    """Reads and writes in threads, for coroutines.

    Args:
        url: SQLAlchemy's; missing tables are created.
        shared: other servers of a fleet may use it, too. It is PostgreSQL's then.
        alike: what all of them have the same, in words.

    Raises:
        ConfigError: the URL is not one of SQLite or PostgreSQL, the driver is not installed, the
            database cannot be reached or is damaged, another server uses it or has something else
            that is to be alike, or another version of the server made its tables.
    """

    def __init__(self, url: str, *, shared: bool = False, alike: str = "") -> None:
        self.engine, self.shared, self._alike = connect(url, shared=shared), shared, alike
        try:
            self._owner, self._owner_lost = own(self.engine, shared=shared, alike=alike), False
            try:
                starts = prepare(self.engine, shared=shared)
                if shared:
                    raise_above(self.engine, starts << _STARTS_SHIFT)
            except BaseException:
                self._owner.close()
                raise
        except (ConfigError, OSError, DatabaseError) as error:
            self.engine.dispose()
            if isinstance(error, ConfigError):
                raise
            why = error.orig if isinstance(error, DatabaseError) else error
            raise ConfigError(
                f"got database_url={place_of(self.engine)!r}, which fails: {why}{_advice(error)}"
            ) from error
        self._began = itertools.count(starts << _STARTS_SHIFT)
        self._connection = self.engine.connect()  # the writer's
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._waiting: list[tuple[Sequence[CallRecord], asyncio.Future[None]]] = []
        self._insertion: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Write what is queued, then close."""
        self._writer.shutdown()
        self._connection.close()
        self._owner.close()
        self.engine.dispose()

    def next_began(self) -> int:
        """A number above all that were given before, by this server or an earlier one.

        In a fleet, see `fleet.begin_call`.
        """
        return next(self._began)

    async def write(self, work: Callable[[sa.Connection], T], *, in_turn: bool = True) -> T:
        """Run `work` in a transaction of its own. Returns when it is on disk.

        Args:
            work: what it reads stays as it is until it has ended: where several servers share the
                database, one of them writes at a time.
            in_turn: False: `work` does without that.

        Raises:
            EngineUnavailable: the database cannot be written to; nothing was written.
        """

        def do(connection: sa.Connection) -> T:
            take_turn(connection)
            return work(connection)

        loop, whole = asyncio.get_running_loop(), do if self.shared and in_turn else work
        # Shielded: a caller that leaves takes nothing along that is queued.
        return await asyncio.shield(loop.run_in_executor(self._writer, self._transact, whole))

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
                records = [one for some, _ in batch for one in some]
                shown = any(one.images for one in records)  # none may be deleted meanwhile
                await self.write(lambda c, records=records: _insert(c, records), in_turn=shown)
            except Exception as failure:  # noqa: BLE001 - raised where the records came from
                error = failure
            for _, written in batch:
                if not written.done():
                    written.set_exception(error) if error else written.set_result(None)
        self._insertion = None

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a thread, on a connection of its own that sees the database of one moment.

        Raises:
            EngineUnavailable: the database cannot be read.
            InvalidRequest: it does not take a value.
            Damaged: what it read is not what was written.
        """

        def run() -> T:
            with (
                _in_words("The store could not read (", "). Mend the database"),
                self.engine.connect() as connection,
            ):
                return work(snapshot(connection))

        return await asyncio.to_thread(run)

    async def size(self) -> int:
        """Bytes of the database. SQLite's free pages, of what was deleted, do not count."""

        def read(connection: sa.Connection) -> int:
            if self.engine.dialect.name == "postgresql":
                return int(connection.execute(_SCHEMA_SIZE).scalar_one())
            pragmas = ("page_count", "freelist_count", "page_size")
            used, free, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas
            )
            return (used - free) * size

        return await self.read(read)

    async def probe(self) -> None:
        """Write the policies as they are, and read. Raises, as `write` and `read`, if it fails."""
        same = sa.update(POLICIES).values(created_at=POLICIES.c.created_at)
        await self.write(lambda c: c.execute(same))
        await self.read(lambda c: c.execute(sa.select(POLICIES.c.name).limit(1)).all())

    def _transact(self, work: Callable[[sa.Connection], T]) -> T:
        with _in_words("The store could not write (", _NOT_WRITTEN):
            try:
                if self._owner_lost and isinstance(self._owner, sa.Connection):
                    self._owner.invalidate()  # closes the connection and so releases the lock
                    owner = own(self.engine, shared=self.shared, alike=self._alike)
                    self._owner, self._owner_lost = owner, False
                with self._connection.begin():
                    return work(self._connection)
            except OperationalError:  # disk full, read-only, gone
                self._owner_lost = True
                raise
            except ConfigError as failure:  # another server took the lock meanwhile
                raise EngineUnavailable(str(failure), retry_after=5) from failure


class Tables:
    """Some of the tables of a database, and what they are asked."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """See `Database.read`."""
        return await self._database.read(work)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """See `Database.write`."""
        return await self._database.write(work)


def reads(
    method: Callable[Concatenate[StoredT, sa.Connection, P], T],
) -> Callable[Concatenate[StoredT, P], Coroutine[Any, Any, T]]:
    """A method that reads, as a coroutine: it gets a connection, and runs as by `Database.read`."""

    @functools.wraps(method)
    async def run(self: StoredT, *args: P.args, **options: P.kwargs) -> T:
        return await self.read(lambda c: method(self, c, *args, **options))

    return run


def writes(
    method: Callable[Concatenate[StoredT, sa.Connection, P], T],
) -> Callable[Concatenate[StoredT, P], Coroutine[Any, Any, T]]:
    """A method that writes, as a coroutine: it gets a connection, and runs as by `Database.write`.

    It is one transaction.
    """

    @functools.wraps(method)
    async def run(self: StoredT, *args: P.args, **options: P.kwargs) -> T:
        return await self.write(lambda c: method(self, c, *args, **options))

    return run


class RowCount:
    """Number of rows a table has: counted once, and from then on only those that came later.

    Rows become visible in the order of their numbers. `recount` is to be called after some were
    deleted. Where other servers write, too (`shared`), neither holds: it counts each time.
    """

    def __init__(self, table: sa.Table, shared: bool = False) -> None:
        self._table, self._shared = table, shared
        self._known: tuple[int, int] | None = None  # rows, and the number of the last one
        self._deletions = 0

    def recount(self) -> None:
        """Count anew the next time."""
        self._deletions += 1
        self._known = None

    def read(self, connection: sa.Connection) -> int:
        """The number of rows now. It is a snapshot's first query: no deletion is between them."""
        known, deletions, number = self._known, self._deletions, self._table.c.number
        if known is None:
            # With a condition it would read the rows instead of an index.
            count = sa.select(sa.func.count()).select_from(self._table).scalar_subquery()
            last = sa.select(sa.func.max(number)).scalar_subquery()
            rows, newest = connection.execute(sa.select(count, last)).one()
        else:
            came = sa.select(sa.func.count(), sa.func.max(number)).where(number > known[1])
            more, newest = connection.execute(came).one()
            rows, newest = known[0] + more, newest or known[1]
        if deletions == self._deletions and not self._shared:
            self._known = rows, newest or 0
        return rows


@contextmanager
def _in_words(before: str, remedy: str) -> Generator[None]:
    """A context of reading or writing, whose errors are raised as ours."""
    try:
        yield
    except OperationalError as failure:
        raise EngineUnavailable(
            f"{before}{failure.orig}{remedy}, then send the request again.",
            retry_after=5,
        ) from failure
    except DataError as failure:  # PostgreSQL's text holds no NUL
        raise InvalidRequest(f"The database does not take a value: {failure.orig}") from failure
    except IntegrityError:
        raise
    except DatabaseError as failure:
        said = f"The database is damaged: {failure.orig}{_advice(failure)}"
        raise Damaged(said) from failure


def _advice(failure: Exception) -> str:
    """Advice on a damaged database; nothing for other failures."""
    if not isinstance(failure, DatabaseError) or isinstance(failure, OperationalError):
        return ""
    return (
        ". Put it back from a backup, with its -wal file if there is one; `langchain-art scrub` "
        "says what is damaged."
    )


def _insert(connection: sa.Connection, calls: Sequence[CallRecord]) -> None:
    """Insert calls, and the images that some of them were shown."""
    insert(connection, CALLS, (call.row() for call in calls))
    images = {name: body for call in calls for name, body in call.images.items()}
    if not images:
        return
    there = select_among(connection, sa.select(IMAGES.c.sha256), IMAGES.c.sha256, images)
    new = images.keys() - {row.sha256 for row in there}
    insert(connection, IMAGES, ({"sha256": one, "body": images[one]} for one in sorted(new)))
    links = ({"call_id": call.id, "sha256": one} for call in calls for one in call.images)
    insert(connection, CALL_IMAGES, links)


def make_private(data_dir: Path) -> None:
    """Take others' rights to what an umask left open."""
    opened = [data_dir, *data_dir.glob("adapters")]
    files = [
        path for name in ("art.sqlite3*", "lock", "vllm*.log*") for path in data_dir.glob(name)
    ]
    for path, mode in [*((one, 0o700) for one in opened), *((one, 0o600) for one in files)]:
        if path.stat().st_mode & 0o077:
            try:
                path.chmod(mode)
            except PermissionError:
                log.warning("%s is another user's: its rights stay as they are.", path)


def lock_data_dir(data_dir: Path, *, shared: bool = False) -> io.TextIOWrapper:
    """Lock the data directory; if `shared`, servers of the same fleet may use it, too.

    Raises ConfigError if another server has it.
    """
    handle = (data_dir / "lock").open("a+")  # NFS wants a shared lock's file open for reading
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise ConfigError(
            f"Another server uses {data_dir}. Stop it, or give this one another --data-dir"
            f"{', or set fleet = true in its settings, too' if shared else ''}."
        ) from error
    return handle
