"""The schema: a database is opened, locked and checked; one of another version is refused."""

from __future__ import annotations

import fcntl
import sqlite3
import time
import zlib
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError

from langchain_art.errors import ConfigError
from langchain_art_server.storage.run_index import create_text_index
from langchain_art_server.storage.tables import META, SCHEMA, SCHEMA_VERSION

#: PostgreSQL's advisory locks (they are per database): that a server holds, that one holds while it
#: makes or checks tables, and that a server of a fleet holds while it writes.
_ADVISORY_LOCK = int.from_bytes(b"lc-art", "big")
_PREPARING, _WRITING = 1, 2
#: Seconds for which a server waits for one of its fleet that opens the database at the same time,
#: or for PostgreSQL to see that the one before it has ended.
_JOIN_SECONDS = 5.0
#: Seconds after which PostgreSQL ends a transaction of a server that has stopped in it: what it has
#: locked, others wait for.
_STOPPED_SECONDS = 5


def connect(url: str, *, shared: bool = False) -> sa.Engine:
    """The engine of a database of SQLite or PostgreSQL, `shared` with other servers or not.

    It connects to nothing. Raises ConfigError.
    """
    try:
        parsed = sa.make_url(url)
        kind = parsed.get_backend_name()
        if kind == "sqlite":
            if parsed.database in (None, "", ":memory:"):
                raise ConfigError(
                    f"got a database_url without a file: {url!r}, expected sqlite:///FILE"
                )
            engine = sa.create_engine(parsed)
            # One statement for many rows: sqlite3 gives the interpreter's lock up for each
            # statement, and would wait for the event loop as often.
            engine.dialect.use_insertmanyvalues_wo_returning = True
            event.listen(engine, "connect", _sqlite_pragmas)
            return engine
        if kind == "postgresql":  # replaces connections that broke while they were idle
            psycopg = parsed.set(drivername="postgresql+psycopg")
            # A tenant keeps two connections, of which one holds its lock.
            kept = 5 if _search_path(parsed) is None else 2
            engine = sa.create_engine(psycopg, pool_pre_ping=True, pool_size=kept)
            if shared:
                event.listen(engine, "connect", _end_when_stopped)
            return engine
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"got a database_url that is none of SQLAlchemy's: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            'PostgreSQL\'s driver is not installed here; run: pip install "langchain-art[postgres]"'
        ) from error
    raise ConfigError(f"got a database_url of {kind!r}, expected one of sqlite or postgresql")


def _search_path(url: sa.URL) -> str | None:
    """The schema that a URL chooses, as that of a tenant does; None: PostgreSQL's own choice."""
    options = str(url.query.get("options", ""))
    return options.rpartition("search_path=")[2] if "search_path=" in options else None


def own(engine: sa.Engine, *, shared: bool = False, alike: str = "") -> sa.Connection | IO[str]:
    """Lock a database, so that no second server uses it; if `shared`, none but of the same fleet.

    `alike` is what all of a fleet have the same, in words.

    Returns:
        What holds the lock until it is closed: a connection to PostgreSQL, or the file beside a
        SQLite database. (Its own file it must not be: closing that ends SQLite's locks.)

    Raises:
        ConfigError: another server has it, or says something else of what is to be `alike`.
    """
    taken = ConfigError(
        f"Another server uses the database {place_of(engine)}. Stop it, or give this one another"
        f"{', or set fleet = true in its settings, too' if shared else ''}."
    )
    if engine.dialect.name == "sqlite":
        file = Path(engine.url.database or "").resolve()
        handle = file.with_name(f"{file.name}.lock").open("w")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise taken from None
        return handle
    owner = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    lock = sa.func.pg_try_advisory_lock_shared if shared else sa.func.pg_try_advisory_lock
    until = time.monotonic() + _JOIN_SECONDS
    while not owner.scalar(sa.select(lock(_lock_of(engine)))):
        if time.monotonic() >= until:
            owner.close()
            raise taken
        time.sleep(0.05)
    if shared:
        _say_alike(owner, alike)
    return owner


def _say_alike(owner: sa.Connection, alike: str) -> None:
    """Raise ConfigError if another server of the fleet says something else.

    Each holds a lock of two numbers: the database's, and that of what it says.
    """
    numbers = {
        "lock": zlib.crc32(str(_lock_of(owner.engine)).encode()),
        "said": zlib.crc32(alike.encode()),
    }
    owner.execute(sa.select(sa.func.pg_advisory_lock_shared(*map(_signed, numbers.values()))))
    others = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND "
        "database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND granted AND classid::bigint = :lock AND objid::bigint <> :said"
    )
    if owner.execute(sa.text(others), numbers).scalar_one():
        place = place_of(owner.engine)
        owner.close()
        raise ConfigError(
            f"Another server of the fleet on {place} has another base model than this one: "
            f"{alike}. Give all of them the same model, served_model_name, quantization, dtype and "
            "chat_template: their calls would be sampled from one model and trained as another's."
        )


def _signed(number: int) -> int:
    """A number of 32 bits as PostgreSQL's integer."""
    return number - (1 << 32) if number >= 1 << 31 else number


def _lock_of(engine: sa.Engine) -> int:
    path = _search_path(engine.url) or ""
    return _ADVISORY_LOCK + (zlib.crc32(path.encode()) << 16 if path else 0)


def take_turn(connection: sa.Connection) -> None:
    """Wait until no other server of the fleet writes; from here on, none does until the commit."""
    lock = sa.func.pg_advisory_xact_lock(_lock_of(connection.engine) + _WRITING)
    connection.execute(sa.select(lock))


def _end_when_stopped(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        seconds = f"{_STOPPED_SECONDS}s"
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{seconds}'")
    connection.commit()


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    # Text that the disk changed may be no UTF-8; its row's seal shows the change.
    connection.text_factory = _text
    cursor = connection.cursor()
    try:
        for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL"):
            cursor.execute(f"PRAGMA {pragma}")
    except UnicodeDecodeError as error:  # of SQLite's message, which has the damaged name in it
        raise sqlite3.DatabaseError(_text(error.object)) from error
    cursor.close()


def snapshot(connection: sa.Connection) -> sa.Connection:
    """Let all queries of a connection, until it is closed, see the database of one moment."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN")  # sqlite3 itself begins none before a SELECT
        return connection
    return connection.execution_options(isolation_level="REPEATABLE READ")


def place_of(engine: sa.Engine) -> str:
    """The database's URL for messages."""
    return engine.url.render_as_string(hide_password=True)


def prepare(engine: sa.Engine, *, shared: bool = False) -> int:
    """Create the tables of a new database, or check those that are there.

    Returns:
        How often a server has opened this database, with this time.

    Raises:
        ConfigError: they were made by another version of the server.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # else each table is a transaction
        elif shared:  # they may start at the same time
            turn = sa.func.pg_advisory_xact_lock(_lock_of(engine) + _PREPARING)
            connection.execute(sa.select(turn))
        there = set(sa.inspect(connection).get_table_names()) & set(META.tables)
        if not there:
            META.create_all(connection, checkfirst=False)
            create_text_index(connection)
            connection.execute(sa.insert(SCHEMA).values(version=SCHEMA_VERSION, starts=0))
        check_schema(connection)
        starts = SCHEMA.c.starts
        connection.execute(sa.update(SCHEMA).values(starts=starts + 1))
        return connection.scalars(sa.select(starts)).one()


def check_schema(connection: sa.Connection) -> None:
    """Raise ConfigError, in words, if the tables are not those of this server."""
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names())
    if SCHEMA.name not in there:
        raise _refused(connection, "it has no schema version, so an older server made it")
    versions = list(connection.scalars(sa.select(SCHEMA.c.version)))
    if versions != [SCHEMA_VERSION]:
        found = versions[0] if versions else 0
        why = f"got schema version {found!r}, expected {SCHEMA_VERSION}"
        if isinstance(found, int):  # else it is damaged
            maker = "a newer" if found > SCHEMA_VERSION else "an older"
            why += f", so {maker} server made it"
        raise _refused(connection, why)
    columns = inspector.get_multi_columns(filter_names=list(META.tables))  # one query, not thirty
    for name, table in META.tables.items():
        expected = {column.name for column in table.columns}
        got = {column["name"] for column in columns.get((None, name), ())}
        if missing := sorted(expected - got):
            raise _refused(connection, f"its table {name!r} has no column {missing[0]!r}")
        if unknown := sorted(got - expected):
            raise _refused(connection, f"its table {name!r} has an unknown column {unknown[0]!r}")


def _refused(connection: sa.Connection, why: str) -> ConfigError:
    return ConfigError(
        f"The database {place_of(connection.engine)} is not one of this server: {why}. It "
        "cannot be brought to this version. Start the version of langchain-art that made it, or "
        "give this one another --data-dir (or database_url)."
    )
