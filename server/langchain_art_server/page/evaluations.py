"""Results of versions on held-out scenarios, and two of them compared."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from langchain_art.errors import NotFound
from langchain_art.statistics.costs import NodeFigures, known_sum, node_figures, prices
from langchain_art.statistics.intervals import Comparison, compare_rewards, mean_of_scenarios
from langchain_art.wire import Trajectory
from langchain_art_server.gateway.service import Service
from langchain_art_server.page.answers import SharedAnswers, as_json
from langchain_art_server.page.blind import (
    TIE,
    BlindRun,
    BlindView,
    blind_run,
    by_scenario,
    next_pair,
    pairs_of,
    preference,
)
from langchain_art_server.storage.run_list import EvaluatedRun, Evaluation, Evaluations

#: Scenarios that are shown, and each version's newest runs whose calls are counted.
MOST_SCENARIOS, MOST_RUNS = 200, 256
_Versions = Annotated[str, Query(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


class AllEvaluations(BaseModel):
    """The answer of ``GET /page/evaluations``."""

    evaluations: list[Evaluation]
    """The versions that were evaluated first come first."""


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
    evaluations = Evaluations(service.store)

    shared = SharedAnswers()

    async def read() -> AllEvaluations:
        return AllEvaluations(evaluations=await evaluations.all())

    @router.get("/evaluations", response_model=AllEvaluations)
    async def all_evaluations() -> Response:
        """Get each version's mean reward on held-out scenarios."""
        return await shared.get("evaluations", read)

    async def evaluated(*both: str) -> list[list[EvaluatedRun]]:
        found = [await evaluations.runs(versions) for versions in both]
        for versions, runs in zip(both, found, strict=True):
            if not runs:
                raise NotFound(f"No run of an evaluation of {versions!r} is stored here.")
        return found

    @router.get("/blind", response_model=BlindView)
    async def compare_blind(
        before: _Versions,
        after: _Versions,
        reviewer: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
    ) -> Response:
        """Get the next pair of runs for a reviewer, or what people prefer."""
        store, pairs = service.store, pairs_of(*await evaluated(before, after))
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

    @router.get("/comparison", response_model=VersionComparison)
    async def compare_versions(
        before: _Versions,
        after: _Versions,
        gpu_rate: Annotated[float | None, Query(ge=0, le=1e6)] = None,
    ) -> Response:
        """Compare two versions; `gpu_rate` is what an hour of the server costs, in US dollars."""
        runs = await evaluated(before, after)
        stored = await service.store.trajectories(
            [one.id for some in runs for one in some[-MOST_RUNS:]]
        )
        bodies = [
            [stored[one.id].trajectory for one in some[-MOST_RUNS:] if one.id in stored]
            for some in runs
        ]
        names = (before, after)
        return await as_json(await asyncio.to_thread(compare, names, runs, bodies, gpu_rate))


def compare(
    names: tuple[str, str],
    runs: Sequence[Sequence[EvaluatedRun]],
    bodies: Sequence[Sequence[Trajectory]],
    gpu_rate: float | None,
) -> VersionComparison:
    """Compare two versions by their held-out runs.

    Args:
        names: before and after.
        runs: of either, all.
        bodies: of either, those whose calls are counted.
        gpu_rate: US dollars an hour of the server; None: the cost of its calls is not counted.
    """
    first, second = [by_scenario(some) for some in runs]
    rewards = [{name: _rewards(some) for name, some in one.items()} for one in (first, second)]
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
            key = figures.node, _without_version(figures.model, name)
            nodes.setdefault(key, [None, None])[index] = figures
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


def _rewards(runs: Sequence[EvaluatedRun]) -> list[float]:
    return [run.reward for run in runs if run.reward is not None]


def _without_version(model: str, versions: str) -> str:
    """A policy's name, of a model that is one of the versions; else the model's."""
    return model.partition("@")[0] if model in versions.split(" + ") else model
