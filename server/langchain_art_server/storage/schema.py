"""The schema: a database is opened, locked, checked, and brought to this version.

A step of `STEPS` creates tables as `storage.tables` has them now. So a later step that changes a
table must do nothing where the table is that way already; `old_databases` in the tests opens a
stored database of each version. Rows that a step rewrites need new seals (`storage.seals`).
"""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError

from langchain_art.errors import ConfigError
from langchain_art_server.storage.run_index import (
    RUN_FACTS,
    RUN_MARKS,
    create_text_index,
    evaluated_scenarios,
    hold_out,
    index_all,
)
from langchain_art_server.storage.tables import (
    ACTIONS,
    API_KEYS,
    BATCHES,
    CALLS_BEGAN,
    HELD_OUT_SCENARIOS,
    META,
    POLICY_LEASES,
    REVIEWS,
    ROLLBACKS,
    ROLLOUTS,
    SCHEMA,
    SCHEMA_VERSION,
    TRAINED,
    TRAINED_CALLS,
    TRAINED_VERDICTS,
    WORKERS,
)

log = logging.getLogger(__name__)


def _add_run_index(connection: sa.Connection) -> None:
    META.create_all(connection, tables=[RUN_FACTS, RUN_MARKS])
    if not sa.inspect(connection).has_table("run_words"):
        create_text_index(connection)


def _index_evaluations(connection: sa.Connection) -> None:
    """Evaluations are found by a mark."""
    META.create_all(connection, tables=[HELD_OUT_SCENARIOS])
    index_all(connection)


def _key_by_job(connection: sa.Connection) -> None:
    """Several jobs may mark one run."""
    for table in (TRAINED, TRAINED_CALLS):
        _make_anew(connection, table)


def _add_verdicts(connection: sa.Connection) -> None:
    META.create_all(connection, tables=[TRAINED_VERDICTS, HELD_OUT_SCENARIOS])
    hold_out(connection, evaluated_scenarios(connection))


def _add_fleet(connection: sa.Connection) -> None:
    META.create_all(connection, tables=[POLICY_LEASES])
    if connection.dialect.supports_sequences:
        CALLS_BEGAN.create(connection, checkfirst=True)


def _empty_rollouts(connection: sa.Connection) -> None:
    """Rollouts have seeds. Whoever waits for some puts them up again, since their batch is gone."""
    META.drop_all(connection, tables=[BATCHES, ROLLOUTS])
    META.create_all(connection, tables=[BATCHES, ROLLOUTS])


#: Version -> what brings a database of it to the next one.
STEPS: dict[int, Callable[[sa.Connection], None]] = {
    2: lambda connection: META.create_all(connection, tables=[REVIEWS]),
    3: _add_run_index,
    4: _index_evaluations,
    5: _key_by_job,
    6: lambda connection: META.create_all(connection, tables=[API_KEYS, ACTIONS]),
    7: lambda connection: META.create_all(connection, tables=[ROLLBACKS]),
    8: lambda connection: META.create_all(connection, tables=[BATCHES, ROLLOUTS, WORKERS]),
    9: _add_fleet,
    10: _add_verdicts,
    11: _empty_rollouts,
}


def migrate(connection: sa.Connection) -> None:
    """Bring a database of a version that `STEPS` knows to `SCHEMA_VERSION`; leave any other.

    It takes some milliseconds a run from version 4 or earlier, and next to nothing from later ones.
    The caller holds the server's lock on the database, and commits.
    """
    versions = list(connection.scalars(sa.select(SCHEMA.c.version)))
    if len(versions) != 1 or versions[0] not in STEPS:
        return
    log.info("The database's schema goes from version %d to %d.", versions[0], SCHEMA_VERSION)
    for version in range(versions[0], SCHEMA_VERSION):
        STEPS[version](connection)
    connection.execute(sa.update(SCHEMA).values(version=SCHEMA_VERSION))


def _make_anew(connection: sa.Connection, table: sa.Table) -> None:
    """Give a table the keys that it has here; its columns and rows stay."""
    former = f"{table.name}_before"
    names = ", ".join(column.name for column in table.columns)
    connection.exec_driver_sql(f"ALTER TABLE {table.name} RENAME TO {former}")
    table.create(connection)
    connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) SELECT {names} FROM {former}")
    connection.exec_driver_sql(f"DROP TABLE {former}")


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
    except ArgumentError as error:
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

    Args:
        engine: of the database.
        shared: other servers may use it, too.
        alike: what all of a fleet have the same, in words.

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
            f"Another server of the fleet on {place} has another base model or adapters_url than "
            f"this one: {alike}. Give all of them the same model, served_model_name, quantization, "
            "dtype, chat_template and adapters_url: their calls would be sampled from one model "
            "and trained as another's, and what one publishes the others would not find."
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


def place_of(engine: sa.Engine) -> str:
    """The database's URL for messages."""
    return engine.url.render_as_string(hide_password=True)


def prepare(engine: sa.Engine, *, shared: bool = False) -> int:
    """Create the tables of a new database, or check those that are there.

    A database of an earlier version is brought to this one (`migrate`), all or nothing; where other
    servers use it (`shared`), it is refused.

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
            META.create_all(connection)
            create_text_index(connection)
            connection.execute(sa.insert(SCHEMA).values(version=SCHEMA_VERSION, starts=0))
        elif SCHEMA.name in there and (not shared or _is_alone(connection)):
            migrate(connection)
        check_schema(connection)
        starts = SCHEMA.c.starts
        connection.execute(sa.update(SCHEMA).values(starts=starts + 1))
        return connection.scalars(sa.select(starts)).one()


def _is_alone(connection: sa.Connection) -> bool:
    """True if no other server of the fleet has the database open."""
    held = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND "
        "database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND granted AND (classid::bigint << 32 | objid::bigint) = :lock"
    )
    lock = {"lock": _lock_of(connection.engine)}
    return connection.execute(sa.text(held), lock).scalar_one() <= 1


def check_schema(connection: sa.Connection) -> None:
    """Raise ConfigError, in words, if the tables are not those of this server."""
    inspector = sa.inspect(connection)
    there = set(inspector.get_table_names())
    if SCHEMA.name not in there:
        raise _refused(connection, "it has no schema version, so an older server made it")
    versions = list(connection.scalars(sa.select(SCHEMA.c.version)))
    if versions != [SCHEMA_VERSION]:
        found = versions[0] if versions else 0
        if found in STEPS:
            raise ConfigError(
                f"The database {place_of(connection.engine)} has schema version {found}, expected "
                f"{SCHEMA_VERSION}. Start this server on it once, while no other one uses it: it "
                "brings it to that version."
            )
        why = f"got schema version {found!r}, expected {SCHEMA_VERSION}"
        if isinstance(found, int):  # else it is damaged
            maker = "a newer" if found > SCHEMA_VERSION else "an older"
            why += f", so {maker} server made it"
        raise _refused(connection, why)
    for name, table in META.tables.items():
        expected = {column.name for column in table.columns}
        got = {column["name"] for column in inspector.get_columns(name)} if name in there else set()
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
