"""Deletes runs and policies, unless something that has not ended needs them."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from langchain_art.errors import Conflict, NotFound
from langchain_art_server.storage.queries import MAX_PARAMETERS, select_among
from langchain_art_server.storage.run_index import forget_runs
from langchain_art_server.storage.schema.rollback_table import ROLLBACKS
from langchain_art_server.storage.seals import intact, update
from langchain_art_server.storage.tables import (
    CALLS,
    CHECKPOINTS,
    JOBS,
    POLICIES,
    REVIEWS,
    RUN_CALLS,
    TRAINED,
    TRAINED_CALLS,
    TRAJECTORIES,
    unpack,
)

_OPEN = JOBS.c.state.in_(("queued", "running"))


def open_job_of_run(connection: sa.Connection, trajectory_id: str) -> str | None:
    """The job that is to train on a run, and has not ended; None if there is none."""
    for row in connection.execute(sa.select(JOBS).where(_OPEN)):
        request = unpack(intact(JOBS, row).payload)["request"]
        if any(trajectory_id in group for group in request["groups"]):
            return row.id
    return None


def jobs_of_run(connection: sa.Connection, trajectory_id: str) -> str:
    """The jobs that trained on a trajectory, for a message; empty if none did."""
    query = sa.select(TRAINED).where(TRAINED.c.trajectory_id == trajectory_id)
    rows = connection.execute(query.order_by(TRAINED.c.policy))
    return " and ".join(f"job {row.job_id} of policy {row.policy!r}" for row in rows)


def refuse_open_jobs(connection: sa.Connection, policy: str) -> None:
    """Raise Conflict if a job of the policy has not ended."""
    query = sa.select(JOBS.c.id).where(_OPEN, JOBS.c.policy == policy).limit(1)
    if (job := connection.scalar(query)) is not None:
        raise Conflict(
            f"Job {job} of policy {policy!r} has not ended. Wait for its end, or cancel it."
        )


def delete_policy(connection: sa.Connection, policy: str) -> None:
    """Delete a policy and its versions. What it was trained on stays marked, by its name.

    Raises:
        Conflict: a job of it has not ended.
    """
    refuse_open_jobs(connection, policy)
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
    for column in (CALLS.c.id, TRAINED_CALLS.c.call_id):
        delete_among(connection, column, calls - kept)
    forget_runs(connection, [trajectory_id])
    of_run = (RUN_CALLS.c.trajectory_id, TRAINED.c.trajectory_id, REVIEWS.c.trajectory_id)
    for column in (*of_run, TRAJECTORIES.c.id):
        delete_among(connection, column, [trajectory_id])


def delete_among(connection: sa.Connection, column: sa.Column[str], ids: Iterable[str]) -> None:
    """Delete the rows whose `column` is among `ids`."""
    listed = list(ids)
    for start in range(0, len(listed), MAX_PARAMETERS):
        some = column.in_(listed[start : start + MAX_PARAMETERS])
        connection.execute(sa.delete(column.table).where(some))
