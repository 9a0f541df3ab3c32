"""The queue of rollouts of one database: put up, leased, completed, taken.

Leases are decided in a transaction of the database and by its clock. On PostgreSQL rows are locked
where they are chosen (``FOR UPDATE SKIP LOCKED``), so that two gateways never lease one rollout;
SQLite has one writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from langchain_art import wire
from langchain_art.errors import Conflict, Damaged, NotFound, Overloaded
from langchain_art_server.storage.database import Database, Tables, reads, writes
from langchain_art_server.storage.queries import (
    count_of,
    counts_by,
    now_of,
    select_among,
    take_page,
)
from langchain_art_server.storage.seals import insert, intact, sealed, update, values_of
from langchain_art_server.storage.tables import BATCHES, ROLLOUTS, WORKERS, pack, unpack

#: Rollouts that one database holds.
MAX_HELD = 100_000
#: Seconds between looks of a request that waits: another server may have changed something.
LOOK_SECONDS = 1.0
#: Seconds since its last request after which a worker counts as gone, and is forgotten.
LIVE_SECONDS, FORGET_SECONDS = 45.0, 600.0
#: Seconds without a sign of its owner after which a batch is deleted.
BATCH_SECONDS = 600.0
_QUEUED = ROLLOUTS.c.state == "queued"
_LEASED = ROLLOUTS.c.state == "leased"
#: A worker that has left has no slots until it is forgotten: a request of it that was on its way
#: does not bring it back.
_THERE = WORKERS.c.slots > 0


class RolloutQueue(Tables):
    """The rollouts of one database."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        #: Rung when there may be something to lease, and when something has ended.
        self.work, self.ends = ChangeSignal(), ChangeSignal()

    async def put(self, batch: wire.RolloutBatch) -> int:
        """Put rollouts up; returns how many are new.

        Raises:
            Conflict: an id was used for another rollout, or the batch has others.
            Overloaded: there are too many.
        """

        def write(connection: sa.Connection) -> int:
            known = _batch_of(connection, batch.batch)
            about = {"rollout": batch.rollout, "max_attempts": batch.max_attempts}
            now = now_of(connection)
            if known is None:
                row = about | {"id": batch.batch, "asked_at": now, "expired": 0, "late": 0}
                insert(connection, BATCHES, [row])
            elif known.rollout != batch.rollout or known.max_attempts != batch.max_attempts:
                raise Conflict(
                    f"got rollouts of {batch.rollout!r} with {batch.max_attempts} attempts for the "
                    f"batch {batch.batch!r}, which is of {known.rollout!r} with "
                    f"{known.max_attempts}; give them a batch of their own",
                    param="batch",
                )
            _ask(connection, batch.batch)
            rows = [_row(batch, one) for one in batch.rollouts]
            ids = [row["id"] for row in rows]
            stored = select_among(connection, sa.select(ROLLOUTS), ROLLOUTS.c.id, ids)
            there = {row.id: row for row in stored}
            for row in rows:
                found = there.get(row["id"])
                same = ("batch", "scenario", "name", "seed")
                if found is not None and any(getattr(found, name) != row[name] for name in same):
                    raise Conflict(
                        f"got the rollout {row['id']!r} with another scenario, seed or batch "
                        "than before; ids are used once",
                        param="rollouts",
                    )
            new = [row for row in rows if row["id"] not in there]
            if new and count_of(connection, ROLLOUTS) + len(new) > MAX_HELD:
                raise Overloaded(
                    f"{MAX_HELD} rollouts are put up and not taken. Take finished ones, or cancel "
                    "batches that nobody waits for.",
                    retry_after=5,
                )
            insert(connection, ROLLOUTS, new)
            return len(new)

        added = await self.write(write)
        self.work.notify()
        return added

    async def is_due(self, rollout: str) -> bool:
        """True if `lease` would find something to do."""
        return await self.read(lambda c: _any_ended(c, or_queued=rollout))

    @writes
    def lease(self, connection: sa.Connection, asked: wire.LeaseRequest) -> wire.Leases:
        """Lease a worker its share of what waits and is leased, by its slots among those of all.

        It gets one at least, if it can begin one and one waits: another worker may be gone.
        """
        now = now_of(connection)
        _sweep(connection, now)
        known = {"name": asked.name, "rollout": asked.rollout, "slots": asked.slots}
        if not _set_worker(connection, asked.worker, known | {"heard_at": now}):
            return wire.Leases(leases=(), lost=asked.holds)
        mine = _locked(connection, _LEASED & (ROLLOUTS.c.worker == asked.worker))
        kept = {row.trajectory_id: row for row in mine}
        for id_ in kept.keys() - set(asked.holds):
            _requeue(connection, kept.pop(id_))  # its answer did not arrive
        for row in kept.values():
            _renew(connection, row, now, asked.seconds)
        lost = [one for one in asked.holds if one not in kept]
        waits = _QUEUED & (ROLLOUTS.c.rollout == asked.rollout)
        waiting = count_of(connection, ROLLOUTS, waits)
        share = min(waiting, asked.free, _share(connection, asked, waiting, now))
        found: list[wire.RolloutLease] = []
        for row in _locked(connection, waits, share) if share else ():
            leased: dict[str, Any] = {"attempt": row.attempt + 1}
            leased["trajectory_id"] = _attempt_after(row.trajectory_id or uuid.uuid4().hex)
            held = {"state": "leased", "worker": asked.worker, "expires_at": now + asked.seconds}
            _set_rollout(connection, row, **held, **leased)
            known = {name: getattr(row, name) for name in ("id", "batch", "name", "seed")}
            found.append(wire.RolloutLease(scenario=from_json(row.scenario), **known, **leased))
        others = sa.select(ROLLOUTS.c.rollout).where(_QUEUED).distinct().limit(8)
        names = () if found else tuple(connection.scalars(others))
        return wire.Leases(leases=tuple(found), lost=tuple(lost), others=names)

    @writes
    def hold(self, connection: sa.Connection, held: wire.LeasesHeld) -> list[str]:
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
        for row in _locked(connection, _LEASED & (ROLLOUTS.c.expires_at < now + LIVE_SECONDS)):
            _set_rollout(connection, row, expires_at=now + LIVE_SECONDS)
        update(connection, BATCHES, BATCHES.c.asked_at < now, {"asked_at": now})

    async def give_back(self, returned: wire.LeasesReturned) -> None:
        """Let other workers have leases of a worker; of one that is leaving all, and forget it."""

        def write(connection: sa.Connection) -> None:
            for row in _locked(connection, _LEASED & (ROLLOUTS.c.worker == returned.worker)):
                if returned.leaving or row.trajectory_id in returned.holds:
                    _requeue(connection, row)
            if returned.leaving:
                left = {"name": "", "rollout": "", "slots": 0, "heard_at": now_of(connection)}
                _set_worker(connection, returned.worker, left)

        await self.write(write)
        self.work.notify()

    async def complete(self, rollout_id: str, outcome: wire.AttemptOutcome) -> None:
        """End an attempt. The same again changes nothing.

        Raises:
            NotFound: there is no such rollout: its batch was cancelled, or it was taken.
            Conflict: another attempt has the rollout now; this one is discarded, and counted.
        """
        sent = outcome.trajectory
        blob = None if sent is None else await asyncio.to_thread(pack, sent.model_dump(mode="json"))

        def write(connection: sa.Connection) -> Conflict | None:
            query = sa.select(ROLLOUTS).where(ROLLOUTS.c.id == rollout_id).with_for_update()
            row = connection.execute(query).first()
            if row is None:
                raise NotFound(
                    f"No rollout {rollout_id!r} is put up here: its batch was cancelled, or it was "
                    "finished and taken. Discard the run."
                )
            row = intact(ROLLOUTS, row)
            mine = row.trajectory_id == outcome.trajectory_id
            if mine and row.state == "finished" and (row.trajectory is None) == (sent is None):
                return None  # the same again
            failed = row.trajectory_id == _attempt_after(outcome.trajectory_id)
            failed |= mine and row.state == "queued"
            if failed and sent is None and row.error == outcome.error:
                return None  # the same again; another attempt may have begun
            if not mine or row.state != "leased":
                _count(connection, BATCHES, row.batch, "late")
                return Conflict(
                    f"got the end of attempt {outcome.trajectory_id!r} of rollout {rollout_id!r}, "
                    f"whose lease has ended: the rollout is {row.state}, at attempt {row.attempt}. "
                    "Discard the run; it is not trained.",
                    param="trajectory_id",
                )
            if outcome.error is not None or (sent is not None and sent.status == "failed"):
                _count(connection, WORKERS, row.worker, "failed")
            if sent is not None:
                _count(connection, WORKERS, row.worker, "finished")
            if outcome.error is not None:
                _fail_attempt(connection, row, outcome.error, fatal=outcome.fatal)
            else:
                ended = {"state": "finished", "trajectory": blob, "error": None, "expires_at": None}
                _set_rollout(connection, row, **ended)
            return None

        refusal = await self.write(write)
        if outcome.error is not None:
            self.work.notify()  # its next attempt
        self.ends.notify()
        if refusal is not None:
            raise refusal

    async def take(self, batch: str, asked: wire.TakeRequest) -> tuple[list[bytes], bytes]:
        """The next finished rollouts, each as JSON, and the status of the batch as JSON.

        Raises NotFound: there is no such batch.
        """

        def write(connection: sa.Connection) -> None:
            _require_batch(connection, batch)
            _ask(connection, batch)
            query = sa.select(ROLLOUTS).where(_is_finished(batch))
            for row in list(select_among(connection, query, ROLLOUTS.c.id, asked.done)):
                connection.execute(sa.delete(ROLLOUTS).where(ROLLOUTS.c.number == row.number))

        def is_noted(connection: sa.Connection) -> bool:
            since = now_of(connection) - _require_batch(connection, batch).asked_at
            return not asked.done and since < BATCH_SECONDS / 10

        if not await self.read(is_noted):
            await self.write(write)
        return await self.finished(batch, asked.limit)

    async def finished(self, batch: str, limit: int) -> tuple[list[bytes], bytes]:
        """The answer of `take`, without deleting. Leases that are over end. Raises NotFound."""
        if await self.read(_any_ended):
            await self.write(lambda c: _sweep(c, now_of(c)))
            self.work.notify()
        return await self.read(lambda c: _finished(c, batch, limit))

    async def status(self, batch: str) -> wire.BatchStatus:
        """Raises NotFound."""
        return await self.read(lambda c: _status(c, batch))

    async def cancel(self, batch: str) -> None:
        """Delete a batch; its leases end. Raises NotFound."""

        def write(connection: sa.Connection) -> None:
            _require_batch(connection, batch)
            _delete_batch(connection, batch)

        await self.write(write)
        self.ends.notify()

    async def lease_of(self, rollout_id: str, trajectory_id: str) -> str | None:
        """The scenario's name, if this attempt has the rollout."""
        mine = (ROLLOUTS.c.id == rollout_id) & (ROLLOUTS.c.trajectory_id == trajectory_id)
        return await self.read(lambda c: c.scalar(sa.select(ROLLOUTS.c.name).where(mine)))

    @reads
    def counts(
        self, connection: sa.Connection
    ) -> tuple[dict[str, int], tuple[wire.WorkerStatus, ...]]:
        """Rollouts by state, and the workers, those that asked last among the first."""
        held, now = counts_by(connection, ROLLOUTS.c.worker, _LEASED), now_of(connection)
        recent = _THERE & (WORKERS.c.heard_at >= now - FORGET_SECONDS)
        query = sa.select(WORKERS).where(recent).order_by(WORKERS.c.name, WORKERS.c.id)
        workers = tuple(
            wire.WorkerStatus(
                **{name: getattr(row, name) for name in _SHOWN},
                leased=held.get(row.id, 0),
                heard_seconds=max(0.0, now - row.heard_at),
            )
            for row in connection.execute(query)
            if intact(WORKERS, row)
        )
        return counts_by(connection, ROLLOUTS.c.state), workers


_SHOWN = ("id", "name", "rollout", "slots", "finished", "failed", "expired")


def _row(batch: wire.RolloutBatch, one: wire.QueuedRollout) -> dict[str, Any]:
    return {
        "id": one.id,
        "batch": batch.batch,
        "rollout": batch.rollout,
        "name": one.name,
        "scenario": to_json(one.scenario),
        "seed": one.seed,
        "state": "queued",
        "attempt": 0,
        "failures": 0,
        "fatal": False,
    }


def _batch_of(connection: sa.Connection, batch: str) -> sa.Row[Any] | None:
    row = connection.execute(sa.select(BATCHES).where(BATCHES.c.id == batch)).first()
    return None if row is None else intact(BATCHES, row)


def _require_batch(connection: sa.Connection, batch: str) -> sa.Row[Any]:
    if (row := _batch_of(connection, batch)) is None:
        raise NotFound(
            f"No batch {batch!r} of rollouts is put up here: it was cancelled, or nobody asked for "
            f"it for {BATCH_SECONDS:.0f} s."
        )
    return row


def _ask(connection: sa.Connection, batch: str) -> None:
    """Note that the owner of a batch is there."""
    asked = {"asked_at": now_of(connection)}
    update(connection, BATCHES, BATCHES.c.id == batch, asked)


def _is_finished(batch: str) -> sa.ColumnElement[bool]:
    return (ROLLOUTS.c.batch == batch) & (ROLLOUTS.c.state == "finished")


def _status(connection: sa.Connection, batch: str) -> wire.BatchStatus:
    known = _require_batch(connection, batch)
    states = Counter(counts_by(connection, ROLLOUTS.c.state, ROLLOUTS.c.batch == batch))
    live = _THERE & (WORKERS.c.heard_at >= now_of(connection) - LIVE_SECONDS)
    return wire.BatchStatus(
        batch=batch,
        rollout=known.rollout,
        queued=states["queued"],
        leased=states["leased"],
        finished=states["finished"],
        expired=known.expired,
        late=known.late,
        workers=count_of(connection, WORKERS, WORKERS.c.rollout == known.rollout, live),
    )


def _finished(connection: sa.Connection, batch: str, limit: int) -> tuple[list[bytes], bytes]:
    query = sa.select(ROLLOUTS).where(_is_finished(batch)).order_by(ROLLOUTS.c.number)

    def item(row: sa.Row[Any]) -> tuple[bytes, int]:
        try:
            blob = intact(ROLLOUTS, row).trajectory
            about = {"id": row.id, "attempt": row.attempt, "error": row.error, "fatal": row.fatal}
            about["trajectory"] = None if blob is None else unpack(blob)
        except Damaged as error:  # left out, its owner would wait for it for ever
            about = {"id": row.id, "attempt": 1, "error": str(error), "fatal": False}
        body = to_json(about)
        return body, len(body)

    page = take_page(connection, query, limit, "id", item, at_once=8)
    return page.items, _status(connection, batch).model_dump_json().encode()


class ChangeSignal:
    """Set after each change; who waits has asked for `next` before looking, and misses none."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all that wait, in the order in which they began to."""
        current, self._next = self._next, asyncio.Event()
        current.set()

    def next(self) -> asyncio.Event:
        """Event that the next `notify` sets."""
        return self._next


async def wait_for(change: asyncio.Event, seconds: float) -> bool:
    """Wait for a change at most so many seconds; True if there was one."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(change.wait(), seconds)
    return change.is_set()


def _set_rollout(connection: sa.Connection, row: sa.Row[Any], **values: Any) -> None:
    """Change a rollout that is locked, and its seal. Raises Damaged."""
    known = values_of(ROLLOUTS, intact(ROLLOUTS, row))
    changed = sealed(ROLLOUTS, known | values)
    written = {name: changed[name] for name in (*values, "seal")}
    mine = ROLLOUTS.c.number == row.number
    connection.execute(sa.update(ROLLOUTS).where(mine).values(written))


def _locked(
    connection: sa.Connection, where: sa.ColumnElement[bool], limit: int | None = None
) -> Sequence[sa.Row[Any]]:
    """The oldest rollouts that `where` chooses and no other transaction has, locked."""
    query = sa.select(ROLLOUTS).where(where).order_by(ROLLOUTS.c.number).limit(limit)
    return connection.execute(query.with_for_update(skip_locked=True)).all()


def _requeue(connection: sa.Connection, row: sa.Row[Any]) -> None:
    """Let a rollout be leased anew. What the attempt came to does not count."""
    _set_rollout(connection, row, state="queued", trajectory_id=None, worker=None, expires_at=None)


def _fail_attempt(
    connection: sa.Connection, row: sa.Row[Any], error: str, *, fatal: bool = False
) -> None:
    """End an attempt with an error: the rollout is leased anew, or finished if it was the last."""
    of = sa.select(BATCHES.c.max_attempts).where(BATCHES.c.id == row.batch)
    most = connection.execute(of).scalar_one()
    failures = row.failures + 1
    ended: dict[str, Any] = {"failures": failures, "error": error, "expires_at": None}
    if fatal or failures >= most:
        _set_rollout(connection, row, **ended, state="finished", fatal=fatal)
    else:
        _set_rollout(connection, row, **ended, state="queued", worker=None)


def _attempt_after(trajectory_id: str) -> str:
    """The id of the attempt after one that failed; by it, the same error sent again is known."""
    return hashlib.sha256(trajectory_id.encode()).hexdigest()[:32]


def _sweep(connection: sa.Connection, now: float) -> None:
    """End leases that were not renewed, and delete what is no longer asked for."""
    for row in _locked(connection, _LEASED & (ROLLOUTS.c.expires_at < now)):
        late = now - row.expires_at
        known = connection.scalar(sa.select(WORKERS.c.name).where(WORKERS.c.id == row.worker))
        _fail_attempt(
            connection,
            row,
            f"The worker {known or repr(row.worker)} did not renew its lease of attempt "
            f"{row.attempt}, which ended {late:.0f} s before this was seen. It was stopped, or "
            "its event loop did not turn.",
        )
        _count(connection, BATCHES, row.batch, "expired")
        _count(connection, WORKERS, row.worker, "expired")
    silent = sa.select(BATCHES.c.id).where(BATCHES.c.asked_at < now - BATCH_SECONDS)
    for batch in connection.scalars(silent).all():
        _delete_batch(connection, batch)
    gone = WORKERS.c.heard_at < now - FORGET_SECONDS
    connection.execute(sa.delete(WORKERS).where(gone))


def _any_ended(connection: sa.Connection, *, or_queued: str | None = None) -> bool:
    """True if a lease has ended, or a rollout of the name `or_queued` waits."""
    found = _LEASED & (ROLLOUTS.c.expires_at < now_of(connection))
    if or_queued is not None:
        found |= _QUEUED & (ROLLOUTS.c.rollout == or_queued)
    query = sa.select(ROLLOUTS.c.number).where(found).limit(1)
    return connection.execute(query).first() is not None


def _renew(connection: sa.Connection, row: sa.Row[Any], now: float, seconds: float) -> None:
    """Let a lease end so many seconds from now, unless more than half of them are left."""
    if row.expires_at - now <= seconds / 2:
        _set_rollout(connection, row, expires_at=now + seconds)


def _delete_batch(connection: sa.Connection, batch: str) -> None:
    """Delete a batch with all its rollouts."""
    connection.execute(sa.delete(ROLLOUTS).where(ROLLOUTS.c.batch == batch))
    connection.execute(sa.delete(BATCHES).where(BATCHES.c.id == batch))


def _count(connection: sa.Connection, table: sa.Table, id_: str | None, name: str) -> None:
    """Add one to a number of a batch or a worker, if it is known."""
    row = connection.execute(sa.select(table).where(table.c.id == id_)).first()
    if row is not None:
        update(connection, table, table.c.id == id_, {name: getattr(row, name) + 1})


def _set_worker(connection: sa.Connection, worker: str, known: dict[str, Any]) -> bool:
    """Write down what is known of a worker; False, and nothing, if it has left."""
    mine = WORKERS.c.id == worker
    row = connection.execute(sa.select(WORKERS.c.slots).where(mine)).first()
    if row is not None and not row.slots:
        return False
    if row is not None:
        update(connection, WORKERS, mine, known)
    else:
        known = known | {"id": worker, "finished": 0, "failed": 0, "expired": 0}
        insert(connection, WORKERS, [known])
    return True


def _share(connection: sa.Connection, asked: wire.LeaseRequest, waiting: int, now: float) -> int:
    """Number of rollouts to give a worker, so that all are busy alike; at least one."""
    held = counts_by(connection, ROLLOUTS.c.worker, _LEASED)
    others = sa.select(WORKERS.c.id, WORKERS.c.slots).where(
        WORKERS.c.rollout == asked.rollout,
        WORKERS.c.id != asked.worker,
        WORKERS.c.heard_at >= now - LIVE_SECONDS,
    )
    slots = {row.id: row.slots for row in connection.execute(others)} | {asked.worker: asked.slots}
    work = waiting + sum(held.get(worker, 0) for worker in slots)
    mine = math.ceil(work * asked.slots / sum(slots.values()))
    return max(1, mine - held.get(asked.worker, 0))
