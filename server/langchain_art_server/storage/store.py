"""The durable store: calls, trajectories, policies and checkpoints.

Jobs are in `Store.jobs`, reviews in `Store.reviews`, rollouts that workers lease in
`Store.rollouts`; `Store.runs` finds trajectories.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from langchain_art.errors import Conflict, NotFound
from langchain_art.wire import Checkpoint, LoraConfig, Reward, RolledBack, Trajectory
from langchain_art_server.storage.database import RowCount, reads, writes
from langchain_art_server.storage.deletions import (
    Versions,
    delete_among,
    delete_run,
    jobs_of_run,
    open_job_of_run,
)
from langchain_art_server.storage.fleet import PolicyLeases
from langchain_art_server.storage.job_store import JobStore
from langchain_art_server.storage.key_store import KeyStore
from langchain_art_server.storage.queries import (
    Page,
    behind,
    counts_by,
    select_among,
    take_page,
    with_jobs,
)
from langchain_art_server.storage.review_store import ReviewStore
from langchain_art_server.storage.reward_snapshot import changed, rewards_in_words
from langchain_art_server.storage.rollout_queue import RolloutQueue
from langchain_art_server.storage.run_index import RunIndex, of_graphs, write_index
from langchain_art_server.storage.run_list import RunList
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import (
    CALLS,
    CHECKPOINTS,
    IMAGES,
    JOBS,
    POLICIES,
    ROLLBACKS,
    RUN_CALLS,
    TRAINED,
    TRAJECTORIES,
    CallRecord,
    StoredRun,
    checkpoint_of,
    insert_checkpoint,
    trajectory_of,
    trajectory_row,
)


class Store(Versions):
    """Reads and writes the tables. Coroutines return when what they write is on disk."""

    def __init__(self, url: str, *, shared: bool = False, alike: str = "") -> None:
        super().__init__(url, shared=shared, alike=alike)
        self.leases = PolicyLeases(self)
        self.jobs = JobStore(self, self.leases)
        self.reviews = ReviewStore(self)
        self.runs = RunList(self)
        self.keys = KeyStore(self)
        self.rollouts = RolloutQueue(self)
        self._calls, self._runs = RowCount(CALLS, shared), RowCount(TRAJECTORIES, shared)
        #: How often a stored run was changed or deleted by this server.
        self.changes = 0

    async def call(self, call_id: str) -> CallRecord:
        """Raises NotFound."""
        found = await self.calls([call_id])
        if call_id not in found:
            raise NotFound(f"No call {call_id!r} is recorded here.")
        return found[call_id]

    @reads
    def calls(self, connection: sa.Connection, call_ids: Iterable[str]) -> dict[str, CallRecord]:
        """The recorded ones among `call_ids`, by id, with their images."""
        rows = select_among(connection, sa.select(CALLS), CALLS.c.id, call_ids)
        found = {row.id: CallRecord.of(row) for row in rows}
        if wanted := {one for call in found.values() for one in call.request.get("images", ())}:
            shown = select_among(connection, sa.select(IMAGES), IMAGES.c.sha256, wanted)
            bodies = {row.sha256: intact(IMAGES, row).body for row in shown}
            for name, call in found.items():
                mine = {one: bodies[one] for one in call.request.get("images", ()) if one in bodies}
                found[name] = replace(call, images=mine)
        return found

    @reads
    def image(self, connection: sa.Connection, sha256: str) -> bytes:
        """An image that a call was shown. Raises NotFound."""
        mine = sa.select(IMAGES).where(IMAGES.c.sha256 == sha256)
        if (row := connection.execute(mine).first()) is None:
            raise NotFound(f"No image {sha256!r} is stored here.")
        return intact(IMAGES, row).body

    async def tagged_calls(self, trajectory_id: str) -> list[CallRecord]:
        """The calls that were tagged with a trajectory's id, in the order they were recorded in."""
        tagged = sa.select(CALLS).where(CALLS.c.trajectory_id == trajectory_id)
        query = tagged.order_by(CALLS.c.number)
        return await self.read(lambda c: [CallRecord.of(row) for row in c.execute(query)])

    async def add_trajectories(
        self, trajectories: Sequence[Trajectory], group_id: str | None = None
    ) -> int:
        """Store those that are new, all or none.

        Returns:
            How many were new.

        Raises:
            Conflict: one is stored with this id and another body.
        """
        rows = [trajectory_row(t, group_id) for t in trajectories]
        index = await asyncio.to_thread(lambda: list(map(RunIndex.of, trajectories)))

        def write(connection: sa.Connection) -> int:
            query = sa.select(TRAJECTORIES.c.id, TRAJECTORIES.c.digest)
            ids = [row["id"] for row in rows]
            found = select_among(connection, query, TRAJECTORIES.c.id, ids)
            known = {row.id: row.digest for row in found}
            for row in rows:
                if known.get(row["id"], row["digest"]) != row["digest"]:
                    raise Conflict(
                        f"Trajectory {row['id']!r} is stored with another content. Ids are used "
                        "once; give a changed trajectory a new id, or set its reward with "
                        "PUT /v1/trajectories/{id}/reward.",
                        param="id",
                    )
            new = [row for row in rows if row["id"] not in known]
            insert(connection, TRAJECTORIES, new)
            stored = {row["id"] for row in new}
            _link(connection, [run for run in trajectories if run.id in stored])
            write_index(connection, [one for one in index if one.id in stored])
            return len(new)

        return await self.write(write)

    async def trajectory(self, trajectory_id: str) -> StoredRun:
        """Raises NotFound."""
        found = await self.trajectories([trajectory_id])
        if trajectory_id not in found:
            raise NotFound(f"No trajectory {trajectory_id!r} is stored here.")
        return found[trajectory_id]

    @reads
    def trajectories(self, connection: sa.Connection, ids: Iterable[str]) -> dict[str, StoredRun]:
        """The stored ones among `ids`, by id."""
        rows = select_among(connection, sa.select(TRAJECTORIES), TRAJECTORIES.c.id, ids)
        found = {row.id: StoredRun(trajectory_of(row), row.assembled, {}) for row in rows}
        marks = with_jobs(TRAINED).order_by(TRAINED.c.policy, JOBS.c.number)
        for mark in select_among(connection, marks, TRAINED.c.trajectory_id, found):
            found[mark.trajectory_id].trained_by[mark.policy] = intact(TRAINED, mark).job_id
        return found

    @reads
    def recent_trajectories(
        self,
        connection: sa.Connection,
        limit: int,
        scenario: str | None = None,
        after: str | None = None,
        prefix: str | None = None,
    ) -> Page[bytes]:
        """Some trajectories as JSON, the newest first: as they are stored, and so not parsed here.

        Only those of a `scenario`, and whose ids begin with a `prefix`, if these are given; without
        a prefix those `of_graphs`.

        Raises InvalidRequest: there is no trajectory `after`.
        """
        query = sa.select(TRAJECTORIES).order_by(TRAJECTORIES.c.number.desc())
        query = query.where(behind(connection, TRAJECTORIES, after, newest_first=True))
        if scenario is not None:
            query = query.where(TRAJECTORIES.c.scenario == scenario)
        if prefix:  # LIKE would not tell cases apart in SQLite
            begins = sa.func.substr(TRAJECTORIES.c.id, 1, len(prefix))
            query = query.where(begins == prefix)
        else:
            query = query.where(of_graphs(TRAJECTORIES.c.id))

        def item(row: sa.Row[Any]) -> tuple[bytes, int]:
            body = zlib.decompress(intact(TRAJECTORIES, row).body)
            return body, len(body)

        return take_page(connection, query, limit, "id", item, at_once=8)  # they have megabytes

    @writes
    def set_reward(
        self,
        connection: sa.Connection,
        trajectory_id: str,
        reward: Reward,
        assembled: Trajectory | None = None,
    ) -> Trajectory:
        """Set the reward and those of single calls, and add scores and metadata (`changed`).

        `assembled` is the trajectory of the calls that are tagged with this id now. It is stored if
        there is none, and replaces one that was assembled from fewer calls.

        Raises:
            NotFound: no such trajectory, and `assembled` is None.
            InvalidRequest: it does not have a call that a reward is for.
            Conflict: a job trained on it, and a reward of it or its calls would change.
        """
        mine = TRAJECTORIES.c.id == trajectory_id
        row = connection.execute(sa.select(TRAJECTORIES).where(mine)).first()
        if row is None:
            if assembled is None:
                raise NotFound(f"No trajectory {trajectory_id!r} is stored here.")
            new = changed(assembled, reward)
            stored = trajectory_row(new, None, assembled=True)
            insert(connection, TRAJECTORIES, [stored])
            _link(connection, [new])
            write_index(connection, [RunIndex.of(new)])
            return new
        old = trajectory_of(row)
        turns = None
        if row.assembled and assembled is not None and len(assembled.turns) > len(old.turns):
            _refuse_late_calls(connection, old, len(assembled.turns))
            turns = assembled.turns
        new = changed(old, reward, turns)
        before, after = rewards_in_words(old), rewards_in_words(new)
        if before != after and (jobs := jobs_of_run(connection, trajectory_id)):
            raise Conflict(
                f"Trajectory {trajectory_id!r} was trained on by {jobs} with reward {before}; "
                f"it cannot change to {after} any more."
            )
        kept = trajectory_row(new, row.group_id)
        values = {name: kept[name] for name in ("body", "reward", "scenario")}
        update(connection, TRAJECTORIES, mine, values)
        self.changes += 1
        if turns is not None:
            delete_among(connection, RUN_CALLS.c.trajectory_id, [trajectory_id])
            _link(connection, [new])
        write_index(connection, [RunIndex.of(new)])
        return new

    async def delete_trajectory(self, trajectory_id: str) -> None:
        """See `deletions.delete_run`."""
        await self.write(lambda c: delete_run(c, trajectory_id))
        self.changes += 1
        self._calls.recount()
        self._runs.recount()

    @writes
    def add_policy(self, connection: sa.Connection, name: str, lora: LoraConfig) -> None:
        """Insert a policy whose version 0 is published. Idempotent. Raises LeaseLost."""
        self.leases.require(connection, name)
        if not connection.execute(sa.select(POLICIES).where(POLICIES.c.name == name)).first():
            row = {"name": name, "lora": lora.model_dump_json(), "version": 0}
            insert(connection, POLICIES, [row | {"created_at": time.time()}])

    @reads
    def policies(self, connection: sa.Connection) -> dict[str, tuple[LoraConfig, int]]:
        """Name -> (LoRA shape, version that serves)."""
        found = connection.execute(sa.select(POLICIES).order_by(POLICIES.c.name))
        rows = [intact(POLICIES, row) for row in found]
        return {r.name: (LoraConfig.model_validate_json(r.lora), r.version) for r in rows}

    @reads
    def served(self, connection: sa.Connection) -> tuple[dict[str, int], set[tuple[str, int]]]:
        """The version that serves, of each policy, and all versions that are kept."""
        kept = connection.execute(sa.select(CHECKPOINTS.c.policy, CHECKPOINTS.c.version))
        policies = connection.execute(sa.select(POLICIES))
        serving = {row.name: intact(POLICIES, row).version for row in policies}
        return serving, {(row.policy, row.version) for row in kept}

    @writes
    def roll_back(self, connection: sa.Connection, name: str, version: int, why: str) -> None:
        """Let `version` serve, and write down in place of which and why. Raises LeaseLost."""
        self.leases.require(connection, name)
        mine = POLICIES.c.name == name
        known = connection.execute(sa.select(POLICIES).where(mine)).first()
        if known is not None and (former := intact(POLICIES, known).version) != version:
            update(connection, POLICIES, mine, {"version": version})
            row = {"policy": name, "former": former, "version": version, "why": why}
            # Of the rollbacks between two versions the last one is kept: no other is read.
            same = (ROLLBACKS.c.former == former) & (ROLLBACKS.c.version == version)
            connection.execute(sa.delete(ROLLBACKS).where((ROLLBACKS.c.policy == name) & same))
            insert(connection, ROLLBACKS, [row | {"at": time.time()}])

    async def checkpoints(self, policy: str) -> list[Checkpoint]:
        """The versions of a policy that are kept, oldest first."""
        parents = await self.jobs.parents(policy)

        def read(connection: sa.Connection) -> list[Checkpoint]:
            served = sa.select(POLICIES.c.version).where(POLICIES.c.name == policy)
            if (serving := connection.scalar(served)) is None:
                return []
            out = _rolled_back(connection, policy, serving, parents)
            query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.policy == policy)
            rows = connection.execute(query.order_by(CHECKPOINTS.c.version))
            return [checkpoint_of(row, serving, out.get(row.version)) for row in rows]

        return await self.read(read)

    async def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Insert a published version. Idempotent."""
        await self.write(lambda c: insert_checkpoint(c, checkpoint))

    async def stored_bytes(self) -> int:
        """Bytes of the database and of all adapters."""
        query = sa.select(sa.func.coalesce(sa.func.sum(CHECKPOINTS.c.bytes), 0))
        adapters = await self.read(lambda c: int(c.execute(query).scalar_one()))
        return await self.size() + adapters

    async def counts(self) -> tuple[int, int, dict[str, int]]:
        """Number of calls, of trajectories, and of jobs by state."""
        jobs = await self.read(lambda c: counts_by(c, JOBS.c.state))
        return await self.read(self._calls.read), await self.read(self._runs.read), jobs


def _link(connection: sa.Connection, runs: Iterable[Trajectory]) -> None:
    """Remember which calls the runs have."""
    links = {(run.id, turn.call_id): None for run in runs for turn in run.turns if turn.call_id}
    rows = [{"trajectory_id": run, "call_id": call} for run, call in links]
    insert(connection, RUN_CALLS, rows)


def _refuse_late_calls(connection: sa.Connection, known: Trajectory, calls: int) -> None:
    """Raise Conflict if a job uses the trajectory: it must train the same calls after a restart."""
    late = calls - len(known.turns)
    jobs = jobs_of_run(connection, known.id)
    if not jobs and (job := open_job_of_run(connection, known.id)) is not None:
        jobs = f"job {job}, which has not ended"
    if jobs:
        raise Conflict(
            f"{late} calls were tagged with trajectory {known.id!r} after its "
            f"{len(known.turns)} calls were given to training, by {jobs}. They cannot join it any "
            "more; tag the calls of another run with an id of their own."
        )


def _rolled_back(
    connection: sa.Connection, policy: str, serving: int, parents: Mapping[int, int]
) -> dict[int, RolledBack]:
    """The versions that a rollback took out of service, each with the last one that did.

    These are the version that served and those that it was made from, as far as the version that
    serves since then was not made from them. What is on the way to `serving` is in service again.
    `parents` has, for each version that a job made, the one that it started from. Raises Damaged.
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
