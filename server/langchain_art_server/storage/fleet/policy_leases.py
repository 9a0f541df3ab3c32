"""Leases of policies: which server makes a policy's next version, rolls it back, or deletes it.

A lease ends by the database's clock unless it is renewed. Each has a token above all earlier ones
of its policy. Whatever its holder writes, it writes in a transaction that first locks the lease's
row and compares the token (`require`): one who has slept while the lease went to another server can
write nothing any more, however late it wakes.

Method: fencing tokens (Kleppmann, "How to do distributed locking", 2016).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from langchain_art.errors import EngineUnavailable
from langchain_art_server.storage.fleet.tables import POLICY_LEASES
from langchain_art_server.storage.queries import now_of
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import JOBS

if TYPE_CHECKING:
    from langchain_art_server.storage.database import Database

#: Seconds for which a lease holds, and between two renewals.
LEASE_SECONDS, RENEW_SECONDS = 10.0, 1.0


class LeaseLost(EngineUnavailable):
    """Another server has the lease; nothing was written."""


@dataclass(frozen=True)
class PolicyLease:
    """The right to change a policy."""

    policy: str
    token: int


class PolicyLeases:
    """The leases of one server. Where it has the database for itself, it gets each at once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._holder = uuid.uuid4().hex

    @property
    def are_needed(self) -> bool:
        """True if another server may want one."""
        return self._database.shared

    async def take(self, policy: str, job_id: str | None = None) -> PolicyLease | None:
        """A lease of a policy; None if another server has one, or if the job has ended."""
        mine = POLICY_LEASES.c.policy == policy

        def write(connection: sa.Connection) -> PolicyLease | None:
            if job_id is not None:
                state = connection.scalar(sa.select(JOBS.c.state).where(JOBS.c.id == job_id))
                if state not in ("queued", "running"):
                    return None
            if connection.execute(sa.select(POLICY_LEASES.c.token).where(mine)).first() is None:
                row = {"policy": policy, "token": 0, "holder": "", "until": 0.0}
                insert(connection, POLICY_LEASES, [row])
            free = sa.select(POLICY_LEASES).where(mine).with_for_update(skip_locked=True)
            if (row := connection.execute(free).first()) is None:
                return None
            now = now_of(connection)
            if self._is_anothers(intact(POLICY_LEASES, row), now):
                return None
            values = {"token": row.token + 1, "holder": self._holder, "until": now + LEASE_SECONDS}
            update(connection, POLICY_LEASES, mine, values)
            return PolicyLease(policy, row.token + 1)

        return await self._database.write(write)

    async def renew(self, lease: PolicyLease) -> bool:
        """Renew the lease; False if it was lost."""
        return await self._end_at(lease, lambda now: now + LEASE_SECONDS)

    async def release(self, lease: PolicyLease) -> None:
        """Give a lease back; one that was lost stays the other server's."""
        await self._end_at(lease, lambda _now: 0.0)

    async def _end_at(self, lease: PolicyLease, until: Callable[[float], float]) -> bool:
        def write(connection: sa.Connection) -> bool:
            if not holds(connection, lease):
                return False
            mine = POLICY_LEASES.c.policy == lease.policy
            update(connection, POLICY_LEASES, mine, {"until": until(now_of(connection))})
            return True

        return await self._database.write(write, in_turn=False)

    def taken(self, connection: sa.Connection) -> set[str]:
        """The policies of which another server has a lease."""
        if not self._database.shared:
            return set()
        now = now_of(connection)
        rows = connection.execute(sa.select(POLICY_LEASES))
        return {row.policy for row in rows if self._is_anothers(row, now)}

    def _is_anothers(self, row: sa.Row[tuple[object, ...]], now: float) -> bool:
        return self._database.shared and row.holder != self._holder and row.until > now


def holds(connection: sa.Connection, lease: PolicyLease) -> bool:
    """True if no later lease was given; none is until this transaction ends."""
    mine = POLICY_LEASES.c.policy == lease.policy
    query = sa.select(POLICY_LEASES).where(mine).with_for_update()
    row = connection.execute(query).first()
    return row is not None and intact(POLICY_LEASES, row).token == lease.token


def require(connection: sa.Connection, lease: PolicyLease | None) -> None:
    """Refuse to write for one who has lost a lease; None: no other server can have one.

    Raises:
        LeaseLost: another server has the policy now.
    """
    if lease is not None and not holds(connection, lease):
        raise LeaseLost(
            f"Another server has taken over policy {lease.policy!r}, since this one did not renew "
            f"its lease for {LEASE_SECONDS:g} s. Nothing was written; send the request again.",
            retry_after=1,
        )
