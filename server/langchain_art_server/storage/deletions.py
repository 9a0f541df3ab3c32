"""Deletes runs, policies and versions, unless something that has not ended needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa
from pydantic_core import to_json

from langchain_art.errors import Conflict, Damaged, InvalidRequest, NotFound
from langchain_art.wire import TrainRequest
from langchain_art_server.storage.database import Database, reads, writes
from langchain_art_server.storage.fleet import PolicyLeases
from langchain_art_server.storage.queries import MAX_PARAMETERS, select_among
from langchain_art_server.storage.run_index import forget_runs
from langchain_art_server.storage.seals import intact, update
from langchain_art_server.storage.tables import (
    CALL_IMAGES,
    CALLS,
    CHECKPOINTS,
    IMAGES,
    IS_OPEN,
    JOBS,
    POLICIES,
    REVIEWS,
    ROLLBACKS,
    RUN_CALLS,
    TRAINED,
    TRAINED_CALLS,
    TRAINED_VERDICTS,
    TRAJECTORIES,
    unpack,
    version_is,
)

log = logging.getLogger(__name__)
#: Versions of a policy that may be pinned: fits and exports pin by themselves, disks are finite.
MAX_PINNED = 32


def open_job_of_run(connection: sa.Connection, trajectory_id: str) -> str | None:
    """The job that is to train on a run, and has not ended; None if there is none."""
    for row in connection.execute(sa.select(JOBS).where(IS_OPEN)):
        request = unpack(intact(JOBS, row).payload)["request"]
        if any(trajectory_id in group for group in request["groups"]):
            return row.id
    return None


def jobs_of_run(connection: sa.Connection, trajectory_id: str) -> str:
    """The jobs that trained on a trajectory, for a message; empty if none did."""
    query = sa.select(TRAINED).where(TRAINED.c.trajectory_id == trajectory_id)
    rows = connection.execute(query.order_by(TRAINED.c.policy))
    return " and ".join(f"job {row.job_id} of policy {row.policy!r}" for row in rows)


def _refuse_open_jobs(connection: sa.Connection, policy: str) -> None:
    for row, (of, version) in _open_jobs(connection):
        if row.policy == policy or (of == policy and version):
            raise Conflict(
                f"Job {row.id} of policy {row.policy!r} needs {policy!r} and has not ended. Wait "
                "for its end, or cancel it."
            )


def _open_jobs(connection: sa.Connection) -> Iterator[tuple[sa.Row[Any], tuple[str, int]]]:
    """The jobs that have not ended, each with what it measures from (`TrainRequest.reference`)."""
    for row in connection.execute(sa.select(JOBS).where(IS_OPEN).order_by(JOBS.c.number)):
        try:
            payload = unpack(intact(JOBS, row).payload)
        except Damaged as error:  # it is not run either
            log.error("What job %s needs is not known: %s", row.id, error)
            yield row, (row.policy, 0)
        else:
            request = TrainRequest.model_validate_json(to_json(payload["request"]))
            yield row, request.reference


def versions_of_jobs(connection: sa.Connection, policy: str) -> dict[int, str]:
    """The versions of a policy that jobs which have not ended need, each with one of the jobs.

    That is what a job measures from, and of one that was begun what it starts from.
    """
    found: dict[int, str] = {}
    for row, (of, version) in _open_jobs(connection):
        if of == policy and version:
            found.setdefault(version, row.id)
        if row.policy == policy and row.base_version is not None:
            found.setdefault(row.base_version, row.id)
    return found


def _pinned_and_serving(connection: sa.Connection, policy: str) -> tuple[set[int], int | None]:
    mine = (CHECKPOINTS.c.policy == policy) & CHECKPOINTS.c.pinned
    pinned = set(connection.scalars(sa.select(CHECKPOINTS.c.version).where(mine)))
    served = sa.select(POLICIES.c.version).where(POLICIES.c.name == policy)
    return pinned, connection.scalar(served)


def _kept(connection: sa.Connection, policy: str) -> list[int]:
    """The versions of a policy that are kept, oldest first."""
    query = sa.select(CHECKPOINTS.c.version).where(CHECKPOINTS.c.policy == policy)
    return list(connection.scalars(query.order_by(CHECKPOINTS.c.version)))


def require_reference(connection: sa.Connection, request: TrainRequest) -> None:
    """Raise InvalidRequest if the version that a job measures from is not kept."""
    policy, version = request.reference
    kept = _kept(connection, policy)
    if version and version not in kept:
        raise InvalidRequest(
            f"got the reference {policy}@{version} of kl or distillation, expected a version of "
            f"{policy!r} that is kept: {kept}",
            param="config",
        )


class Versions(Database):
    """Versions and policies that are kept, or deleted."""

    leases: PolicyLeases

    async def refuse_open_jobs(self, policy: str) -> None:
        """Raise Conflict if a job that has not ended is of the policy, or measures from it."""
        await self.read(lambda c: _refuse_open_jobs(c, policy))

    @reads
    def unneeded_versions(self, connection: sa.Connection, policy: str) -> list[int]:
        """The versions of a policy that only retention keeps, oldest first.

        All but the first, the one that serves, pinned ones and those that jobs need.
        """
        pinned, serving = _pinned_and_serving(connection, policy)
        needed = {0, serving, *pinned, *versions_of_jobs(connection, policy)}
        return [version for version in _kept(connection, policy) if version not in needed]

    @writes
    def set_pinned(
        self, connection: sa.Connection, policy: str, version: int, pinned: bool
    ) -> None:
        """Protect a version from retention, or stop protecting it.

        Raises Conflict: `MAX_PINNED` other versions of the policy are pinned.
        """
        others = _pinned_and_serving(connection, policy)[0] - {version}
        if pinned and len(others) >= MAX_PINNED:
            raise Conflict(
                f"{policy}@{version} is not pinned, so it is deleted after newer versions: "
                f"{policy!r} has {len(others)} pinned versions, of at most {MAX_PINNED}. Unpin "
                f"what is unneeded: `langchain-art checkpoints unpin {policy}@{min(others)}`"
            )
        update(connection, CHECKPOINTS, version_is(policy, version), {"pinned": pinned})

    @writes
    def forget_checkpoint(self, connection: sa.Connection, policy: str, version: int) -> None:
        """Delete a version's row. Raises Conflict: it serves, is pinned, or a job needs it."""
        pinned, serving = _pinned_and_serving(connection, policy)
        why = "serves" if version == serving else "is pinned" if version in pinned else None
        if (job := versions_of_jobs(connection, policy).get(version)) is not None:
            why = f"is needed by job {job}, which has not ended; wait for its end, or cancel it"
        if why is not None:
            raise Conflict(f"{policy}@{version} is not deleted: it {why}.")
        connection.execute(sa.delete(CHECKPOINTS).where(version_is(policy, version)))

    @writes
    def delete_policy(self, connection: sa.Connection, policy: str) -> None:
        """Delete a policy and its versions. What it was trained on stays marked, by its name.

        Raises LeaseLost; Conflict: a job that has not ended needs it.
        """
        self.leases.require(connection, policy)
        _refuse_open_jobs(connection, policy)
        connection.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.policy == policy))
        connection.execute(sa.delete(ROLLBACKS).where(ROLLBACKS.c.policy == policy))
        connection.execute(sa.delete(POLICIES).where(POLICIES.c.name == policy))


def delete_run(connection: sa.Connection, trajectory_id: str) -> None:
    """Delete a run with its reviews, and its calls but for those of other runs.

    Raises:
        NotFound: there is neither such a run, nor a call tagged with its id.
        Conflict: a job that has not ended uses it.
    """
    known = sa.select(TRAJECTORIES.c.id).where(TRAJECTORIES.c.id == trajectory_id)
    tagged = sa.select(CALLS.c.id).where(CALLS.c.trajectory_id == trajectory_id)
    calls = set(connection.scalars(tagged))
    if not calls and connection.execute(known).first() is None:
        raise NotFound(f"No trajectory {trajectory_id!r} is stored here.")
    if (job := open_job_of_run(connection, trajectory_id)) is not None:
        raise Conflict(
            f"Job {job}, which has not ended, uses trajectory {trajectory_id!r}. Wait for its end, "
            "or cancel it."
        )
    links = sa.select(RUN_CALLS.c.call_id)
    calls |= set(connection.scalars(links.where(RUN_CALLS.c.trajectory_id == trajectory_id)))
    of_others = links.where(RUN_CALLS.c.trajectory_id != trajectory_id)
    kept = {row.call_id for row in select_among(connection, of_others, RUN_CALLS.c.call_id, calls)}
    tagged = sa.select(CALLS.c.id).where(CALLS.c.trajectory_id != trajectory_id)
    kept |= {row.id for row in select_among(connection, tagged, CALLS.c.id, calls)}
    mine = CALLS.c.trajectory_id == trajectory_id
    for call in kept:  # it is the others' from now on
        update(connection, CALLS, mine & (CALLS.c.id == call), {"trajectory_id": None})
    mine = select_among(connection, sa.select(CALL_IMAGES), CALL_IMAGES.c.call_id, calls - kept)
    images = {row.sha256 for row in mine}
    for column in (CALLS.c.id, TRAINED_CALLS.c.call_id, CALL_IMAGES.c.call_id):
        delete_among(connection, column, calls - kept)
    links = sa.select(CALL_IMAGES.c.sha256)
    shown = select_among(connection, links, CALL_IMAGES.c.sha256, images)
    delete_among(connection, IMAGES.c.sha256, images - {row.sha256 for row in shown})
    forget_runs(connection, [trajectory_id])
    tables = (RUN_CALLS, TRAINED, TRAINED_VERDICTS, REVIEWS)
    for column in (*(table.c.trajectory_id for table in tables), TRAJECTORIES.c.id):
        delete_among(connection, column, [trajectory_id])


def delete_among(connection: sa.Connection, column: sa.Column[str], ids: Iterable[str]) -> None:
    """Delete the rows whose `column` is among `ids`."""
    listed = list(ids)
    for start in range(0, len(listed), MAX_PARAMETERS):
        some = column.in_(listed[start : start + MAX_PARAMETERS])
        connection.execute(sa.delete(column.table).where(some))
