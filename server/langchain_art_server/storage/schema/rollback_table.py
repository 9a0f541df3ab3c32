"""The table of rollbacks: which versions each took out of service, when and why."""

from __future__ import annotations

import time
from collections.abc import Mapping

import sqlalchemy as sa

from langchain_art.wire import RolledBack
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import NUMBER, POLICIES, sealed_table

ROLLBACKS = sealed_table(
    "rollbacks",
    sa.Column("number", NUMBER, primary_key=True, autoincrement=True),
    sa.Column("policy", sa.String(64), index=True, nullable=False),
    sa.Column("former", sa.Integer, nullable=False),  # served until then
    sa.Column("version", sa.Integer, nullable=False),  # serves from then on
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("why", sa.Text, nullable=False),
    kind="rollback",
    named_by=("number",),
)


def roll_back(connection: sa.Connection, policy: str, version: int, why: str) -> None:
    """Let `version` serve, and write down in place of which, if it is another.

    Of the rollbacks between two versions the last one is kept: `rolled_back` reads no other.
    """
    mine = POLICIES.c.name == policy
    known = connection.execute(sa.select(POLICIES).where(mine)).first()
    if known is not None and (former := intact(POLICIES, known).version) != version:
        update(connection, POLICIES, mine, {"version": version})
        row = {"policy": policy, "former": former, "version": version, "why": why}
        same = (ROLLBACKS.c.former == former) & (ROLLBACKS.c.version == version)
        connection.execute(sa.delete(ROLLBACKS).where((ROLLBACKS.c.policy == policy) & same))
        insert(connection, ROLLBACKS, [row | {"at": time.time()}])


def rolled_back(
    connection: sa.Connection, policy: str, serving: int, parents: Mapping[int, int]
) -> dict[int, RolledBack]:
    """The versions that a rollback took out of service, each with the last one that did.

    These are the version that served and those that it was made from, as far as the version that
    serves since then was not made from them. What is on the way to `serving` is in service again.

    Args:
        connection: to the database.
        policy: its name.
        serving: the version that serves now.
        parents: of each version that a job made, the one that it started from.

    Raises:
        Damaged: a row is not what was written.
    """
    found: dict[int, RolledBack] = {}
    query = sa.select(ROLLBACKS).where(ROLLBACKS.c.policy == policy).order_by(ROLLBACKS.c.number)
    for row in connection.execute(query):
        intact(ROLLBACKS, row)
        said = RolledBack(at=row.at, to=row.version, why=row.why)
        found |= dict.fromkeys(_way(row.former, parents) - _way(row.version, parents), said)
    for version in _way(serving, parents):
        found.pop(version, None)
    return found


def _way(version: int, parents: Mapping[int, int]) -> set[int]:
    """A version and those that it was made from."""
    found = {version}
    while (version := parents.get(version, -1)) >= 0 and version not in found:
        found.add(version)
    return found
