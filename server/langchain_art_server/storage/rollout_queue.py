"""The queue of rollouts of one database: put up, leased, completed, taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import sqlalchemy as sa
from pydantic_core import to_json

from langchain_art import wire
from langchain_art.errors import Conflict, Damaged, NotFound, Overloaded
from langchain_art_server.storage import rollout_leases as leases
from langchain_art_server.storage.database import Database, reads
from langchain_art_server.storage.queries import count_of, counts_by, select_among, take_page
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import BATCHES, ROLLOUTS, WORKERS, pack, unpack

#: Rollouts that one database holds.
MAX_HELD = 100_000
#: Seconds between looks of a request that waits: another server may have changed something.
LOOK_SECONDS = 1.0


class RolloutQueue(leases.RolloutLeases):
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
            now = leases.now_of(connection)
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

    async def give_back(self, returned: wire.LeasesReturned) -> None:
        """Give leases to other workers."""
        await self.write(lambda c: leases.give_back(c, returned))
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
            mine = row.trajectory_id == outcome.trajectory_id
            if mine and row.state == "finished" and (row.trajectory is None) == (sent is None):
                return None  # the same again
            failed = row.trajectory_id == leases.attempt_after(outcome.trajectory_id)
            failed |= mine and row.state == "queued"
            if failed and sent is None and row.error == outcome.error:
                return None  # the same again; another attempt may have begun
            if not mine or row.state != "leased":
                leases.count(connection, BATCHES, row.batch, "late")
                return Conflict(
                    f"got the end of attempt {outcome.trajectory_id!r} of rollout {rollout_id!r}, "
                    f"whose lease has ended: the rollout is {row.state}, at attempt {row.attempt}. "
                    "Discard the run; it is not trained.",
                    param="trajectory_id",
                )
            if outcome.error is not None or (sent is not None and sent.status == "failed"):
                leases.count(connection, WORKERS, row.worker, "failed")
            if sent is not None:
                leases.count(connection, WORKERS, row.worker, "finished")
            if outcome.error is not None:
                leases.fail_attempt(connection, row, outcome.error, fatal=outcome.fatal)
            else:
                ended = {"state": "finished", "trajectory": blob, "error": None, "expires_at": None}
                leases.set_rollout(connection, row, **ended)
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
            since = leases.now_of(connection) - _require_batch(connection, batch).asked_at
            return not asked.done and since < leases.BATCH_SECONDS / 10

        if not await self.read(is_noted):
            await self.write(write)
        return await self.finished(batch, asked.limit)

    async def finished(self, batch: str, limit: int) -> tuple[list[bytes], bytes]:
        """The answer of `take`, without deleting. Leases that are over end. Raises NotFound."""
        if await self.read(leases.any_ended):
            await self.write(lambda c: leases.sweep(c, leases.now_of(c)))
            self.work.notify()
        return await self.read(lambda c: _finished(c, batch, limit))

    async def status(self, batch: str) -> wire.BatchStatus:
        """Raises NotFound."""
        return await self.read(lambda c: _status(c, batch))

    async def cancel(self, batch: str) -> None:
        """Delete a batch; its leases end. Raises NotFound."""

        def write(connection: sa.Connection) -> None:
            _require_batch(connection, batch)
            leases.delete_batch(connection, batch)

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
        held, now = leases.held_by(connection), leases.now_of(connection)
        recent = WORKERS.c.heard_at >= now - leases.FORGET_SECONDS
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
            f"it for {leases.BATCH_SECONDS:.0f} s."
        )
    return row


def _ask(connection: sa.Connection, batch: str) -> None:
    """Note that the owner of a batch is there."""
    asked = {"asked_at": leases.now_of(connection)}
    update(connection, BATCHES, BATCHES.c.id == batch, asked)


def _is_finished(batch: str) -> sa.ColumnElement[bool]:
    return (ROLLOUTS.c.batch == batch) & (ROLLOUTS.c.state == "finished")


def _status(connection: sa.Connection, batch: str) -> wire.BatchStatus:
    known = _require_batch(connection, batch)
    states = Counter(counts_by(connection, ROLLOUTS.c.state, ROLLOUTS.c.batch == batch))
    live = WORKERS.c.heard_at >= leases.now_of(connection) - leases.LIVE_SECONDS
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
