"""Brings a database of an earlier schema to this one, version by version, in one transaction.

A step creates tables as `storage.tables` has them now. So a later step that changes a table must do
nothing where the table is that way already; `old_databases` in the tests opens a stored database of
each version. Rows that a step rewrites need new seals (`storage.seals`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import sqlalchemy as sa

from langchain_art_server.storage.fleet.tables import CALLS_BEGAN, POLICY_LEASES
from langchain_art_server.storage.rollouts.tables import BATCHES, ROLLOUTS, WORKERS
from langchain_art_server.storage.run_index import (
    RUN_FACTS,
    RUN_MARKS,
    create_text_index,
    evaluated_scenarios,
    hold_out,
    index_all,
)
from langchain_art_server.storage.schema.key_tables import ACTIONS, API_KEYS
from langchain_art_server.storage.schema.rollback_table import ROLLBACKS
from langchain_art_server.storage.tables import (
    HELD_OUT_SCENARIOS,
    META,
    REVIEWS,
    SCHEMA,
    SCHEMA_VERSION,
    TRAINED,
    TRAINED_CALLS,
    TRAINED_VERDICTS,
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
