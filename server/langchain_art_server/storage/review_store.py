"""Reviews of runs and calls, as the database keeps them: one row a review."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from langchain_art.wire import RefusedReview, Review, ReviewsKept, Trajectory
from langchain_art_server.storage.database import Tables, reads, writes
from langchain_art_server.storage.queries import Page, select_among, take_page
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import (
    CALLS,
    HELD_OUT_SCENARIOS,
    JOBS,
    REVIEWS,
    RUN_CALLS,
    TRAINED_VERDICTS,
    TRAJECTORIES,
)

_Fate = Literal["new", "revised", "unchanged", "outdated"]


@dataclass(frozen=True)
class VerdictMark:
    """One verdict that one job trains, or has trained (`TRAINED_VERDICTS`)."""

    trajectory: str
    call_id: str
    """Empty: the whole run."""
    kind: str
    name: str
    said: str
    taught_by: str
    """A run, or a call, that the job's manifest names if it has trained the verdict."""
    reviews: Sequence[tuple[str, str]]
    """Source and id of each."""
    job: str = ""
    state: str = ""
    """State of the job."""
    version: int | None = None
    """Version that the job makes, or made."""
    order: str = ""
    """Key of the order; its jobs may train the same verdict, each once."""

    @property
    def subject(self) -> tuple[str, str, str, str]:
        """Run or call, and name, that it is a verdict on."""
        return self.trajectory, self.call_id, self.kind, self.name

    def row(self, job_id: str, policy: str) -> dict[str, Any]:
        """Row of the table for a job that is to train it."""
        values = {
            name: getattr(self, name) for name in ("call_id", "kind", "name", "said", "taught_by")
        }
        reviews = to_json(self.reviews).decode()
        job = {"job_id": job_id, "policy": policy}
        return values | job | {"trajectory_id": self.trajectory, "reviews": reviews}


def read_marks(connection: sa.Connection, policy: str) -> list[VerdictMark]:
    """The verdicts that jobs of a policy train or have trained, in the order of the jobs.

    Those of jobs that failed or were cancelled are left out.
    """
    query = _marks().where(TRAINED_VERDICTS.c.policy == policy)
    return [_mark_of(row) for row in connection.execute(query)]


def settle_marks(connection: sa.Connection, job_id: str, taught: Iterable[str]) -> None:
    """Delete the marks of a job that has ended, but for those of what it has trained."""
    known, table = set(taught), TRAINED_VERDICTS.c
    mine = table.job_id == job_id
    for row in connection.execute(sa.select(TRAINED_VERDICTS).where(mine)).all():
        if intact(TRAINED_VERDICTS, row).taught_by not in known:
            of = (table.trajectory_id == row.trajectory_id) & (table.call_id == row.call_id)
            gone = sa.delete(TRAINED_VERDICTS).where(mine & of & (table.kind == row.kind))
            connection.execute(gone)


def _marks() -> sa.Select[*tuple[Any, ...]]:
    about = JOBS.c.state, JOBS.c.target_version.label("made"), JOBS.c.key
    query = sa.select(TRAINED_VERDICTS, *about)
    query = query.join(JOBS, JOBS.c.id == TRAINED_VERDICTS.c.job_id).order_by(JOBS.c.number)
    return query.where(JOBS.c.state.in_(("queued", "running", "succeeded")))


def _mark_of(row: sa.Row[Any]) -> VerdictMark:
    intact(TRAINED_VERDICTS, row)
    reviews = [(source, name) for source, name in from_json(row.reviews)]
    about = row.trajectory_id, row.call_id, row.kind, row.name, row.said, row.taught_by
    order = row.key.partition("#")[0]
    return VerdictMark(*about, reviews, row.job_id, row.state, row.made, order)


class ReviewStore(Tables):
    """The reviews of one database."""

    @writes
    def put(self, connection: sa.Connection, reviews: Sequence[Review]) -> ReviewsKept:
        """Keep reviews: by source and id, the one with the later `at` (or the last of one time).

        Those of a trajectory or a call that is not known are refused, and the others are kept.
        """
        calls = _calls_of(connection, {one.trajectory for one in reviews})
        refused: list[RefusedReview] = []
        rows: list[dict[str, Any]] = []
        for one in reviews:
            if one.trajectory not in calls:
                reason = "unknown_trajectory"
            elif one.call_id is not None and one.call_id not in calls[one.trajectory]:
                reason = "unknown_call"
            else:
                row = {"source": one.source, "id": one.id, "trajectory_id": one.trajectory}
                # As earlier releases wrote it, so that what is sent again is unchanged.
                body = one.model_dump_json(exclude=None if one.deleted else {"deleted"}).encode()
                rows.append(row | {"at": one.at, "body": body})
                continue
            refused.append(RefusedReview(source=one.source, id=one.id, reason=reason))
        counts, changed = _put(connection, rows)
        trained = _versions_of(connection, changed)
        return ReviewsKept(**counts, refused=tuple(refused), trained=trained)

    @reads
    def page(
        self,
        connection: sa.Connection,
        limit: int,
        *,
        policy: str | None = None,
        trajectory: str | None = None,
        source: str | None = None,
        after: int = 0,
    ) -> Page[bytes]:
        """At most `limit` reviews as JSON, in the order in which they first came.

        Only those of runs that have a call of `policy`, of this `trajectory` and its calls, and of
        this `source`, where they are given; and `after` this number (`Page.last_id`).
        """
        query = sa.select(REVIEWS).where(REVIEWS.c.number > after).order_by(REVIEWS.c.number)
        if trajectory is not None:
            query = query.where(REVIEWS.c.trajectory_id == trajectory)
        if source is not None:
            query = query.where(REVIEWS.c.source == source)
        if policy is not None:
            query = query.where(_has_calls_of(policy))

        def item(row: sa.Row[Any]) -> tuple[bytes, int]:
            body: bytes = intact(REVIEWS, row).body
            return body, len(body)

        return take_page(connection, query, limit, "number", item)

    async def of_policy(self, policy: str) -> list[Review]:
        """All reviews of runs that have a call of a policy, in the order in which they came."""
        return await self._reviews(_has_calls_of(policy))

    async def beside(self, run: Trajectory) -> list[Review]:
        """All reviews of a run and of the other runs of its scenario."""
        siblings = sa.select(TRAJECTORIES.c.id).where(TRAJECTORIES.c.scenario == run.scenario)
        column = REVIEWS.c.trajectory_id
        return await self._reviews((column == run.id) | column.in_(siblings))

    @reads
    def of_runs(self, connection: sa.Connection, runs: Iterable[str]) -> list[Review]:
        """All reviews of some runs."""
        return _read(select_among(connection, sa.select(REVIEWS), REVIEWS.c.trajectory_id, runs))

    async def _reviews(self, which: sa.ColumnElement[bool]) -> list[Review]:
        query = sa.select(REVIEWS).where(which).order_by(REVIEWS.c.number)
        return await self.read(lambda c: _read(c.execute(query)))

    async def marks(self, policy: str) -> list[VerdictMark]:
        """See `read_marks`."""
        return await self.read(lambda c: read_marks(c, policy))

    @reads
    def held_out(self, connection: sa.Connection, scenarios: Iterable[str]) -> set[str]:
        """Runs of the scenarios that an evaluation ran."""
        column = HELD_OUT_SCENARIOS.c.scenario
        rows = select_among(connection, sa.select(HELD_OUT_SCENARIOS), column, scenarios)
        return {intact(HELD_OUT_SCENARIOS, row).scenario for row in rows}


def _read(rows: Iterable[sa.Row[Any]]) -> list[Review]:
    return [Review.model_validate_json(intact(REVIEWS, row).body) for row in rows]


def _calls_of(connection: sa.Connection, runs: Iterable[str]) -> dict[str, set[str]]:
    """The known ones among the runs, each with the ids of its calls."""
    wanted = set(runs)
    stored = sa.select(TRAJECTORIES.c.id)
    known = select_among(connection, stored, TRAJECTORIES.c.id, wanted)
    found = {row.id: set[str]() for row in known}
    links = sa.select(RUN_CALLS.c.trajectory_id, RUN_CALLS.c.call_id)
    tagged = sa.select(CALLS.c.trajectory_id, CALLS.c.id.label("call_id"))
    for query, column in ((links, RUN_CALLS.c.trajectory_id), (tagged, CALLS.c.trajectory_id)):
        for row in select_among(connection, query, column, wanted):
            found.setdefault(row.trajectory_id, set()).add(row.call_id)
    return found


def _has_calls_of(policy: str) -> sa.ColumnElement[bool]:
    """True if the run of a review has a call that a policy answered."""
    links = sa.select(RUN_CALLS.c.call_id).join(CALLS, CALLS.c.id == RUN_CALLS.c.call_id)
    linked = links.where(RUN_CALLS.c.trajectory_id == REVIEWS.c.trajectory_id)
    tagged = sa.select(CALLS.c.id).where(CALLS.c.trajectory_id == REVIEWS.c.trajectory_id)
    mine = CALLS.c.policy == policy
    return sa.or_(linked.where(mine).exists(), tagged.where(mine).exists())


def _put(
    connection: sa.Connection, rows: Sequence[dict[str, Any]]
) -> tuple[dict[_Fate, int], list[dict[str, Any]]]:
    """Write what is new or later than what is kept.

    Returns:
        What became of the rows, counted; and the revised ones that say something else.
    """
    kept: dict[tuple[str, str], sa.Row[Any]] = {}
    for source in {row["source"] for row in rows}:
        query = sa.select(REVIEWS).where(REVIEWS.c.source == source)
        ids = [row["id"] for row in rows if row["source"] == source]
        for found in select_among(connection, query, REVIEWS.c.id, ids):
            kept[source, found.id] = intact(REVIEWS, found)
    new, changed = list[dict[str, Any]](), list[dict[str, Any]]()
    counts: Counter[_Fate] = Counter()
    for row in rows:
        old = kept.get((row["source"], row["id"]))
        if old is None:
            new.append(row)
        elif old.body == row["body"]:
            counts["unchanged"] += 1
        elif old.at > row["at"]:
            counts["outdated"] += 1
        else:
            update(connection, REVIEWS, REVIEWS.c.number == old.number, row)
            counts["revised"] += 1
            if _said(old.body) != _said(row["body"]):
                changed.append(row)
    insert(connection, REVIEWS, new)
    return {**counts, "new": len(new)}, changed


def _said(body: bytes) -> dict[str, Any]:
    """The fields that a training step reads: another comment or kind is no other verdict."""
    said: dict[str, Any] = from_json(body)
    return {name: said[name] for name in said if name not in ("kind", "comment", "at")}


def _versions_of(
    connection: sa.Connection, rows: Sequence[dict[str, Any]]
) -> dict[str, tuple[str, ...]]:
    """Versions that were trained with each review, by its id."""
    wanted = {(row["source"], row["id"]) for row in rows}
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    runs = {row["trajectory_id"] for row in rows}
    for row in select_among(connection, _marks(), TRAINED_VERDICTS.c.trajectory_id, runs):
        mark = _mark_of(row)
        for source, name in mark.reviews:
            if (source, name) in wanted and mark.state == "succeeded":
                found[name][f"{row.policy}@{mark.version}"] = None
    return {name: tuple(versions) for name, versions in found.items()}
