"""Training jobs and their events: stored before they begin, ended in one transaction."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic_core import to_json

from langchain_art import wire
from langchain_art.errors import ArtError, Conflict, Damaged, NotFound, Overloaded
from langchain_art_server.storage.database import Database, Tables, reads, writes
from langchain_art_server.storage.deletions import require_reference
from langchain_art_server.storage.fleet import PolicyLeases
from langchain_art_server.storage.queries import (
    Page,
    behind,
    count_of,
    select_among,
    take_page,
    with_jobs,
)
from langchain_art_server.storage.review_store import VerdictMark, read_marks, settle_marks
from langchain_art_server.storage.reward_snapshot import RewardSnapshot
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import (
    EVENTS,
    IS_OPEN,
    JOBS,
    POLICIES,
    TRAINED,
    TRAINED_CALLS,
    TRAINED_VERDICTS,
    digest,
    insert_checkpoint,
    job_of,
    pack,
    unpack,
)

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReviewStep:
    """One job of a step by reviews, before it is queued."""

    job_id: str
    request: wire.TrainRequest
    runs: Sequence[wire.Trajectory]
    """Runs of its groups."""
    marks: Sequence[VerdictMark]
    """The verdicts that it trains."""


class JobStore(Tables):
    """Reads and writes jobs; see `Store.jobs`."""

    def __init__(self, database: Database, leases: PolicyLeases) -> None:
        super().__init__(database)
        self.leases = leases
        #: Grows when a job was added or has changed; its events do not count.
        self.changes = 0

    async def add(
        self,
        job_id: str,
        key: str,
        request: wire.TrainRequest,
        runs: Iterable[wire.Trajectory],
        max_open: int,
    ) -> wire.TrainJob:
        """Queue a job. The same key and body give the existing job, queued anew if it is retryable.

        The rewards of `runs` (the trajectories of its groups) are stored with it, so that it trains
        with the same rewards after a restart; those of the request stand for them.

        Raises:
            Conflict: the key was used with another body.
            Overloaded: `max_open` jobs wait or run.
            InvalidRequest: the version that it measures from is not kept. Until the job has ended,
                it is.
        """
        asked = _digest(request)
        row = _row(job_id, key, asked, request, runs)

        def write(connection: sa.Connection) -> wire.TrainJob:
            old = _of_key(connection, key, asked)
            if old is None or old.retryable:
                _require_room(connection, 1, max_open)
                require_reference(connection, request)
            if old is None:
                insert(connection, JOBS, [row])
                old = connection.execute(sa.select(JOBS).where(JOBS.c.id == job_id)).one()
            elif old.retryable:
                mine = JOBS.c.id == old.id
                update(connection, JOBS, mine, _QUEUED_ANEW)
                _append(connection, old.id, f"queued again after: {old.error}", None)
                old = connection.execute(sa.select(JOBS).where(mine)).one()
            return job_of(old)

        return await self.write(write)

    async def add_reviewed(
        self,
        key: str,
        order: wire.ReviewTraining,
        steps: Sequence[ReviewStep],
        known: Sequence[VerdictMark],
        max_open: int,
    ) -> list[wire.TrainJob] | None:
        """Queue the jobs of a step by reviews, with marks of the verdicts: in one transaction.

        Other than `add`, the same key never queues them anew: what a failed one did not train may
        have been ordered again by another key. There is a job for each of `steps`; it has the
        order's key with its number behind it. Of the marks that are `known` (`ReviewStore.marks`)
        the steps' verdicts are none.

        Returns:
            None: jobs on other verdicts were ordered meanwhile, and nothing is queued.

        Raises:
            Conflict, Overloaded, InvalidRequest: as `add`.
        """
        asked = _order_digest(order)
        rows = [
            _row(step.job_id, _numbered(key, number), asked, step.request, step.runs)
            for number, step in enumerate(steps)
        ]
        before = {mark.job for mark in known}

        def write(connection: sa.Connection) -> list[wire.TrainJob] | None:
            if found := _of_order(connection, key, asked):
                return found
            if not {mark.job for mark in read_marks(connection, order.policy)} <= before:
                return None
            _require_room(connection, len(steps), max_open)
            for step in steps:
                require_reference(connection, step.request)
                marks = [mark.row(step.job_id, order.policy) for mark in step.marks]
                insert(connection, TRAINED_VERDICTS, marks)
            insert(connection, JOBS, rows)
            return _of_order(connection, key, asked)

        return await self.write(write)

    async def reviewed(self, key: str, order: wire.ReviewTraining) -> list[wire.TrainJob]:
        """The jobs of an order by reviews; empty: its key is new. Raises Conflict."""
        asked = _order_digest(order)
        return await self.read(lambda c: _of_order(c, key, asked))

    @reads
    def repeated(
        self, connection: sa.Connection, key: str, request: wire.TrainRequest
    ) -> wire.TrainJob | None:
        """The job of the same key and body, unless it is to be queued anew. Raises Conflict."""
        old = _of_key(connection, key, _digest(request))
        return None if old is None or old.retryable else job_of(old)

    async def get(self, job_id: str) -> wire.TrainJob:
        """Raises NotFound."""
        return await self.read(lambda c: _job(c, job_id))

    @reads
    def next_open(self, connection: sa.Connection) -> wire.TrainJob | None:
        """The job to run: one that was begun, whose versions are chosen, or else the oldest.

        One whose row is damaged is left out, and logged; so is, not logged, one of a policy that
        another server changes now.
        """
        begun_first = sa.case((JOBS.c.state == "running", 0), else_=1)
        query = sa.select(JOBS).where(IS_OPEN).order_by(begun_first, JOBS.c.number)
        taken = self.leases.taken(connection)
        with connection.execute(query, execution_options={"yield_per": 1}) as rows:
            for row in rows:
                if row.policy in taken:
                    continue
                try:
                    return job_of(row)
                except Damaged as error:
                    log.error("Job %s is not run: %s", row.id, error)
        return None

    @reads
    def page(
        self,
        connection: sa.Connection,
        limit: int,
        after: str | None = None,
        policy: str | None = None,
    ) -> Page[wire.TrainJob]:
        """Some jobs, oldest first. Raises InvalidRequest if there is no job `after`."""
        query = sa.select(JOBS).order_by(JOBS.c.number).where(behind(connection, JOBS, after))
        if policy is not None:
            query = query.where(JOBS.c.policy == policy)

        def item(row: sa.Row[Any]) -> tuple[wire.TrainJob, int]:
            return job_of(row), len(row.result or "") + len(row.error or "")

        return take_page(connection, query, limit, "id", item, at_once=8)

    async def latest(self, limit: int) -> list[wire.TrainJob]:
        """The last `limit` jobs that were added, oldest first."""
        query = sa.select(JOBS).order_by(JOBS.c.number.desc()).limit(limit)
        return await self.read(lambda c: [job_of(row) for row in c.execute(query)][::-1])

    async def last_events(self, job_id: str, limit: int) -> list[wire.JobEvent]:
        """The last `limit` events of a job, oldest first."""
        mine = sa.select(EVENTS).where(EVENTS.c.job_id == job_id)
        query = mine.order_by(EVENTS.c.seq.desc()).limit(limit)
        return await self.read(lambda c: [_event(row) for row in c.execute(query)][::-1])

    async def payload(
        self, job_id: str
    ) -> tuple[wire.TrainRequest, dict[str, RewardSnapshot], int | None]:
        """The request, the rewards by trajectory, and the version to make (None if not begun)."""
        query = sa.select(JOBS).where(JOBS.c.id == job_id)
        row = await self.read(lambda c: intact(JOBS, c.execute(query).one()))
        payload = unpack(row.payload)
        request = wire.TrainRequest.model_validate_json(to_json(payload["request"]))
        scored = {run: RewardSnapshot(**known) for run, known in payload["scored"].items()}
        return request, scored, row.target_version

    async def parents(self, policy: str) -> dict[int, int]:
        """Version -> the version that its job started from; deleted ones included."""
        made = (JOBS.c.policy == policy) & (JOBS.c.state == "succeeded")
        made &= JOBS.c.target_version.is_not(None)
        query = sa.select(JOBS.c.target_version, JOBS.c.base_version).where(made)
        return await self.read(
            lambda c: {row.target_version: row.base_version for row in c.execute(query)}
        )

    async def trained_runs(
        self, ids: Iterable[str], policy: str, lineage: Collection[int] | None = None
    ) -> dict[str, set[str]]:
        """The trajectories that jobs of a policy trained on, each with these jobs.

        Only jobs that made a version of the `lineage` count (`steps_since`); None: all do.
        """
        column = TRAINED.c.trajectory_id
        return await self.read(lambda c: _marks(c, column, ids, policy, lineage))

    async def trained_calls(
        self, ids: Iterable[str], policy: str, lineage: Collection[int] | None = None
    ) -> dict[str, set[str]]:
        """The calls that jobs of a policy trained; as `trained_runs`."""
        column = TRAINED_CALLS.c.call_id
        return await self.read(lambda c: _marks(c, column, ids, policy, lineage))

    @writes
    def begin(self, connection: sa.Connection, job_id: str, base: int, target: int) -> None:
        """Store the versions that a job starts from and makes, and count the attempt.

        Raises LeaseLost, JobCancelled.
        """
        mine = JOBS.c.id == job_id
        require_running(connection, job_id, self.leases)
        before = connection.scalar(sa.select(JOBS.c.attempts).where(mine)) or 0
        values = {"base_version": base, "target_version": target, "attempts": before + 1}
        update(connection, JOBS, mine, {"state": "running"} | values)

    @writes
    def finish(
        self,
        connection: sa.Connection,
        job_id: str,
        result: wire.TrainResult | None,
        error: str | None,
        checkpoint: wire.Checkpoint | None = None,
        trained: Sequence[str] = (),
        calls: Sequence[str] = (),
        message: str | None = None,
        *,
        imitated: Sequence[str] = (),
        retrain: bool = False,
        retryable: bool = False,
        lineage: Collection[int] | None = None,
    ) -> None:
        """End a job, route the policy to its version, mark what it trained: one transaction.

        `trained` are trajectories, `calls` are those of their calls that were trained, `imitated`
        are trajectories of a supervised step, which is no mark. `message` is the job's last event.

        Raises:
            LeaseLost: another server has the policy by now.
            JobCancelled: another server has cancelled it.
            Conflict: a job trained on one of them on the `lineage` of the version (`trained_runs`),
                and `retrain` is not set.
        """
        values: dict[str, Any] = {
            "state": "succeeded" if error is None else "failed",
            "result": result.model_dump_json() if result else None,
            "error": error,
            "retryable": retryable,
            "finished_at": time.time(),
        }
        if checkpoint is None and not trained:  # another job's version may have its number
            values["target_version"] = None
        mine = JOBS.c.id == job_id
        require_running(connection, job_id, self.leases)
        update(connection, JOBS, mine, values)
        if error is None:
            settle_marks(connection, job_id, (*trained, *calls, *imitated))
        if checkpoint is not None:
            insert_checkpoint(connection, checkpoint)
            routed = POLICIES.c.name == checkpoint.policy
            update(connection, POLICIES, routed, {"version": checkpoint.version})
        if trained:
            policy = _policy_of(connection, job_id)
            rows = [{"trajectory_id": t, "policy": policy, "job_id": job_id} for t in trained]
            marked = (TRAINED.c.trajectory_id, trained), (TRAINED_CALLS.c.call_id, calls)
            for column, ids in () if retrain else marked:
                if twice := sorted(_marks(connection, column, ids, policy, lineage))[:5]:
                    raise Conflict(
                        f"Job {job_id} would train {policy!r} twice on {twice}. Set retrain to "
                        "train again on purpose."
                    )
            insert(connection, TRAINED, rows)
            marks = [{"call_id": one, "job_id": job_id} for one in calls]
            insert(connection, TRAINED_CALLS, marks)
        if message is not None:
            _append(connection, job_id, message, 1.0)

    @writes
    def cancel(self, connection: sa.Connection, job_id: str) -> wire.TrainJob:
        """Cancel a job that has not ended; one that has is given as it is. Raises NotFound."""
        values = {"state": "cancelled", "finished_at": time.time()}
        if not _job(connection, job_id).ended:
            update(connection, JOBS, JOBS.c.id == job_id, values)
            _append(connection, job_id, "cancelled; nothing was published", None)
        return _job(connection, job_id)

    async def add_event(self, job_id: str, message: str, progress: float | None = None) -> None:
        """Append an event to a job, unless another server has its policy by now."""

        def write(connection: sa.Connection) -> None:
            if self.leases.holds(connection, _policy_of(connection, job_id)):
                _append(connection, job_id, message, progress)

        await self._database.write(write)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """See `Database.write`; counts the change."""
        try:
            return await super().write(work)
        finally:
            self.changes += 1

    async def events(self, job_id: str, after: int, limit: int) -> Page[wire.JobEvent]:
        """The first `limit` events with `seq` above `after`; a page's cursor is a `seq`."""
        mine = (EVENTS.c.job_id == job_id) & (EVENTS.c.seq > after)
        query = sa.select(EVENTS).where(mine).order_by(EVENTS.c.seq)

        def item(row: sa.Row[Any]) -> tuple[wire.JobEvent, int]:
            event = _event(row)
            return event, len(event.message)

        return await self.read(lambda c: take_page(c, query, limit, "seq", item))


class JobCancelled(ArtError):
    """Another server has cancelled the job; nothing was written."""


def require_running(connection: sa.Connection, job_id: str, leases: PolicyLeases) -> None:
    """Raise LeaseLost, or JobCancelled, if this server may not write to a job any more."""
    leases.require(connection, _policy_of(connection, job_id))
    if connection.scalar(sa.select(JOBS.c.state).where(JOBS.c.id == job_id)) == "cancelled":
        raise JobCancelled(f"Job {job_id} was cancelled; nothing was published.")


def _policy_of(connection: sa.Connection, job_id: str) -> str:
    return connection.scalar(sa.select(JOBS.c.policy).where(JOBS.c.id == job_id)) or ""


#: A failed job that waits again, as if it had never begun; its number keeps its place.
_QUEUED_ANEW: dict[str, Any] = {
    "state": "queued",
    "base_version": None,
    "target_version": None,
    "error": None,
    "retryable": False,
    "finished_at": None,
}


def _event(row: sa.Row[Any]) -> wire.JobEvent:
    return wire.JobEvent.model_validate(intact(EVENTS, row), from_attributes=True)


def _digest(request: wire.TrainRequest) -> str:
    unread = {"seconds"} if request.compared else {"seconds", "compared"}
    return digest(request.model_dump_json(exclude=unread).encode())


def _order_digest(order: wire.ReviewTraining) -> str:
    return digest(b"reviews" + order.model_dump_json().encode())


def _row(
    job_id: str, key: str, asked: str, request: wire.TrainRequest, runs: Iterable[wire.Trajectory]
) -> dict[str, Any]:
    """The row of a job that waits, with the rewards of its runs as they are now."""
    scored = {run.id: RewardSnapshot.of(run, request) for run in runs}
    return {
        "id": job_id,
        "key": key,
        "policy": request.policy,
        "digest": asked,
        "payload": pack({"request": request, "scored": scored}),
        "state": "queued",
        "attempts": 0,
        "retryable": False,
        "created_at": time.time(),
    }


def _require_room(connection: sa.Connection, more: int, max_open: int) -> None:
    """Raise Overloaded if so many more jobs cannot wait."""
    if count_of(connection, JOBS, IS_OPEN) + more > max_open:
        raise Overloaded(
            f"{max_open} jobs wait or run, which is the server's setting max_queued_jobs. Wait "
            "until some have ended, or cancel some.",
            retry_after=5,
        )


def _numbered(key: str, number: int) -> str:
    """The key of one job of an order by reviews; no client's key has a ``#``."""
    return f"{key}#{number}" if number else key


def _of_order(connection: sa.Connection, key: str, asked: str) -> list[wire.TrainJob]:
    """The jobs of an order by reviews. Raises Conflict."""
    found: list[wire.TrainJob] = []
    while (row := _of_key(connection, _numbered(key, len(found)), asked)) is not None:
        found.append(job_of(row))
    return found


def _of_key(connection: sa.Connection, key: str, asked: str) -> sa.Row[Any] | None:
    """The job of a key. Raises Conflict if its request has another digest than `asked`."""
    old = connection.execute(sa.select(JOBS).where(JOBS.c.key == key)).first()
    if old is not None and old.digest != asked:
        raise Conflict(
            f"Idempotency-Key {key!r} was used for another request (job {old.id}). "
            "A key names one request; use a new one.",
            param="Idempotency-Key",
        )
    return old


def _job(connection: sa.Connection, job_id: str) -> wire.TrainJob:
    row = connection.execute(sa.select(JOBS).where(JOBS.c.id == job_id)).first()
    if row is None or row.id != job_id:  # a damaged index may give another
        raise NotFound(f"No job {job_id!r} is known here.")
    return job_of(row)


def _marks(
    connection: sa.Connection,
    column: sa.Column[str],
    ids: Iterable[str],
    policy: str,
    lineage: Collection[int] | None,
) -> dict[str, set[str]]:
    """See `JobStore.trained_runs`; `column` is the one of the marks that `ids` are of."""
    table, found = column.table, defaultdict[str, set[str]](set)
    for row in select_among(connection, with_jobs(table), column, ids):
        job = intact(table, row).job_id
        if row.of in (policy, None) and (lineage is None or row.made in (None, *lineage)):
            found[getattr(row, column.name)].add(job)
    return dict(found)


def _append(connection: sa.Connection, job_id: str, message: str, progress: float | None) -> None:
    last = connection.scalar(sa.select(sa.func.max(EVENTS.c.seq)).where(EVENTS.c.job_id == job_id))
    row = {"job_id": job_id, "seq": (last or 0) + 1, "at": time.time()}
    insert(connection, EVENTS, [row | {"message": message, "progress": progress}])
