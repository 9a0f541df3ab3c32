"""Which database a fleet shares: what else belongs to it is marked with that."""

from __future__ import annotations

import sqlalchemy as sa

_IDENTITY = sa.text(
    "SELECT system_identifier::text || '/' || oid::text FROM pg_control_system(), pg_database "
    "WHERE datname = current_database()"
)


def identity(connection: sa.Connection) -> str:
    """PostgreSQL's number of the cluster and of the database in it; a restored copy has another."""
    return str(connection.execute(_IDENTITY).scalar_one())
