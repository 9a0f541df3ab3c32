"""Leases of rollouts, decided in a transaction of the database and by its clock.

On PostgreSQL rows are locked where they are chosen (``FOR UPDATE SKIP LOCKED``), so that two
gateways never lease one rollout; SQLite has one writer.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json

from langchain_art.wire import LeaseRequest, Leases, LeasesHeld, LeasesReturned, RolloutLease
from langchain_art_server.storage.database import Tables, writes
from langchain_art_server.storage.queries import count_of, counts_by, now_of, select_among
from langchain_art_server.storage.seals import insert, intact, sealed, update, values_of
from langchain_art_server.storage.tables import BATCHES, ROLLOUTS, WORKERS

#: Seconds since its last request after which a worker counts as gone, and is forgotten.
LIVE_SECONDS, FORGET_SECONDS = 45.0, 600.0
#: Seconds without a sign of its owner after which a batch is deleted.
BATCH_SECONDS = 600.0
_QUEUED = ROLLOUTS.c.state == "queued"
_LEASED = ROLLOUTS.c.state == "leased"


def set_rollout(connection: sa.Connection, row: sa.Row[Any], **values: Any) -> None:
    """Change a rollout that is locked, and its seal. Raises Damaged."""
    known = values_of(ROLLOUTS, intact(ROLLOUTS, row))
    changed = sealed(ROLLOUTS, known | values)
    written = {name: changed[name] for name in (*values, "seal")}
    mine = ROLLOUTS.c.number == row.number
    connection.execute(sa.update(ROLLOUTS).where(mine).values(written))


def locked(
    connection: sa.Connection, where: sa.ColumnElement[bool], limit: int | None = None
) -> Sequence[sa.Row[Any]]:
    """The oldest rollouts that `where` chooses and no other transaction has, locked."""
    query = sa.select(ROLLOUTS).where(where).order_by(ROLLOUTS.c.number).limit(limit)
    return connection.execute(query.with_for_update(skip_locked=True)).all()


def requeue(connection: sa.Connection, row: sa.Row[Any]) -> None:
    """Let a rollout be leased anew. What the attempt came to does not count."""
    set_rollout(connection, row, state="queued", trajectory_id=None, worker=None, expires_at=None)


def fail_attempt(
    connection: sa.Connection, row: sa.Row[Any], error: str, *, fatal: bool = False
) -> None:
    """End an attempt with an error: the rollout is leased anew, or finished if it was the last."""
    of = sa.select(BATCHES.c.max_attempts).where(BATCHES.c.id == row.batch)
    most = connection.execute(of).scalar_one()
    failures = row.failures + 1
    ended: dict[str, Any] = {"failures": failures, "error": error, "expires_at": None}
    if fatal or failures >= most:
        set_rollout(connection, row, **ended, state="finished", fatal=fatal)
    else:
        set_rollout(connection, row, **ended, state="queued", worker=None)


def attempt_after(trajectory_id: str) -> str:
    """The id of the attempt after one that failed; by it, the same error sent again is known."""
    return hashlib.sha256(trajectory_id.encode()).hexdigest()[:32]


def sweep(connection: sa.Connection, now: float) -> int:
    """End leases that were not renewed (how many), and delete what is no longer asked for."""
    ended = locked(connection, _LEASED & (ROLLOUTS.c.expires_at < now))
    for row in ended:
        late = now - row.expires_at
        known = connection.scalar(sa.select(WORKERS.c.name).where(WORKERS.c.id == row.worker))
        fail_attempt(
            connection,
            row,
            f"The worker {known or repr(row.worker)} did not renew its lease of attempt "
            f"{row.attempt}, which ended {late:.0f} s before this was seen. It was stopped, or "
            "its event loop did not turn.",
        )
        count(connection, BATCHES, row.batch, "expired")
        count(connection, WORKERS, row.worker, "expired")
    silent = sa.select(BATCHES.c.id).where(BATCHES.c.asked_at < now - BATCH_SECONDS)
    for batch in connection.scalars(silent).all():
        delete_batch(connection, batch)
    gone = WORKERS.c.heard_at < now - FORGET_SECONDS
    connection.execute(sa.delete(WORKERS).where(gone))
    return len(ended)


def any_ended(connection: sa.Connection, *, or_queued: str | None = None) -> bool:
    """True if a lease has ended, or a rollout of the name `or_queued` waits."""
    found = _LEASED & (ROLLOUTS.c.expires_at < now_of(connection))
    if or_queued is not None:
        found |= _QUEUED & (ROLLOUTS.c.rollout == or_queued)
    query = sa.select(ROLLOUTS.c.number).where(found).limit(1)
    return connection.execute(query).first() is not None


class RolloutLeases(Tables):
    """Leases of the rollouts of one database."""

    async def is_due(self, rollout: str) -> bool:
        """True if `lease` would find something to do."""
        return await self.read(lambda c: any_ended(c, or_queued=rollout))

    @writes
    def lease(self, connection: sa.Connection, asked: LeaseRequest) -> Leases:
        """Lease a worker its share of what waits and is leased, by its slots among those of all.

        It gets one at least, if it can begin one and one waits: another worker may be gone.
        """
        now = now_of(connection)
        sweep(connection, now)
        _greet(connection, asked, now)
        mine = locked(connection, _LEASED & (ROLLOUTS.c.worker == asked.worker))
        kept = {row.trajectory_id: row for row in mine}
        for id_ in kept.keys() - set(asked.holds):
            requeue(connection, kept.pop(id_))  # its answer did not arrive
        for row in kept.values():
            _renew(connection, row, now, asked.seconds)
        lost = [one for one in asked.holds if one not in kept]
        waits = _QUEUED & (ROLLOUTS.c.rollout == asked.rollout)
        waiting = count_of(connection, ROLLOUTS, waits)
        share = min(waiting, asked.free, _share(connection, asked, waiting, now))
        found: list[RolloutLease] = []
        for row in locked(connection, waits, share) if share else ():
            leased: dict[str, Any] = {"attempt": row.attempt + 1}
            leased["trajectory_id"] = attempt_after(row.trajectory_id or uuid.uuid4().hex)
            held = {"state": "leased", "worker": asked.worker, "expires_at": now + asked.seconds}
            set_rollout(connection, row, **held, **leased)
            known = {name: getattr(row, name) for name in ("id", "batch", "name", "seed")}
            found.append(RolloutLease(scenario=from_json(row.scenario), **known, **leased))
        others = sa.select(ROLLOUTS.c.rollout).where(_QUEUED).distinct().limit(8)
        names = () if found else tuple(connection.scalars(others))
        return Leases(leases=tuple(found), lost=tuple(lost), others=names)

    @writes
    def hold(self, connection: sa.Connection, held: LeasesHeld) -> list[str]:
        """Renew the leases of a worker; returns those that it has no more."""
        now, kept = now_of(connection), set[str]()
        update(connection, WORKERS, WORKERS.c.id == held.worker, {"heard_at": now})
        mine = _LEASED & (ROLLOUTS.c.worker == held.worker)
        query = sa.select(ROLLOUTS).where(mine).with_for_update()
        for row in select_among(connection, query, ROLLOUTS.c.trajectory_id, held.holds):
            kept.add(row.trajectory_id)
            _renew(connection, row, now, held.seconds)
        return [one for one in held.holds if one not in kept]

    @writes
    def resume(self, connection: sa.Connection) -> None:
        """Let no lease, and no batch, end by the time in which no server was there to renew it."""
        now = now_of(connection)
        for row in locked(connection, _LEASED & (ROLLOUTS.c.expires_at < now + LIVE_SECONDS)):
            set_rollout(connection, row, expires_at=now + LIVE_SECONDS)
        update(connection, BATCHES, BATCHES.c.asked_at < now, {"asked_at": now})


def _renew(connection: sa.Connection, row: sa.Row[Any], now: float, seconds: float) -> None:
    """Let a lease end so many seconds from now, unless more than half of them are left."""
    if row.expires_at - now <= seconds / 2:
        set_rollout(connection, row, expires_at=now + seconds)


def give_back(connection: sa.Connection, returned: LeasesReturned) -> None:
    """Let other workers have leases of a worker; of one that is leaving all, and forget it."""
    for row in locked(connection, _LEASED & (ROLLOUTS.c.worker == returned.worker)):
        if returned.leaving or row.trajectory_id in returned.holds:
            requeue(connection, row)
    if returned.leaving:
        connection.execute(sa.delete(WORKERS).where(WORKERS.c.id == returned.worker))


def delete_batch(connection: sa.Connection, batch: str) -> None:
    """Delete a batch with all its rollouts."""
    connection.execute(sa.delete(ROLLOUTS).where(ROLLOUTS.c.batch == batch))
    connection.execute(sa.delete(BATCHES).where(BATCHES.c.id == batch))


def held_by(connection: sa.Connection) -> dict[str, int]:
    """Worker -> the leases that it has."""
    return counts_by(connection, ROLLOUTS.c.worker, _LEASED)


def count(connection: sa.Connection, table: sa.Table, id_: str | None, name: str) -> None:
    """Add one to a number of a batch or a worker, if it is known."""
    row = connection.execute(sa.select(table).where(table.c.id == id_)).first()
    if row is not None:
        update(connection, table, table.c.id == id_, {name: getattr(row, name) + 1})


def _greet(connection: sa.Connection, asked: LeaseRequest, now: float) -> None:
    """Write down that a worker is there."""
    known = {"name": asked.name, "rollout": asked.rollout, "slots": asked.slots, "heard_at": now}
    mine = WORKERS.c.id == asked.worker
    if connection.execute(sa.select(WORKERS.c.id).where(mine)).first() is not None:
        update(connection, WORKERS, mine, known)
    else:
        row = known | {"id": asked.worker, "finished": 0, "failed": 0, "expired": 0}
        insert(connection, WORKERS, [row])


def _share(connection: sa.Connection, asked: LeaseRequest, waiting: int, now: float) -> int:
    """Number of rollouts to give a worker, so that all are busy alike; at least one."""
    held = held_by(connection)
    others = sa.select(WORKERS.c.id, WORKERS.c.slots).where(
        WORKERS.c.rollout == asked.rollout,
        WORKERS.c.id != asked.worker,
        WORKERS.c.heard_at >= now - LIVE_SECONDS,
    )
    slots = {row.id: row.slots for row in connection.execute(others)} | {asked.worker: asked.slots}
    work = waiting + sum(held.get(worker, 0) for worker in slots)
    mine = math.ceil(work * asked.slots / sum(slots.values()))
    return max(1, mine - held.get(asked.worker, 0))
