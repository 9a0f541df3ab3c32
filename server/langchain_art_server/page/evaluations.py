"""Results of versions on held-out scenarios, and two of them compared, by rewards or blind.

A blind choice is which of two runs of a scenario a person prefers. It is kept as a review: a score
of the run that was shown on the left, whose name says what it was compared with. 1: it is better;
0: the other is; 0.5: neither.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from langchain_art.errors import NotFound
from langchain_art.statistics.costs import NodeFigures, known_sum, node_figures, prices
from langchain_art.statistics.intervals import (
    Comparison,
    compare_rewards,
    mean_of_scenarios,
    sign_test,
    wilson,
)
from langchain_art.wire import Message, Review, Trajectory
from langchain_art_server.gateway.service import Service
from langchain_art_server.page.answers import SharedAnswers, as_json
from langchain_art_server.storage.run_list import (
    EvaluatedRun,
    Evaluation,
    rewards_by_scenario,
)

#: Before the id of the other run, in the name of the score that a choice is.
BETTER_THAN = "better_than:"
#: Differences of means that are none but for rounding.
TIE = 1e-12


class Pair(NamedTuple):
    """A run of either version, of one scenario."""

    scenario: str
    before: str
    after: str

    def drawn(self, *salt: str) -> bytes:
        """The same random bytes for the same pair and salt."""
        return hashlib.sha256("\0".join((self.before, self.after, *salt)).encode()).digest()

    def sides(self, reviewer: str) -> tuple[str, str]:
        """Sides, left and right, as they are drawn for a reviewer."""
        swapped = self.drawn(reviewer)[0] % 2
        return (self.after, self.before) if swapped else (self.before, self.after)


class BlindCall(BaseModel):
    """One call of a run, without what would tell the version."""

    node: str | None
    messages: list[Message]
    """The messages that are new in this call."""
    reply: Message | None


class BlindRun(BaseModel):
    """One run of a pair."""

    id: str
    calls: list[BlindCall]


class Preference(BaseModel):
    """The choices of all reviewers, by scenario."""

    preferences: int
    """Choices, ties included."""
    reviewers: int
    better: int
    """Scenarios in which the later version is preferred more often than not."""
    worse: int
    ties: int
    rate: float | None
    """``better / (better + worse)``; None without either."""
    low: float | None
    """The 95 % interval of `rate`, by Wilson."""
    high: float | None
    p_value: float
    """`sign_test` of the scenarios that are no ties."""


class BlindView(BaseModel):
    """The answer of ``GET /page/blind``."""

    pairs: int
    """Number of pairs of runs of the same scenario."""
    compared: int
    """Pairs that the reviewer has compared."""
    scenario: str | None
    """The next pair's; None: the reviewer has compared all, or none was named."""
    left: BlindRun | None
    right: BlindRun | None
    preference: Preference | None
    """None while the reviewer still compares."""


def pairs_of(before: Sequence[EvaluatedRun], after: Sequence[EvaluatedRun]) -> list[Pair]:
    """The runs of the same scenarios in pairs: one of each scenario first, then the second ones.

    Runs are paired in the order in which they came, and pairs stand in an order that is drawn.
    """
    first, second = by_scenario(before), by_scenario(after)
    found = [
        (number, Pair(scenario, old.id, new.id))
        for scenario in first.keys() & second.keys()
        for number, (old, new) in enumerate(zip(first[scenario], second[scenario], strict=False))
    ]
    return [pair for _, pair in sorted(found, key=lambda one: (one[0], one[1].drawn()))]


def next_pair(
    pairs: Sequence[Pair], reviews: Iterable[Review], reviewer: str
) -> tuple[Pair | None, int]:
    """The first pair that a reviewer has not compared, and how many he has."""
    done = {runs for runs, who in choices(reviews) if who == reviewer}
    left = [one for one in pairs if frozenset(one[1:]) not in done]
    return (left[0] if left else None), len(pairs) - len(left)


def choices(reviews: Iterable[Review]) -> dict[tuple[frozenset[str], str], Review]:
    """Last choice by pair of runs and reviewer, without those that were taken back."""
    found: dict[tuple[frozenset[str], str], Review] = {}
    for one in sorted(reviews, key=lambda review: review.at):
        if one.kind == "score" and one.name.startswith(BETTER_THAN) and one.call_id is None:
            other = one.name.removeprefix(BETTER_THAN)
            found[frozenset((one.trajectory, other)), one.reviewer or one.id] = one
    return {key: one for key, one in found.items() if one.value is not None}


def preference(pairs: Sequence[Pair], reviews: Iterable[Review]) -> Preference:
    """The scenarios in which `Pair.after` is preferred, and the sign test.

    Choices of one scenario depend on each other: their mean counts, once.
    """
    by_pair = {frozenset(one[1:]): one for one in pairs}
    said: defaultdict[str, list[float]] = defaultdict(list)
    reviewers: set[str] = set()
    for (runs, who), one in choices(reviews).items():
        if (pair := by_pair.get(runs)) is not None and one.value is not None:
            said[pair.scenario].append(one.value if one.trajectory == pair.after else 1 - one.value)
            reviewers.add(who)
    means = [statistics.fmean(values) - 0.5 for values in said.values()]
    better, worse = sum(one > TIE for one in means), sum(one < -TIE for one in means)
    decided = better + worse
    low, high = wilson(better, decided) if decided else (None, None)
    return Preference(
        preferences=sum(map(len, said.values())),
        reviewers=len(reviewers),
        better=better,
        worse=worse,
        ties=len(means) - decided,
        rate=better / decided if decided else None,
        low=low,
        high=high,
        p_value=sign_test(better, worse),
    )


def blind_run(run: Trajectory) -> BlindRun:
    """A run's prompts and replies, without calls that were excluded."""
    calls: list[BlindCall] = []
    for index, turn in enumerate(run.turns):
        if turn.excluded_because is None:
            shown = turn.extends is not None and run.turns[turn.extends].excluded_because is None
            messages = list(turn.messages) if shown else run.prompt(index)
            calls.append(BlindCall(node=turn.node, messages=messages, reply=turn.reply))
    return BlindRun(id=run.id, calls=calls)


def by_scenario(runs: Iterable[EvaluatedRun]) -> Mapping[str, list[EvaluatedRun]]:
    """The runs of each scenario, in their order."""
    found = defaultdict[str, list[EvaluatedRun]](list)
    for run in runs:
        found[run.scenario].append(run)
    return found


#: Scenarios that are shown, and each version's newest runs whose calls are counted.
MOST_SCENARIOS, MOST_RUNS = 200, 256
_Versions = Annotated[str, Query(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


class Side(BaseModel):
    """One of two versions that are compared."""

    versions: str
    mean: float | None
    ci95: float | None
    runs: int
    """Runs with a reward."""
    failed: int
    """Runs without a reward, because they failed."""
    counted: int
    """The newest runs, of whose calls the nodes' figures are."""
    cost_usd: float | None
    """Cost of these runs, as far as it is known."""


class ComparedScenario(BaseModel):
    """One scenario that both have rewards of."""

    scenario: str
    before: float
    """Mean reward."""
    after: float
    difference: float
    before_runs: list[str]
    """Ids."""
    after_runs: list[str]


class ComparedNode(BaseModel):
    """The calls of one node with one model, or with two versions of one policy."""

    node: str
    model: str
    """Model without the version that is compared."""
    before: NodeFigures | None
    after: NodeFigures | None


class VersionComparison(BaseModel):
    """The answer of ``GET /page/comparison``."""

    comparison: Comparison | None
    """None: one of them has no reward."""
    before: Side
    after: Side
    wins: int
    """Scenarios in which the mean reward of `after` is higher."""
    losses: int
    ties: int
    scenarios: list[ComparedScenario]
    """Scenarios that differ most, at most `MOST_SCENARIOS`; the greatest loss first."""
    nodes: list[ComparedNode]
    notes: list[str]
    """Notes on what the costs leave out, and why."""


def evaluation_routes(router: APIRouter, service: Service) -> None:
    """Add the facts of evaluations."""
    shared, store = SharedAnswers(), service.store

    async def read() -> dict[str, list[Evaluation]]:
        return {"evaluations": await store.runs.evaluations()}

    @router.get("/evaluations")
    async def all_evaluations() -> Response:
        """Get each version's mean reward on held-out scenarios, that evaluated first first."""
        return await shared.get("evaluations", read)

    async def evaluated(*both: str) -> list[list[EvaluatedRun]]:
        found = [await store.runs.evaluated(versions) for versions in both]
        for versions, runs in zip(both, found, strict=True):
            if not runs:
                raise NotFound(f"No run of an evaluation of {versions!r} is stored here.")
        return found

    @router.get("/blind")
    async def compare_blind(
        before: _Versions,
        after: _Versions,
        reviewer: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
    ) -> Response:
        """Get the next pair of runs for a reviewer, or what people prefer."""
        pairs = pairs_of(*await evaluated(before, after))
        reviews = await store.reviews.of_runs(run for pair in pairs for run in pair[1:])
        pair, compared = next_pair(pairs, reviews, reviewer) if reviewer else (None, 0)
        runs: list[BlindRun] = []
        if pair is not None:
            names = pair.sides(reviewer or "")
            stored = await store.trajectories(names)
            if len(stored) < len(names):
                raise NotFound(f"A run of {pair.scenario!r} was deleted meanwhile. Ask again.")
            runs = [blind_run(stored[name].trajectory) for name in names]
        left, right = runs or (None, None)
        return await as_json(
            BlindView(
                pairs=len(pairs),
                compared=compared,
                scenario=None if pair is None else pair.scenario,
                left=left,
                right=right,
                preference=preference(pairs, reviews) if pair is None else None,
            )
        )

    @router.get("/comparison")
    async def compare_versions(before: _Versions, after: _Versions) -> Response:
        """Compare two versions."""
        runs = await evaluated(before, after)
        stored = await store.trajectories([one.id for some in runs for one in some[-MOST_RUNS:]])
        bodies = [
            [stored[one.id].trajectory for one in some[-MOST_RUNS:] if one.id in stored]
            for some in runs
        ]
        names, gpu_rate = (before, after), service.settings.page.gpu_rate
        return await as_json(await asyncio.to_thread(compare, names, runs, bodies, gpu_rate))


def compare(
    names: tuple[str, str],
    runs: Sequence[Sequence[EvaluatedRun]],
    bodies: Sequence[Sequence[Trajectory]],
    gpu_rate: float | None,
) -> VersionComparison:
    """Compare two versions, before and after, by their held-out runs.

    The calls of `bodies` are counted; `gpu_rate` is in US dollars an hour of the server (None: the
    cost of its calls is not counted).
    """
    first, second = [by_scenario(some) for some in runs]
    rewards = [rewards_by_scenario(some) for some in runs]
    old, new = [{name: given for name, given in one.items() if given} for one in rewards]
    scenarios = [
        ComparedScenario(
            scenario=name,
            before=(was := statistics.fmean(old[name])),
            after=(now := statistics.fmean(new[name])),
            difference=now - was,
            before_runs=[one.id for one in first[name]],
            after_runs=[one.id for one in second[name]],
        )
        for name in old
        if name in new
    ]
    most = sorted(scenarios, key=lambda one: -abs(one.difference))[:MOST_SCENARIOS]
    notes: list[str] = []
    sides: list[Side] = []
    nodes: dict[tuple[str, str], list[NodeFigures | None]] = {}
    for index, (name, all_runs, known) in enumerate(zip(names, runs, bodies, strict=True)):
        turns = [turn for run in known for turn in run.turns]
        costs, unknown = prices(turns, gpu_rate)
        notes += [one for one in unknown if one not in notes]
        for figures in node_figures(turns, costs):
            is_compared = figures.model in name.split(" + ")
            model = figures.model.partition("@")[0] if is_compared else figures.model
            nodes.setdefault((figures.node, model), [None, None])[index] = figures
        mean = mean_of_scenarios(rewards[index].values())
        sides.append(
            Side(
                versions=name,
                mean=mean.mean,
                ci95=mean.ci95,
                runs=mean.rewards,
                failed=sum(one.failed and one.reward is None for one in all_runs),
                counted=len(known),
                cost_usd=known_sum(costs),
            )
        )
    differences = [one.difference for one in scenarios]
    wins, losses = sum(d > TIE for d in differences), sum(d < -TIE for d in differences)
    return VersionComparison(
        comparison=compare_rewards(*names, old, new) if old and new else None,
        before=sides[0],
        after=sides[1],
        wins=wins,
        losses=losses,
        ties=len(scenarios) - wins - losses,
        scenarios=sorted(most, key=lambda one: (one.difference, one.scenario)),
        nodes=[
            ComparedNode(node=node, model=model, before=some[0], after=some[1])
            for (node, model), some in sorted(nodes.items())
        ],
        notes=notes,
    )
