"""The runs of evaluations on held-out scenarios, by the versions that were evaluated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from langchain_art.statistics.intervals import mean_of_scenarios
from langchain_art_server.storage.database import Database
from langchain_art_server.storage.run_index import HELD_OUT, RUN_FACTS, RUN_MARKS


@dataclass(frozen=True)
class Evaluation:
    """All evaluations of the same versions together."""

    versions: str
    """``email-agent@17``, or ``writer@3 + critic@2`` where several work in one graph."""
    mean: float | None
    ci95: float | None
    """Half width, over scenarios (`mean_of_scenarios`)."""
    runs: int
    """Runs that have a reward."""
    scenarios: int


@dataclass(frozen=True)
class EvaluatedRun:
    """One run of an evaluation."""

    id: str
    scenario: str
    """``run ID`` of a run without one."""
    reward: float | None
    """`Trajectory.total_return`."""
    failed: bool


class Evaluations:
    """Reads them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[tuple[Any, ...], Evaluation]] = {}

    async def all(self) -> list[Evaluation]:
        """All evaluations, oldest first. One is read again only if it has changed."""
        marks = RUN_MARKS.c
        sums = (sa.func.min(marks.number), sa.func.max(marks.number), sa.func.sum(marks.value))
        query = sa.select(marks.name, sa.func.count(), *sums).group_by(marks.name)
        query = query.where(marks.kind == HELD_OUT, marks.value.is_not(None)).order_by(sums[0])
        known = self._known

        def read(connection: sa.Connection) -> dict[str, tuple[tuple[Any, ...], Evaluation]]:
            found: dict[str, tuple[tuple[Any, ...], Evaluation]] = {}
            for row in connection.execute(query):
                name, stamp = str(row.name), tuple[Any, ...](row)
                last = known.get(name)
                if last is None or last[0] != stamp:
                    last = stamp, _evaluation(connection, name)
                found[name] = last
            return found

        self._known = await self._database.read(read)
        return [one for _, one in self._known.values()]

    async def runs(self, versions: str) -> list[EvaluatedRun]:
        """The runs of these versions' evaluations, oldest first."""
        return await self._database.read(lambda c: _runs(c, versions))


def _evaluation(connection: sa.Connection, versions: str) -> Evaluation:
    rewards = defaultdict[str, list[float]](list)
    for run in _runs(connection, versions):
        rewards[run.scenario] += [] if run.reward is None else [run.reward]
    found = mean_of_scenarios(rewards.values())
    return Evaluation(versions, found.mean, found.ci95, found.rewards, found.scenarios)


def _runs(connection: sa.Connection, versions: str) -> list[EvaluatedRun]:
    facts, marks = RUN_FACTS.c, RUN_MARKS.c
    query = sa.select(facts.id, facts.scenario, facts.reward, facts.status)
    query = query.join(RUN_MARKS, facts.number == marks.number).order_by(marks.number)
    rows = connection.execute(query.where(marks.kind == HELD_OUT, marks.name == versions))
    return [
        EvaluatedRun(
            id=row.id,
            scenario=row.scenario if row.scenario is not None else f"run {row.id}",
            reward=row.reward,
            failed=row.status == "failed",
        )
        for row in rows
    ]
