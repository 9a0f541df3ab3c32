"""The runs of evaluations on held-out scenarios, by the versions that were evaluated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
    """That have a reward."""
    scenarios: int
    at: float
    """When the last of its runs was stored."""


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
        self._known: tuple[Sequence[Any], list[Evaluation]] = ((), [])

    async def all(self) -> list[Evaluation]:
        """Those that were stored first come first. Read again only if one has changed."""

        def read(connection: sa.Connection) -> tuple[Sequence[Any], list[Evaluation]]:
            value = RUN_MARKS.c.value
            scored = (RUN_MARKS.c.kind == HELD_OUT) & value.is_not(None)
            sums = (sa.func.count(), sa.func.max(RUN_MARKS.c.number), sa.func.sum(value))
            stamp = tuple(connection.execute(sa.select(*sums).where(scored)).one())
            known = self._known
            return known if known[0] == stamp else (stamp, _evaluations(connection))

        self._known = await self._database.read(read)
        return self._known[1]

    async def runs(self, versions: str) -> list[EvaluatedRun]:
        """The runs of these versions' evaluations, oldest first."""
        query = _query().where(RUN_MARKS.c.name == versions)

        def read(connection: sa.Connection) -> list[EvaluatedRun]:
            return [
                EvaluatedRun(row.id, _scenario(row), row.reward, row.status == "failed")
                for row in connection.execute(query)
            ]

        return await self._database.read(read)


def _evaluations(connection: sa.Connection) -> list[Evaluation]:
    rewards: dict[str, defaultdict[str, list[float]]] = {}
    at: dict[str, float] = {}
    for row in connection.execute(_query()):
        mine = rewards.setdefault(row.name, defaultdict[str, list[float]](list))
        mine[_scenario(row)] += [] if row.reward is None else [row.reward]
        at[row.name] = row.created_at
    found = {name: mean_of_scenarios(some.values()) for name, some in rewards.items()}
    return [
        Evaluation(name, one.mean, one.ci95, one.rewards, one.scenarios, at[name])
        for name, one in found.items()
    ]


def _query() -> sa.Select[*tuple[Any, ...]]:
    facts = RUN_FACTS.c
    columns = (facts.id, facts.scenario, facts.reward, facts.status, facts.created_at)
    marks = sa.select(RUN_MARKS.c.name, *columns).where(RUN_MARKS.c.kind == HELD_OUT)
    return marks.join(RUN_FACTS, facts.number == RUN_MARKS.c.number).order_by(RUN_MARKS.c.number)


def _scenario(row: sa.Row[Any]) -> str:
    return row.scenario if row.scenario is not None else f"run {row.id}"
