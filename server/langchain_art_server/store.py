"""What must not be lost: calls, trajectories, policies, checkpoints, jobs. By SQLAlchemy.

SQLite (in WAL mode, ``synchronous=FULL``) is the default; another database by URL. Calls are
written by one thread that puts everything that waits into one transaction, so that durability costs
one `fsync` per batch of replies and not one per reply.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic_core import to_json
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from langchain_art.errors import Conflict, EngineUnavailable, NotFound
from langchain_art.wire import (
    Checkpoint,
    JobEvent,
    JobState,
    LoraConfig,
    Reward,
    TrainJob,
    TrainRequest,
    TrainResult,
    Trajectory,
)
from langchain_art_server.tables import (
    CALLS,
    CHECKPOINTS,
    EVENTS,
    JOBS,
    META,
    POLICIES,
    TRAJECTORIES,
    CallRecord,
    checkpoint_of,
    checkpoint_row,
    digest,
    job_of,
    pack,
    trajectory_of,
    trajectory_row,
    unpack,
)

T = TypeVar("T")


class Store:
    """The database, behind coroutines. One thread writes; readers run beside it."""

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _sqlite_pragmas)
        META.create_all(self._engine)
        self._work: queue.SimpleQueue[tuple[Any, asyncio.Future[Any], Any] | None] = (
            queue.SimpleQueue()
        )
        self._writer = threading.Thread(target=self._write_loop, name="store", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write what waits, then close."""
        self._work.put(None)
        self._writer.join()
        self._engine.dispose()

    # --- the writing thread ---------------------------------------------------------------------

    async def _write(self, work: Callable[[sa.Connection], T] | list[dict[str, Any]]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._work.put((work, future, loop))
        return await future

    def _write_loop(self) -> None:
        with self._engine.connect() as connection:
            while (item := self._work.get()) is not None:
                batch = [item]
                while isinstance(item[0], list):
                    try:
                        item = self._work.get_nowait()
                    except queue.Empty:
                        break
                    if item is None:
                        self._work.put(None)
                        break
                    batch.append(item)
                self._commit(connection, batch)

    def _commit(self, connection: sa.Connection, batch: list[Any]) -> None:
        """Calls first, in one transaction; then each other write in one of its own."""
        calls = [item for item in batch if isinstance(item[0], list)]
        if calls:
            rows = [row for item in calls for row in item[0]]
            self._transact(connection, lambda c: c.execute(sa.insert(CALLS), rows), calls)
        for item in batch:
            if not isinstance(item[0], list):
                self._transact(connection, item[0], [item])

    def _transact(
        self, connection: sa.Connection, work: Callable[[sa.Connection], Any], items: list[Any]
    ) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            with connection.begin():
                result = work(connection)
        except OperationalError as failure:  # disk full, read-only, gone: say so to callers
            error = EngineUnavailable(
                f"The store could not write ({failure.orig}); nothing was acknowledged. "
                "Free disk space or mend the database, then send the request again.",
                retry_after=5,
            )
        except Exception as failure:  # noqa: BLE001 - handed to the caller who waits for it
            error = failure
        for _, future, loop in items:
            loop.call_soon_threadsafe(_settle, future, result, error)

    async def _read(self, work: Callable[[sa.Connection], T]) -> T:
        def run() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        return await asyncio.to_thread(run)

    # --- calls ----------------------------------------------------------------------------------

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        """Returns when the records are on disk."""
        await self._write([record.row() for record in records])

    async def call(self, call_id: str) -> CallRecord:
        """Raises NotFound."""
        found = await self.calls([call_id])
        if not found:
            raise NotFound(f"No call {call_id!r} is recorded here.")
        return found[call_id]

    async def calls(self, call_ids: Iterable[str]) -> dict[str, CallRecord]:
        """The recorded ones among `call_ids`, by id."""
        wanted = list(dict.fromkeys(call_ids))

        def read(connection: sa.Connection) -> dict[str, CallRecord]:
            found: dict[str, CallRecord] = {}
            for part in _parts(wanted):
                for row in connection.execute(sa.select(CALLS).where(CALLS.c.id.in_(part))):
                    found[row.id] = CallRecord.of(row)
            return found

        return await self._read(read)

    async def tagged_calls(self, trajectory_id: str) -> list[CallRecord]:
        """The calls that were tagged with this trajectory, in the order they ended."""
        query = (
            sa.select(CALLS)
            .where(CALLS.c.trajectory_id == trajectory_id)
            .order_by(CALLS.c.created_at)
        )
        return await self._read(lambda c: [CallRecord.of(row) for row in c.execute(query)])

    # --- trajectories ---------------------------------------------------------------------------

    async def add_trajectories(
        self, trajectories: Sequence[Trajectory], group_id: str | None = None
    ) -> int:
        """Store those that are new; returns how many were. Same id, other body: Conflict.

        All or none: a conflict stores nothing.
        """
        rows = [trajectory_row(t, group_id) for t in trajectories]

        def write(connection: sa.Connection) -> int:
            known: dict[str, str] = {}
            for part in _parts([row["id"] for row in rows]):
                query = sa.select(TRAJECTORIES.c.id, TRAJECTORIES.c.digest)
                for row in connection.execute(query.where(TRAJECTORIES.c.id.in_(part))):
                    known[row.id] = row.digest
            for row in rows:
                if known.get(row["id"], row["digest"]) != row["digest"]:
                    raise Conflict(
                        f"Trajectory {row['id']!r} is stored with another content. Ids are used "
                        "once; give a changed trajectory a new id, or set its reward with "
                        "PUT /v1/trajectories/{id}/reward.",
                        param="id",
                    )
            new = [row for row in rows if row["id"] not in known]
            if new:
                connection.execute(sa.insert(TRAJECTORIES), new)
            return len(new)

        return await self._write(write)

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        """Raises NotFound."""
        found = await self.trajectories([trajectory_id])
        if trajectory_id not in found:
            raise NotFound(f"No trajectory {trajectory_id!r} is stored here.")
        return found[trajectory_id][0]

    async def trajectories(self, ids: Iterable[str]) -> dict[str, tuple[Trajectory, str | None]]:
        """The stored ones among `ids`: the trajectory, and the job that trained on it (or None)."""
        wanted = list(dict.fromkeys(ids))

        def read(connection: sa.Connection) -> dict[str, tuple[Trajectory, str | None]]:
            found: dict[str, tuple[Trajectory, str | None]] = {}
            for part in _parts(wanted):
                query = sa.select(TRAJECTORIES).where(TRAJECTORIES.c.id.in_(part))
                for row in connection.execute(query):
                    found[row.id] = (trajectory_of(row), row.trained_by)
            return found

        return await self._read(read)

    async def recent_trajectories(self, limit: int, scenario: str | None) -> list[Trajectory]:
        """The newest first."""
        query = sa.select(TRAJECTORIES).order_by(TRAJECTORIES.c.created_at.desc()).limit(limit)
        if scenario is not None:
            query = query.where(TRAJECTORIES.c.scenario == scenario)
        return await self._read(lambda c: [trajectory_of(row) for row in c.execute(query)])

    async def set_reward(self, trajectory_id: str, reward: Reward) -> Trajectory:
        """Set reward and scores. Raises NotFound, and Conflict once a job has trained on it."""

        def write(connection: sa.Connection) -> Trajectory:
            mine = TRAJECTORIES.c.id == trajectory_id
            row = connection.execute(sa.select(TRAJECTORIES).where(mine)).first()
            if row is None:
                raise NotFound(f"No trajectory {trajectory_id!r} is stored here.")
            old = trajectory_of(row)
            new = old.model_copy(
                update={
                    "reward": reward.reward,
                    "scores": old.scores | reward.scores,
                    "metadata": old.metadata | reward.metadata,
                }
            )
            if row.trained_by is not None and new.reward != old.reward:
                raise Conflict(
                    f"Trajectory {trajectory_id!r} was trained on by job {row.trained_by} with "
                    f"reward {old.reward}; its reward cannot change to {new.reward} any more."
                )
            values = {"body": pack(new.model_dump(mode="json")), "reward": new.reward}
            connection.execute(sa.update(TRAJECTORIES).where(mine).values(values))
            return new

        return await self._write(write)

    # --- policies and checkpoints ---------------------------------------------------------------

    async def add_policy(self, name: str, lora: LoraConfig) -> None:
        """Record a policy whose version 0 was published. Idempotent."""

        def write(connection: sa.Connection) -> None:
            if connection.execute(sa.select(POLICIES).where(POLICIES.c.name == name)).first():
                return
            row = {"name": name, "lora": lora.model_dump_json(), "version": 0}
            connection.execute(sa.insert(POLICIES), [row | {"created_at": time.time()}])

        await self._write(write)

    async def policies(self) -> dict[str, tuple[LoraConfig, int]]:
        """Name -> (shape, version that serves)."""

        def read(connection: sa.Connection) -> dict[str, tuple[LoraConfig, int]]:
            rows = connection.execute(sa.select(POLICIES).order_by(POLICIES.c.name))
            return {r.name: (LoraConfig.model_validate_json(r.lora), r.version) for r in rows}

        return await self._read(read)

    async def set_serving(self, name: str, version: int) -> None:
        """Route the bare name to `version`."""
        query = sa.update(POLICIES).where(POLICIES.c.name == name).values(version=version)
        await self._write(lambda c: c.execute(query))

    async def checkpoints(self, policy: str) -> list[Checkpoint]:
        """All versions that are kept, oldest first."""

        def read(connection: sa.Connection) -> list[Checkpoint]:
            serving = connection.scalar(
                sa.select(POLICIES.c.version).where(POLICIES.c.name == policy)
            )
            query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.policy == policy)
            rows = connection.execute(query.order_by(CHECKPOINTS.c.version))
            return [checkpoint_of(row, serving) for row in rows]

        return await self._read(read)

    async def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a published version. Idempotent."""
        await self._write(lambda c: _insert_checkpoint(c, checkpoint))

    async def set_pinned(self, policy: str, version: int, pinned: bool) -> None:
        """Protect a version from retention, or stop protecting it."""
        mine = (CHECKPOINTS.c.policy == policy) & (CHECKPOINTS.c.version == version)
        await self._write(
            lambda c: c.execute(sa.update(CHECKPOINTS).where(mine).values(pinned=pinned))
        )

    async def forget_checkpoint(self, policy: str, version: int) -> None:
        """Remove a version's record."""
        mine = (CHECKPOINTS.c.policy == policy) & (CHECKPOINTS.c.version == version)
        await self._write(lambda c: c.execute(sa.delete(CHECKPOINTS).where(mine)))

    # --- jobs -----------------------------------------------------------------------------------

    async def add_job(
        self, job_id: str, key: str, request: TrainRequest, rewards: dict[str, float | None]
    ) -> TrainJob:
        """Queue a job; the same key and body give the job that is there. Other body: Conflict.

        The rewards are kept with the job as they are now, so that a run after a crash is the same.
        """
        body = to_json(request)
        row = {
            "id": job_id,
            "key": key,
            "policy": request.policy,
            "digest": digest(body),
            "payload": pack({"request": request.model_dump(mode="json"), "rewards": rewards}),
            "state": "queued",
            "created_at": time.time(),
        }

        def write(connection: sa.Connection) -> TrainJob:
            old = connection.execute(sa.select(JOBS).where(JOBS.c.key == key)).first()
            if old is None:
                connection.execute(sa.insert(JOBS), [row])
                old = connection.execute(sa.select(JOBS).where(JOBS.c.id == job_id)).one()
            elif old.digest != row["digest"]:
                raise Conflict(
                    f"Idempotency-Key {key!r} was used for another request (job {old.id}). "
                    "A key names one request; use a new one.",
                    param="Idempotency-Key",
                )
            return job_of(old)

        return await self._write(write)

    async def job(self, job_id: str) -> TrainJob:
        """Raises NotFound."""
        query = sa.select(JOBS).where(JOBS.c.id == job_id)
        row = await self._read(lambda c: c.execute(query).first())
        if row is None:
            raise NotFound(f"No job {job_id!r} is known here.")
        return job_of(row)

    async def jobs(
        self, states: Sequence[JobState] | None = None, policy: str | None = None
    ) -> list[TrainJob]:
        """In the order they were asked for."""
        query = sa.select(JOBS).order_by(JOBS.c.number)
        if states is not None:
            query = query.where(JOBS.c.state.in_(states))
        if policy is not None:
            query = query.where(JOBS.c.policy == policy)
        return await self._read(lambda c: [job_of(row) for row in c.execute(query)])

    async def job_payload(
        self, job_id: str
    ) -> tuple[TrainRequest, dict[str, float | None], int | None]:
        """The request, the rewards at its time, and the version it is to make (if begun before)."""
        query = sa.select(JOBS.c.payload, JOBS.c.target_version).where(JOBS.c.id == job_id)
        row = await self._read(lambda c: c.execute(query).one())
        payload = unpack(row.payload)
        request = TrainRequest.model_validate_json(to_json(payload["request"]))
        return request, payload["rewards"], row.target_version

    async def begin_job(self, job_id: str, base: int, target: int) -> None:
        """Write down from which version to which, before anything is made."""
        values = {"state": "running", "base_version": base, "target_version": target}
        await self._write(
            lambda c: c.execute(sa.update(JOBS).where(JOBS.c.id == job_id).values(values))
        )

    async def finish_job(
        self,
        job_id: str,
        result: TrainResult | None,
        error: str | None,
        checkpoint: Checkpoint | None = None,
        trained: Sequence[str] = (),
    ) -> None:
        """End a job, route the policy to its version, mark its trajectories: one transaction."""
        values: dict[str, Any] = {
            "state": "succeeded" if error is None else "failed",
            "result": result.model_dump_json() if result else None,
            "error": error,
            "finished_at": time.time(),
        }

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.update(JOBS).where(JOBS.c.id == job_id).values(values))
            if checkpoint is not None:
                _insert_checkpoint(connection, checkpoint)
                mine = POLICIES.c.name == checkpoint.policy
                connection.execute(
                    sa.update(POLICIES).where(mine).values(version=checkpoint.version)
                )
            for part in _parts(trained):
                mine = TRAJECTORIES.c.id.in_(part)
                connection.execute(sa.update(TRAJECTORIES).where(mine).values(trained_by=job_id))

        await self._write(write)

    async def add_event(self, job_id: str, message: str, progress: float | None = None) -> None:
        """Append a line to a job's story."""

        def write(connection: sa.Connection) -> None:
            last = connection.scalar(
                sa.select(sa.func.max(EVENTS.c.seq)).where(EVENTS.c.job_id == job_id)
            )
            row = {"job_id": job_id, "seq": (last or 0) + 1, "at": time.time()}
            connection.execute(
                sa.insert(EVENTS), [row | {"message": message, "progress": progress}]
            )

        await self._write(write)

    async def events(self, job_id: str, after: int) -> list[JobEvent]:
        """Events with `seq` above `after`."""
        query = (
            sa.select(EVENTS)
            .where((EVENTS.c.job_id == job_id) & (EVENTS.c.seq > after))
            .order_by(EVENTS.c.seq)
        )
        return await self._read(
            lambda c: [
                JobEvent(seq=r.seq, at=r.at, message=r.message, progress=r.progress)
                for r in c.execute(query)
            ]
        )

    async def counts(self) -> tuple[int, int, dict[str, int]]:
        """Calls, trajectories, jobs by state."""

        def read(connection: sa.Connection) -> tuple[int, int, dict[str, int]]:
            def count(table: sa.Table) -> int:
                return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0

            query = sa.select(JOBS.c.state, sa.func.count()).group_by(JOBS.c.state)
            jobs = {row[0]: row[1] for row in connection.execute(query)}
            return count(CALLS), count(TRAJECTORIES), jobs

        return await self._read(read)


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Ids in parts that one statement may name; SQLite allows so many parameters and no more."""
    for start in range(0, len(ids), 500):
        yield ids[start : start + 500]


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _insert_checkpoint(connection: sa.Connection, checkpoint: Checkpoint) -> None:
    mine = (CHECKPOINTS.c.policy == checkpoint.policy) & (
        CHECKPOINTS.c.version == checkpoint.version
    )
    if connection.execute(sa.select(CHECKPOINTS.c.version).where(mine)).first():
        return
    connection.execute(sa.insert(CHECKPOINTS), [checkpoint_row(checkpoint)])
