"""Lists of runs: filtered, sorted, by cursor; of one group, of evaluations. Reads no run's body."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json, to_json

from langchain_art.errors import InvalidRequest, NotFound
from langchain_art.statistics.intervals import mean_of_scenarios
from langchain_art.wire import Status
from langchain_art.wire.identifiers import Id, Name, ScenarioName
from langchain_art_server.storage.database import Database, Tables, reads
from langchain_art_server.storage.queries import count_of, select_among, with_jobs
from langchain_art_server.storage.run_index import (
    HELD_OUT,
    RUN_FACTS,
    RUN_MARKS,
    having_words,
    of_graphs,
)
from langchain_art_server.storage.seals import intact
from langchain_art_server.storage.tables import JOBS, REVIEWS, TRAINED

#: The most runs of one page, and of a group that is shown side by side.
MAX_RUNS, MAX_SIBLINGS = 200, 64
#: Runs of which on a name is common: a page of those that have it is read in the order that is
#: asked for. The runs of a rare name are found by it, and sorted then.
_COMMON = 5000
Sort = Literal["number", "reward", "score", "calls", "tokens", "seconds"]
_Text = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]
#: Of a query, where all is text: `wire.Finite` takes no text for a number.
_Bound = Annotated[float, Field(allow_inf_nan=False)]
_Step = Annotated[int, Field(ge=0, le=2**31 - 1)]
_CURSOR = TypeAdapter(tuple[float | None, Annotated[int, Field(ge=0, le=2**63 - 1)]])


class RunsQuery(BaseModel):
    """A page of the runs that all given fields choose: in which order, how many, behind which."""

    model_config = ConfigDict(extra="forbid")

    policy: Name | None = None
    """Policy of one of the run's calls."""
    version: _Text | None = None
    """Version of one of the run's calls: ``my-agent@17``."""
    step: _Step | None = None
    """Version, of `policy` if that is given: the step that made it learned from the run."""
    scenario: ScenarioName | None = None
    group: Id | None = None
    node: _Text | None = None
    status: Status | None = None
    reward_min: _Bound | None = None
    """Bound of the total return, as `reward_max`."""
    reward_max: _Bound | None = None
    score: _Text | None = None
    """Name of a score that a run must have, within the bounds."""
    score_min: _Bound | None = None
    score_max: _Bound | None = None
    text: _Text | None = None
    """Words that must all be in messages, replies, input, output, error or scenario; ``refun*``
    stands for every word that begins so."""
    reviewed: bool | None = None

    sort: Sort = "number"
    """``number``: in the order in which they came; ``score``: by that of `score`."""
    descending: bool = True
    """The highest (newest) first."""
    limit: int = Field(default=50, ge=1, le=MAX_RUNS)
    after: str | None = Field(default=None, max_length=200)
    """`RunsPage.next` of the page before."""

    @model_validator(mode="after")
    def _names_the_score(self) -> RunsQuery:
        if self.score is None and (self.score_min, self.score_max) != (None, None):
            raise ValueError("got bounds of a score and no `score`, expected its name")
        return self


class RunSummary(BaseModel):
    """One run of a list."""

    id: str
    group: str | None
    scenario: str | None
    status: Status
    reward: float | None
    """`Trajectory.total_return`."""
    scores: dict[str, float]
    calls: int
    tokens: int
    """Sampled tokens, as far as clients reported."""
    seconds: float | None
    """Seconds from the first call's start to the last one's end, by the client's clock."""
    created_at: float
    """Time when the server stored it: seconds since the epoch."""
    versions: list[str]
    """The models of its calls."""
    nodes: list[str]
    asked: str
    """The beginning of the first user message, or of the input."""
    said: str
    """The beginning of the last reply, or of the output."""
    error: str | None
    trained_by: dict[str, str]
    """policy -> job."""
    reviews: int

    @property
    def total_return(self) -> float | None:
        """See `Trajectory.total_return`."""
        return self.reward


class RunsPage(BaseModel):
    """Some runs of a list; the next page begins behind the cursor `next`."""

    runs: list[RunSummary]
    next: str | None
    """None: there are no more."""


class RunNames(BaseModel):
    """Values to filter by; first what the newest run has."""

    policies: list[str]
    versions: list[str]
    nodes: list[str]
    scores: list[str]
    runs: int
    """Number of stored runs."""


class RunList(Tables):
    """Finds runs, and reads evaluations; see `Store.runs`."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._evaluated: dict[str, tuple[tuple[Any, ...], Evaluation]] = {}

    @reads
    def page(self, connection: sa.Connection, asked: RunsQuery) -> RunsPage:
        """Some runs. Those that have no value to sort by come last, the newest first.

        Raises:
            InvalidRequest: the cursor is none, or ``score`` without a score's name.
        """
        sort, descending, limit = asked.sort, asked.descending, asked.limit
        if sort == "score" and asked.score is None:
            raise InvalidRequest("got sort=score, expected the name of a score too", param="score")
        place = _place(asked.after)
        query, by = _chosen(connection, asked)
        number = RUN_FACTS.c.number
        found: list[sa.Row[Any]] = []
        if sort == "number" or place is None or place[0] is not None:
            keys = [number] if sort == "number" else [by, number]
            first = query if sort == "number" else query.where(by.is_not(None))
            if place is not None:
                first = first.where(_behind(keys, place, descending))
            ordered = [key.desc() if descending else key.asc() for key in keys]
            found += connection.execute(first.order_by(*ordered).limit(limit + 1)).all()
        if sort != "number" and len(found) <= limit:
            rest = query.where(by.is_(None)).order_by(number.desc())
            if place is not None and place[0] is None:
                rest = rest.where(number < place[1])
            found += connection.execute(rest.limit(limit + 1 - len(found))).all()
        runs = _summaries(connection, found[:limit])
        if len(found) <= limit:
            return RunsPage(runs=runs, next=None)
        last = found[limit - 1]
        cursor = to_json([None if sort == "number" else last.sorted_by, last.number]).decode()
        return RunsPage(runs=runs, next=cursor)

    @reads
    def siblings(self, connection: sa.Connection, run_id: str) -> list[RunSummary]:
        """The runs of a run's group, or of its scenario, if it came without a group.

        The newest `MAX_SIBLINGS`, oldest first; the run itself is among them.

        Raises NotFound: there is no such run.
        """
        mine = sa.select(RUN_FACTS).where(RUN_FACTS.c.id == run_id)
        row = connection.execute(mine).first()
        if row is None:
            raise NotFound(f"No trajectory {run_id!r} is stored here.")
        facts, beside = RUN_FACTS.c, sa.false()
        if row.group_id is not None:
            beside = facts.group_id == row.group_id
        elif row.scenario is not None:
            beside = (facts.scenario == row.scenario) & facts.group_id.is_(None)
        query = sa.select(RUN_FACTS).where(beside, facts.number != row.number)
        newest = query.order_by(RUN_FACTS.c.number.desc()).limit(MAX_SIBLINGS - 1)
        rows = [row, *connection.execute(newest)]
        return _summaries(connection, sorted(rows, key=lambda one: one.number))

    @reads
    def names(self, connection: sa.Connection) -> RunNames:
        """Values to filter by."""
        kinds = {"policies": "policy", "versions": "version", "nodes": "node", "scores": "score"}
        found = {name: _names(connection, kind) for name, kind in kinds.items()}
        return RunNames(runs=count_of(connection, RUN_FACTS), **found)

    @reads
    def evaluations(self, connection: sa.Connection) -> list[Evaluation]:
        """All evaluations, oldest first. One is read again only if it has changed."""
        marks = RUN_MARKS.c
        sums = (sa.func.min(marks.number), sa.func.max(marks.number), sa.func.sum(marks.value))
        sums += (sa.func.sum(marks.value * marks.number),)  # differs if two runs change places
        query = sa.select(marks.name, sa.func.count(), *sums).group_by(marks.name)
        query = query.where(marks.kind == HELD_OUT, marks.value.is_not(None)).order_by(sums[0])
        found: dict[str, tuple[tuple[Any, ...], Evaluation]] = {}
        for row in connection.execute(query):
            name, stamp = str(row.name), tuple[Any, ...](row)
            last = self._evaluated.get(name)
            if last is None or last[0] != stamp:
                mean = mean_of_scenarios(rewards_by_scenario(_runs(connection, name)).values())
                last = stamp, Evaluation(name, mean.mean, mean.ci95, mean.rewards, mean.scenarios)
            found[name] = last
        self._evaluated = found
        return [one for _, one in found.values()]

    async def evaluated(self, versions: str) -> list[EvaluatedRun]:
        """The runs of these versions' evaluations, oldest first."""
        return await self.read(lambda c: _runs(c, versions))


def _names(connection: sa.Connection, kind: str) -> list[str]:
    """The names of a kind, by steps from one to the next in the index: no mark is counted."""
    marks = RUN_MARKS.c
    of_kind = sa.select(sa.func.min(marks.name).label("name")).where(marks.kind == kind)
    names = of_kind.cte("names", recursive=True)
    following = of_kind.where(marks.name > names.c.name).scalar_subquery()
    names = names.union_all(sa.select(following).where(names.c.name.is_not(None)))
    mine = (marks.kind == kind) & (marks.name == names.c.name)
    last = sa.select(sa.func.max(marks.number)).where(mine).scalar_subquery()
    query = sa.select(names.c.name).where(names.c.name.is_not(None))
    return list(connection.scalars(query.order_by(last.desc(), names.c.name)))


def _chosen(
    connection: sa.Connection, asked: RunsQuery
) -> tuple[sa.Select[*tuple[Any, ...]], sa.ColumnElement[Any]]:
    """The query of the runs that a filter chooses, and what they are sorted by."""
    facts = RUN_FACTS.c
    query = sa.select(RUN_FACTS)
    by: sa.ColumnElement[Any] = facts.number
    if asked.sort == "score":
        mark = RUN_MARKS.alias()
        mine = (mark.c.kind == "score") & (mark.c.name == asked.score)
        query = query.add_columns(mark.c.value.label("sorted_by"))
        query = query.join(mark, mine & (mark.c.number == facts.number))
        by = mark.c.value
    elif asked.sort != "number":
        by = facts[asked.sort]
        query = query.add_columns(by.label("sorted_by"))
    equal = {"scenario": asked.scenario, "group_id": asked.group, "status": asked.status}
    for name, value in equal.items():
        if value is not None:
            query = query.where(facts[name] == value)
    query = query.where(*_within(facts.reward, asked.reward_min, asked.reward_max))
    for kind in ("policy", "version", "node", "score"):
        if (name := getattr(asked, kind)) is not None:
            marks = RUN_MARKS.c
            mine = sa.select(marks.number).where(marks.kind == kind, marks.name == name)
            if kind == "score":
                mine = mine.where(*_within(marks.value, asked.score_min, asked.score_max))
            if count_of(connection, mine.limit(_COMMON).subquery()) == _COMMON:
                query = query.where(mine.where(marks.number == facts.number).exists())
            else:
                query = query.where(facts.number.in_(mine))
    if asked.step is None:
        query = query.where(of_graphs(facts.id))
    else:
        mine = sa.true() if asked.policy is None else JOBS.c.policy == asked.policy
        jobs = sa.select(JOBS.c.id).where(mine, JOBS.c.target_version == asked.step)
        learned = sa.select(TRAINED.c.trajectory_id).where(TRAINED.c.job_id.in_(jobs))
        query = query.where(facts.id.in_(learned))
    if asked.text is not None:
        numbers = having_words(asked.text, connection.dialect.name)
        query = query.where(facts.number.in_(numbers) if numbers is not None else sa.false())
    if asked.reviewed is not None:
        reviewed = facts.id.in_(sa.select(REVIEWS.c.trajectory_id))
        query = query.where(reviewed if asked.reviewed else ~reviewed)
    return query, by


def _within(
    value: sa.ColumnElement[Any], least: float | None, most: float | None
) -> list[sa.ColumnElement[bool]]:
    bounds = [value >= least] if least is not None else []
    return [*bounds, value <= most] if most is not None else bounds


def _behind(
    keys: Sequence[sa.ColumnElement[Any]], place: tuple[float | None, int], descending: bool
) -> sa.ColumnElement[bool]:
    """True if a row comes behind the place of a cursor."""
    if len(keys) == 1:
        return keys[0] < place[1] if descending else keys[0] > place[1]
    mine, its = sa.tuple_(*keys), sa.tuple_(*map(sa.literal, place))
    return mine < its if descending else mine > its


def _place(cursor: str | None) -> tuple[float | None, int] | None:
    try:
        return None if cursor is None else _CURSOR.validate_json(cursor)
    except ValidationError as error:
        raise InvalidRequest(
            f"got after={cursor!r:.80}, expected the `next` of a page of this list", param="after"
        ) from error


def _summaries(connection: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[RunSummary]:
    ids = [row.id for row in rows]
    trained: dict[str, dict[str, str]] = {}
    marks = with_jobs(TRAINED).order_by(JOBS.c.number)
    for mark in select_among(connection, marks, TRAINED.c.trajectory_id, ids):
        trained.setdefault(mark.trajectory_id, {})[mark.policy] = mark.job_id
    said = sa.select(REVIEWS.c.trajectory_id)
    column = REVIEWS.c.trajectory_id
    reviews = Counter(row.trajectory_id for row in select_among(connection, said, column, ids))
    return [
        RunSummary(
            **{name: getattr(row, name) for name in _SHOWN},
            **from_json(row.body),
            group=row.group_id,
            trained_by=trained.get(row.id, {}),
            reviews=reviews[row.id],
        )
        for row in (intact(RUN_FACTS, row) for row in rows)
    ]


_SHOWN = ("id", "scenario", "status", "reward", "calls", "tokens", "seconds", "created_at")


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


def rewards_by_scenario(runs: Iterable[EvaluatedRun]) -> dict[str, list[float]]:
    """The rewards of each scenario that was run; of one whose runs have none, no number."""
    found = defaultdict[str, list[float]](list)
    for run in runs:
        found[run.scenario] += [] if run.reward is None else [run.reward]
    return found


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
