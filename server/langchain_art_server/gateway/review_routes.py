"""The routes of what people say of runs: reviews, what a step by them trains, and the step."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

from fastapi import FastAPI, Header, Query, Request, Response
from pydantic import ValidationError

from langchain_art import wire
from langchain_art.errors import Conflict
from langchain_art_server.gateway.auth import access_of, peer_of
from langchain_art_server.gateway.lists import Limit, PageOf, page_turns
from langchain_art_server.gateway.openapi import body_docs
from langchain_art_server.gateway.record_routes import whole
from langchain_art_server.gateway.refusals import refuse
from langchain_art_server.gateway.request_bodies import checked_key, model_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.jobs.eligibility import steps_since
from langchain_art_server.jobs.review_plan import PlannedSteps, ReviewedRun, plan_reviews
from langchain_art_server.storage.job_store import ReviewStep
from langchain_art_server.storage.review_store import VerdictMark

#: What every database can hold.
MAX_CURSOR = 2**63 - 1
#: Characters of an order's key: its jobs have their numbers behind it.
MAX_ORDER_KEY = 120
#: Runs whose calls are in memory at once.
_AT_ONCE = 50


def review_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of reviews."""
    turns = page_turns()

    @app.put("/v1/reviews", openapi_extra=body_docs(wire.Reviews))
    async def put_reviews(request: Request) -> wire.ReviewsKept:
        """Keep what people said of trajectories and calls.

        Idempotent by source and id; of two revisions the later one (`at`) is kept. A review of a
        trajectory or a call that is not known is refused, and named in the answer.
        """
        service.health.require_space()
        sent = await model_of(request, wire.Reviews)
        kept = await service.store.reviews.put(sent.reviews)
        refused = {(one.source, one.id) for one in kept.refused}
        runs = {one.trajectory for one in sent.reviews if (one.source, one.id) not in refused}
        if kept.new or kept.revised:
            subject = " ".join(sorted(runs))
            await service.note(access_of(request.scope), "reviewed", subject)
        return kept

    @app.get("/v1/reviews", response_model=PageOf[wire.Review])
    async def list_reviews(
        request: Request,
        limit: Limit = 100,
        policy: str | None = None,
        trajectory: str | None = None,
        source: str | None = None,
        after: Annotated[int, Query(ge=0, le=MAX_CURSOR)] = 0,
    ) -> Response:
        """List reviews in the order in which they first came.

        With `policy`, those of trajectories that have a call of that policy; with `trajectory` or
        `source`, those of one. A page has at most `limit` items and, but for its first one, 8 MiB.
        """
        page = await turns.take(
            peer_of(request.scope),
            lambda: service.store.reviews.page(
                limit, policy=policy, trajectory=trajectory, source=source, after=after
            ),
        )
        return whole(page)

    @app.post("/v1/reviews/plan", openapi_extra=body_docs(wire.ReviewTraining))
    async def plan(request: Request) -> wire.ReviewPlan:
        """Say what a step by reviews would train now, verdict by verdict, without ordering it."""
        asked = await model_of(request, wire.ReviewTraining)
        await service.policies.get(asked.policy)
        steps, _ = await planned(
            service, asked, await service.store.reviews.of_policy(asked.policy)
        )
        return steps.plan

    @app.post("/v1/reviews/train", status_code=202, openapi_extra=body_docs(wire.ReviewTraining))
    async def train(
        request: Request, idempotency_key: Annotated[str | None, Header()] = None
    ) -> wire.ReviewJobs:
        """Queue the jobs of a step by reviews. The same Idempotency-Key gives the same jobs.

        A verdict is trained once with each of its values, however often and by whom the step is
        ordered. There are no jobs if there is nothing to train.
        """
        key = checked_key(idempotency_key, MAX_ORDER_KEY)
        asked = await model_of(request, wire.ReviewTraining)
        jobs = await order(service, asked, key)
        for job in jobs:
            said = f"{job.policy} by {job.id}"
            await service.note(access_of(request.scope), "trained", said)
        return wire.ReviewJobs(jobs=tuple(jobs))

    @app.post("/v1/reviews/foresee", openapi_extra=body_docs(wire.RunsToReview))
    async def foresee(request: Request) -> dict[str, wire.VerdictFate]:
        """Say what a verdict on each of some runs would do: ``trains``, or what prevents it."""
        return await foreseen(service, (await model_of(request, wire.RunsToReview)).runs)


async def planned(
    service: Service, asked: wire.ReviewTraining, reviews: Sequence[wire.Review]
) -> tuple[PlannedSteps, list[VerdictMark]]:
    """Steps that some reviews train, and the marks of what was trained before."""
    store = service.store
    marks = await store.reviews.marks(asked.policy)
    lineage = await _lineage(service, asked.policy)
    runs = await _reviewed_runs(service, asked.policy, {one.trajectory for one in reviews}, lineage)
    found = await asyncio.to_thread(plan_reviews, asked, reviews, runs, marks, lineage)
    return found, marks


async def order(service: Service, asked: wire.ReviewTraining, key: str) -> list[wire.TrainJob]:
    """Queue the jobs of a step by reviews, once per key; none if there is nothing to train.

    Raises:
        NotFound: there is no such policy.
        InvalidRequest: the server has no such loss.
        Conflict: the key was used for another order, or the plan is not `ReviewTraining.plan`.
        Overloaded: `max_queued_jobs` have not ended.
        QuotaExceeded, EngineUnavailable: as `Health.require_space`.
    """
    service.health.require_space()
    await service.policies.get(asked.policy)
    store = service.store
    while True:
        if done := await store.jobs.reviewed(key, asked):
            return done
        reviews = await store.reviews.of_policy(asked.policy)
        found, marks = await planned(service, asked, reviews)
        if asked.plan not in (None, found.plan.digest):
            raise Conflict(
                "What people said, or what was trained, has changed since the plan that this order "
                "names was made. Ask for the plan again, and order that one.",
                param="plan",
            )
        await store.add_trajectories(list({run.id: run for run in found.pair_runs}.values()))
        steps: list[ReviewStep] = []
        for request, its in _requests(asked, found):
            rated = await service.rated(request)
            runs = await service.checked(rated)
            steps.append(ReviewStep(f"job-{uuid.uuid4().hex}", rated, runs, its))
        if not steps:
            return []
        most = service.settings.max_queued_jobs
        jobs = await store.jobs.add_reviewed(key, asked, steps, marks, most)
        if jobs is not None:
            service.jobs.wake()
            return jobs


async def foreseen(service: Service, ids: Iterable[str]) -> dict[str, wire.VerdictFate]:
    """Effect of a verdict by run, for the first policy that sampled a call of it."""
    stored = await service.store.trajectories(ids)
    by_policy: dict[str, list[str]] = {}
    found: dict[str, wire.VerdictFate] = {}
    for name, one in stored.items():
        policy = learner_of(one.trajectory.turns, service.router.serving)
        if policy is None:
            found[name] = "other_model"
        else:
            by_policy.setdefault(policy, []).append(name)
    for policy, names in by_policy.items():
        asked = wire.ReviewTraining(policy=policy)
        runs = await _reviewed_runs(service, policy, names, await _lineage(service, policy))
        found |= {name: run.fate(asked) for name, run in runs.items()}
    return found


def learner_of(turns: Sequence[wire.Turn], policies: Collection[str]) -> str | None:
    """The first policy of this server that sampled one of the turns."""
    names = ((turn.model or "").partition("@")[0] for turn in turns if turn.ours)
    return next((name for name in names if name in policies), None)


async def _lineage(service: Service, policy: str) -> dict[int, int]:
    """`steps_since` of the version that serves."""
    serving = (await service.store.served())[0].get(policy, 0)
    return steps_since(await service.store.jobs.parents(policy), serving)


async def _reviewed_runs(
    service: Service, policy: str, ids: Iterable[str], lineage: Mapping[int, int]
) -> dict[str, ReviewedRun]:
    """The stored ones among some runs."""
    store, wanted = service.store, sorted(set(ids))
    found: dict[str, ReviewedRun] = {}
    for start in range(0, len(wanted), _AT_ONCE):
        stored = await store.trajectories(wanted[start : start + _AT_ONCE])
        runs = [one.trajectory for one in stored.values()]
        held_out = await store.reviews.held_out(run.scenario for run in runs if run.scenario)
        records = await store.calls(
            turn.call_id for run in runs for turn in run.turns if turn.call_id
        )
        for run in runs:
            found[run.id] = ReviewedRun.of(run, records, policy, lineage, held_out)
    return found


def _requests(
    asked: wire.ReviewTraining, found: PlannedSteps
) -> Iterable[tuple[wire.TrainRequest, Sequence[VerdictMark]]]:
    """The jobs of a plan, each with the verdicts that it trains."""
    plan = found.plan
    try:
        if plan.groups:
            request = wire.TrainRequest(
                policy=asked.policy,
                groups=plan.groups,
                config=asked.config,
                rewards=plan.rewards,
                turns=plan.turns,
                compared=plan.compared,
                retrain=True,  # by what people said, whatever it was trained by before
            )
            yield request, found.reward_marks
        if plan.pairs:
            request = wire.TrainRequest(
                policy=asked.policy, groups=plan.pairs, config=asked.preference
            )
            yield from [(request, found.correction_marks)] * asked.correction_steps
    except ValidationError as error:  # more groups than a job may have, a setting that is not read
        raise refuse(error.errors(), wire.TrainRequest) from error
