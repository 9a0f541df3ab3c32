"""Agreement between the servers of one database: leases of policies, and the order of calls.

A lease says which server makes a policy's next version, rolls it back, or deletes it. It ends by
the database's clock unless it is renewed, and has a token above all earlier ones of its policy.
Whatever its holder writes, it writes in a transaction that first locks the lease's row and compares
the token (`PolicyLeases.require`): one who has slept while the lease went to another server can
write nothing any more, however late it wakes. Where a server has the database for itself, it needs
no lease, and a policy is changed by one of its tasks at a time.

Method: fencing tokens (Kleppmann, "How to do distributed locking", 2016).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import sqlalchemy as sa

from langchain_art.errors import ArtError, EngineUnavailable
from langchain_art.wire.training import OPEN_STATES
from langchain_art_server.storage.queries import now_of
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import CALLS, CALLS_BEGAN, JOBS, POLICY_LEASES, CallRecord

if TYPE_CHECKING:
    from langchain_art_server.storage.database import Database

log = logging.getLogger(__name__)
#: Seconds for which a lease holds, between two renewals, and between two tries to get one.
LEASE_SECONDS, RENEW_SECONDS, _AGAIN_SECONDS = 10.0, 1.0, 0.1
_LAST = sa.text(f"SELECT last_value FROM {CALLS_BEGAN.name}")
_SET = sa.text(f"SELECT setval('{CALLS_BEGAN.name}', :floor)")
_NEXT = sa.select(CALLS_BEGAN.next_value())


class LeaseLost(EngineUnavailable):
    """Another server has the lease; nothing was written."""


class PolicyLeases:
    """The policies that one server changes: by one of its tasks at a time, and by no other server.

    What is written inside `hold` and `hold_for` may be refused, if this server sleeps in them.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._holder = uuid.uuid4().hex
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        #: Policy -> the token of this server's lease.
        self._tokens: dict[str, int] = {}

    def here(self, policy: str) -> asyncio.Lock:
        """A context in which nothing of this server changes the policy."""
        return self._locks.setdefault(policy, asyncio.Lock())

    @asynccontextmanager
    async def hold(self, policy: str) -> AsyncGenerator[None]:
        """A context in which nothing else changes the policy; entering it waits for that."""
        async with self.here(policy):
            while not await self.take(policy):
                await asyncio.sleep(_AGAIN_SECONDS)
            async with self._renewed(policy, lambda: None):
                yield

    @asynccontextmanager
    async def hold_for(
        self, policy: str, job_id: str, on_lost: Callable[[], None]
    ) -> AsyncGenerator[bool]:
        """`hold` for a job; False if it has ended, or another server has the policy.

        `on_lost` is called when another server has taken the lease over.
        """
        async with self.here(policy):
            if not await self.take(policy, job_id):
                yield False
                return
            async with self._renewed(policy, on_lost):
                yield True

    @asynccontextmanager
    async def _renewed(self, policy: str, on_lost: Callable[[], None]) -> AsyncGenerator[None]:
        if not self._database.shared:
            yield
            return
        renewing = asyncio.create_task(self._renew_for_ever(policy, on_lost))
        try:
            yield
        finally:
            renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewing
            try:
                await self.release(policy)
            except ArtError as error:
                log.warning("The lease of policy %r ends by itself: %s", policy, error)

    async def _renew_for_ever(self, policy: str, on_lost: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                if not await self.renew(policy):
                    on_lost()
                    return
            except ArtError as error:  # the lease may be lost by now: then nothing is written
                log.warning("The lease of policy %r was not renewed: %s", policy, error)

    async def take(self, policy: str, job_id: str | None = None) -> bool:
        """Take a lease; False if another server has the policy, or the job has ended."""
        if not self._database.shared:
            return True
        mine = POLICY_LEASES.c.policy == policy

        def write(connection: sa.Connection) -> int | None:
            if job_id is not None:
                state = connection.scalar(sa.select(JOBS.c.state).where(JOBS.c.id == job_id))
                if state not in OPEN_STATES:
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
            return row.token + 1

        if (token := await self._database.write(write)) is None:
            return False
        self._tokens[policy] = token
        return True

    async def renew(self, policy: str) -> bool:
        """Renew the lease; False if it was lost."""
        return await self._end_at(policy, lambda now: now + LEASE_SECONDS)

    async def release(self, policy: str) -> None:
        """Give a lease back; one that was lost stays the other server's."""
        try:
            await self._end_at(policy, lambda _now: 0.0)
        finally:
            self._tokens.pop(policy, None)

    async def _end_at(self, policy: str, until: Callable[[float], float]) -> bool:
        def write(connection: sa.Connection) -> bool:
            if not self.holds(connection, policy):
                return False
            mine = POLICY_LEASES.c.policy == policy
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
        return row.holder != self._holder and row.until > now

    def holds(self, connection: sa.Connection, policy: str) -> bool:
        """True if this server has the policy; no other gets it until this transaction ends."""
        if not self._database.shared:
            return True
        mine = POLICY_LEASES.c.policy == policy
        query = sa.select(POLICY_LEASES).where(mine).with_for_update()
        row = connection.execute(query).first()
        return row is not None and intact(POLICY_LEASES, row).token == self._tokens.get(policy)

    def require(self, connection: sa.Connection, policy: str) -> None:
        """Raises LeaseLost if this server has not the policy's lease, or not any more."""
        if not self.holds(connection, policy):
            raise LeaseLost(
                f"Another server has taken over policy {policy!r}, since this one did not renew "
                f"its lease for {LEASE_SECONDS:g} s. Nothing was written; send the request again.",
                retry_after=1,
            )


def raise_above(engine: sa.Engine, floor: int) -> None:
    """Let the numbers of calls go on above `floor`: above those of a server that was no fleet's."""
    with engine.begin() as connection:
        if connection.execute(_LAST).scalar_one() < floor:
            connection.execute(_SET, {"floor": floor})


async def begin_call(
    database: Database, run: str | None, known: Collection[str]
) -> tuple[int, Sequence[CallRecord]]:
    """A call of a run begins (None: of none): its number, and the run's others, the oldest first.

    The number, of PostgreSQL's sequence, is above those of all calls that were answered before
    then, whichever server answered them: no clock is asked. `known` are the ids of the run's calls
    whose tokens this server's sampler knows; they are left out.
    """

    def read(connection: sa.Connection) -> tuple[int, Sequence[CallRecord]]:
        began = connection.execute(_NEXT).scalar_one()
        if run is None:
            return began, ()
        tagged = sa.select(CALLS.c.id).where(CALLS.c.trajectory_id == run)
        ids = set(connection.scalars(tagged)) - set(known)
        if not ids:
            return began, ()
        others = sa.select(CALLS).where(CALLS.c.id.in_(ids)).order_by(CALLS.c.began)
        return began, [CallRecord.of(row) for row in connection.execute(others)]

    return await database.read(read)
