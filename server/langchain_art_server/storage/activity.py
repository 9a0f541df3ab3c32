"""Changes while a server works, in one small read: for those who watch it."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from langchain_art_server.storage.tables import CALLS, EVENTS, JOBS, REVIEWS, TRAJECTORIES


@dataclass(frozen=True)
class Activity:
    """Numbers of the newest rows, and the job that runs. Two equal ones: nothing happened."""

    runs: int
    calls: int
    reviews: int
    jobs: tuple[tuple[str, int], ...]
    """State and number of jobs, sorted."""
    job: str | None
    """The job that runs."""
    event: int
    """The number of its last event; 0 before the first."""
    message: str
    progress: float | None
    """0 to 1, where it is known."""


class RowCount:
    """Number of rows a table has: counted once, and from then on only those that came later.

    Rows become visible in the order of their numbers. `recount` is to be called when some were
    deleted. Where other servers write, too (`shared`), neither holds: it counts each time.
    """

    def __init__(self, table: sa.Table, shared: bool = False) -> None:
        self._table, self._shared = table, shared
        self._known: tuple[int, int] | None = None  # rows, and the number of the last one
        self._deletions = 0

    def recount(self) -> None:
        """Count anew the next time."""
        self._deletions += 1
        self._known = None

    def read(self, connection: sa.Connection) -> int:
        """The number of rows now."""
        known, deletions, number = self._known, self._deletions, self._table.c.number
        if known is None:
            # With a condition it would read the rows instead of an index.
            count = sa.select(sa.func.count()).select_from(self._table).scalar_subquery()
            last = sa.select(sa.func.max(number)).scalar_subquery()
            rows, newest = connection.execute(sa.select(count, last)).one()
        else:
            came = sa.select(sa.func.count(), sa.func.max(number)).where(number > known[1])
            more, newest = connection.execute(came).one()
            rows, newest = known[0] + more, newest or known[1]
        if deletions == self._deletions and not self._shared:
            self._known = rows, newest or 0
        return rows


def read_activity(connection: sa.Connection) -> Activity:
    """Read what there is now. Rows are not checked: only numbers and a message are read."""

    def newest(column: sa.Column[int]) -> int:
        return connection.scalar(sa.select(sa.func.max(column))) or 0

    states = sa.select(JOBS.c.state, sa.func.count()).group_by(JOBS.c.state)
    running = sa.select(JOBS.c.id).where(JOBS.c.state == "running").order_by(JOBS.c.number)
    job = connection.scalar(running.limit(1))
    events = sa.select(EVENTS.c.seq, EVENTS.c.message).where(EVENTS.c.job_id == job)
    last = connection.execute(events.order_by(EVENTS.c.seq.desc()).limit(1)).first()
    known = sa.select(EVENTS.c.progress).where(
        EVENTS.c.job_id == job, EVENTS.c.progress.is_not(None)
    )
    return Activity(
        runs=newest(TRAJECTORIES.c.number),
        calls=newest(CALLS.c.number),
        reviews=newest(REVIEWS.c.number),
        jobs=tuple(sorted((row[0], row[1]) for row in connection.execute(states))),
        job=job,
        event=last.seq if last else 0,
        message=last.message if last else "",
        progress=connection.scalar(known.order_by(EVENTS.c.seq.desc()).limit(1)),
    )
