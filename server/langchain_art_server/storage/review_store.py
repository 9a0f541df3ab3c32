"""What people said of runs and calls, as the database keeps it: one row a review."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from langchain_art.wire import RefusedReview, Review, ReviewsKept
from langchain_art_server.storage.database import Database
from langchain_art_server.storage.pages import MAX_PAGE, Page, take_page
from langchain_art_server.storage.queries import select_among
from langchain_art_server.storage.seals import insert, intact, update
from langchain_art_server.storage.tables import CALLS, REVIEWS, RUN_CALLS, TRAJECTORIES

_Fate = Literal["new", "revised", "unchanged", "outdated"]


class ReviewStore:
    """The reviews of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, reviews: Sequence[Review]) -> ReviewsKept:
        """Keep reviews: by source and id, the one with the later `at` (or the last of one time).

        Those of a trajectory or a call that is not known are refused, and the others are kept.
        """

        def write(connection: sa.Connection) -> ReviewsKept:
            calls = _calls_of(connection, {one.trajectory for one in reviews})
            refused: list[RefusedReview] = []
            rows: list[dict[str, Any]] = []
            for one in reviews:
                if one.trajectory not in calls:
                    reason = "unknown_trajectory"
                elif one.call_id is not None and one.call_id not in calls[one.trajectory]:
                    reason = "unknown_call"
                else:
                    rows.append(_row(one))
                    continue
                refused.append(RefusedReview(source=one.source, id=one.id, reason=reason))
            return ReviewsKept(**_put(connection, rows), refused=tuple(refused))

        return await self._database.write(write)

    async def page(
        self,
        limit: int,
        *,
        policy: str | None = None,
        trajectory: str | None = None,
        source: str | None = None,
        after: int = 0,
    ) -> Page[bytes]:
        """Some reviews as JSON, in the order in which they first came.

        Args:
            limit: the most that are wanted.
            policy: only those of runs that have a call of this policy.
            trajectory: only those of this run and its calls.
            source: only those of this source.
            after: the number (`Page.last_id`) of the last one that is not wanted.
        """
        query = sa.select(REVIEWS).where(REVIEWS.c.number > after)
        query = query.order_by(REVIEWS.c.number).limit(limit + 1)
        if trajectory is not None:
            query = query.where(REVIEWS.c.trajectory_id == trajectory)
        if source is not None:
            query = query.where(REVIEWS.c.source == source)
        if policy is not None:
            query = query.where(_has_calls_of(policy))

        def item(row: sa.Row[Any]) -> tuple[str, bytes, int]:
            body: bytes = intact(REVIEWS, row).body
            return str(row.number), body, len(body)

        def read(connection: sa.Connection) -> Page[bytes]:
            with connection.execute(query, execution_options={"yield_per": 100}) as rows:
                return take_page(rows, limit, item)

        return await self._database.read(read)

    async def of_scenario(self, scenario: str | None, trajectory_id: str) -> list[Review]:
        """The reviews of a run and of the other runs of its scenario: the newest 1000 of them."""
        runs = sa.select(TRAJECTORIES.c.id).where(TRAJECTORIES.c.scenario == scenario)
        mine = REVIEWS.c.trajectory_id == trajectory_id
        if scenario is not None:
            mine = mine | REVIEWS.c.trajectory_id.in_(runs)
        query = sa.select(REVIEWS).where(mine).order_by(REVIEWS.c.number.desc()).limit(MAX_PAGE)

        def read(connection: sa.Connection) -> list[Review]:
            rows = connection.execute(query)
            return [Review.model_validate_json(intact(REVIEWS, row).body) for row in rows]

        return await self._database.read(read)


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
    """Whether the run of a review has a call that a policy answered."""
    links = sa.select(RUN_CALLS.c.call_id).join(CALLS, CALLS.c.id == RUN_CALLS.c.call_id)
    linked = links.where(RUN_CALLS.c.trajectory_id == REVIEWS.c.trajectory_id)
    tagged = sa.select(CALLS.c.id).where(CALLS.c.trajectory_id == REVIEWS.c.trajectory_id)
    mine = CALLS.c.policy == policy
    return sa.or_(linked.where(mine).exists(), tagged.where(mine).exists())


def _put(connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> dict[_Fate, int]:
    """Write what is new or later than what is kept; what became of the rows, counted."""
    kept: dict[tuple[str, str], sa.Row[Any]] = {}
    for source in {row["source"] for row in rows}:
        query = sa.select(REVIEWS).where(REVIEWS.c.source == source)
        ids = [row["id"] for row in rows if row["source"] == source]
        for found in select_among(connection, query, REVIEWS.c.id, ids):
            kept[source, found.id] = intact(REVIEWS, found)
    new: list[dict[str, Any]] = []
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
    insert(connection, REVIEWS, new)
    counts["new"] = len(new)
    return dict(counts)


def _row(review: Review) -> dict[str, Any]:
    return {
        "source": review.source,
        "id": review.id,
        "trajectory_id": review.trajectory,
        "at": review.at,
        "body": review.model_dump_json().encode(),
    }
