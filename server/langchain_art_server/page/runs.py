"""The page's routes of runs: lists, one run, its tokens and advantages, and what is to review."""

from __future__ import annotations

import asyncio
import hashlib
import time
from functools import partial
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from langchain_art import wire
from langchain_art.errors import NotFound
from langchain_art.statistics.agreement import JUDGE, verdicts
from langchain_art.statistics.costs import prices
from langchain_art.wire import HUMAN_REWARD, CallTags, Review, ReviewTraining
from langchain_art.wire.reviews import Pick, ranked
from langchain_art_server.backends.chat.output_processor import token_texts
from langchain_art_server.gateway.chat.images import image_format
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.review_routes import foreseen, learner_of, planned
from langchain_art_server.gateway.service import Service
from langchain_art_server.jobs.audit import CreditReader, RunCredit, audit
from langchain_art_server.jobs.trajectory_assembly import assemble
from langchain_art_server.page.answers import SharedAnswers, as_json
from langchain_art_server.page.siblings import compare, explanations
from langchain_art_server.storage.queries import MAX_PAGE
from langchain_art_server.storage.run_list import (
    MAX_RUNS,
    RunsQuery,
    RunSummary,
)
from langchain_art_server.storage.tables import CALLS, TRAJECTORIES, StoredRun

#: The newest runs without a review among which a queue looks, and those that it gives.
AMONG, QUEUED = 1000, 50
#: Seconds since its last call for which a run is listed, the newest calls that are looked at, and
#: the most runs that are listed.
OPEN_SECONDS, _AMONG, _LISTED = 600.0, 2000, 50
#: Bytes of a token's number.
_TOKEN = 4


class RunView(BaseModel):
    """All of one run but its tokens."""

    run: wire.Trajectory
    audit: wire.TrajectoryAudit
    judged: dict[str, str]
    """Explanation of the score, by evaluator."""
    reviews: list[wire.Review]
    """Reviews of the run and its calls; the first `MAX_PAGE`."""
    base_model: str
    """The name of the model that is no policy."""
    stored: bool
    """False: it is put together from the calls so far; it still runs, or was not sent."""
    costs: list[float | None]
    """US dollars of each call; None: not known."""
    unpriced: list[str]
    """Prices that are not known, in words."""
    trace: str | None
    """Address of the run in Langfuse, if it was exported; None: `PageSettings` names no project."""


class CallTokens(BaseModel):
    """The sampled tokens of one call."""

    token_ids: list[int]
    texts: list[str] | None
    """Text that each token adds; None: the server has no tokenizer file that it can read."""
    logprobs: list[float]
    """Nats, of the distribution that was sampled."""


class ReviewQueue(BaseModel):
    """Runs to look at, the first one first."""

    runs: list[RunSummary]
    among: int
    """Number of the newest runs without a review that were looked at."""
    not_ordered: int
    """Number of these that lack what the pick needs (two scores; a reward)."""
    foreseen: dict[str, wire.VerdictFate]
    """Effect of a verdict by run (`foreseen`); ``disagreement``: it would decide."""
    alpha: float | None
    """Krippendorff's alpha of the reviewers of the runs looked at (`Verdicts.alpha`)."""
    several: int
    """Number of these runs that have several reviewers."""


def run_routes(router: APIRouter, service: Service) -> None:
    """Add the page's routes of runs."""
    credits, store = CreditReader(service.store), service.store
    shared = SharedAnswers()

    @router.get("/runs")
    async def find_runs(asked: Annotated[RunsQuery, Query()]) -> Response:
        """List runs that all given fields choose, sorted; `next` is the cursor of the next page."""
        return await shared.get(f"runs {asked!r}", partial(store.runs.page, asked))

    @router.get("/open-runs")
    async def find_open_runs() -> Response:
        """List the runs that have calls and are not stored."""
        return await shared.get("open", partial(store.read, read_open_runs))

    @router.get("/run-names")
    async def name_runs() -> Response:
        """Get the names by which runs can be filtered, and how many runs there are."""
        return await shared.get("names", store.runs.names)

    @router.get("/runs/{trajectory_id}")
    async def view_run(trajectory_id: str) -> Response:
        """Get a run with its audit, its reviews and the judges' explanations.

        Answers ``null`` where there is none: who watches a run asks again, and it may be deleted.
        """
        view = await _view(service, trajectory_id)
        return await as_json(view) if view else Response("null", media_type="application/json")

    @router.get("/runs/{trajectory_id}/siblings")
    async def view_siblings(trajectory_id: str) -> Response:
        """Get the runs of a run's group (or scenario) side by side, and where they part from it."""
        summaries = await store.runs.siblings(trajectory_id)
        stored = await store.trajectories([one.id for one in summaries])
        runs = {name: one.trajectory for name, one in stored.items()}
        if trajectory_id not in runs:  # deleted meanwhile
            raise NotFound(f"No trajectory {trajectory_id!r} is stored here.")
        return await as_json(await asyncio.to_thread(compare, trajectory_id, summaries, runs))

    @router.get("/runs/{trajectory_id}/credit/{job_id}")
    async def view_credit(trajectory_id: str, job_id: str) -> RunCredit:
        """Get the advantage that a job gave to each call of a run, or why it excluded the call."""
        return await credits.of_run(trajectory_id, job_id)

    @router.get("/calls/{call_id}/tokens")
    async def view_tokens(call_id: str) -> Response:
        """Get the sampled tokens of a call: text, logprob."""
        call = await store.call(call_id)
        path = service.sampler.info.path
        texts = await asyncio.to_thread(token_texts, path, call.token_ids)
        return await as_json(CallTokens(**vars(call), texts=texts))

    @router.get("/images/{sha256}")
    async def view_image(sha256: str) -> Response:
        """Get an image that a call was shown."""
        body = await store.image(sha256)
        return Response(
            body,
            media_type=f"image/{(image_format(body) or '').lower()}",
            headers={
                "Cache-Control": "private, max-age=86400",
                "Content-Security-Policy": "default-src 'none'; sandbox",
                "X-Content-Type-Options": "nosniff",
            },
        )

    _review_routes(router, service)


def _review_routes(router: APIRouter, service: Service) -> None:
    store = service.store

    @router.get("/review-queue")
    async def view_queue(
        pick: Pick = "disagreement",
        policy: wire.Name | None = None,
        reviewer: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
    ) -> ReviewQueue:
        """Get the runs that are most worth a look, of the newest ones.

        Without a reviewer, those without a review. For one, those that he has not, and
        fewer than two others, or two who disagree: these come first.
        """
        which = RunsQuery(reviewed=None if reviewer else False, policy=policy, limit=MAX_RUNS)
        found: list[RunSummary] = []
        while len(found) < AMONG:
            page = await store.runs.page(which)
            found += page.runs
            if page.next is None:
                break
            which.after = page.next
        reviews = await store.reviews.of_runs(run.id for run in found if run.reviews)
        said = verdicts(reviews, wire.HUMAN_REWARD)
        of_runs = [one for one in said.all if one.call_id is None]
        disputed = {one.trajectory for one in of_runs if one.abstains}
        done = {one.trajectory for one in of_runs if one.reviewers > 1} - disputed
        own = [
            one
            for one in reviews
            if one.kind != "score" and (one.reviewer == reviewer or one.source == JUDGE)
        ]
        done |= {one.trajectory for one in own if not one.taken_back}
        open_runs = [run for run in found if run.id not in done]
        first = [run for run in open_runs if run.id in disputed]
        ordered = [*first, *ranked([run for run in open_runs if run.id not in disputed], pick)]
        runs = ordered[:QUEUED]
        fates = await foreseen(service, [run.id for run in runs])
        decides: wire.VerdictFate = "disagreement"
        return ReviewQueue(
            runs=runs,
            among=len(open_runs),
            not_ordered=len(open_runs) - len(ordered),
            foreseen={
                name: decides if name in disputed and fate == "trains" else fate
                for name, fate in fates.items()
            },
            alpha=said.alpha,
            several=sum(one.reviewers > 1 for one in of_runs),
        )

    @router.post("/review-effect")
    async def foresee_review(request: Request) -> ReviewEffect:
        """Say what a review will do, without keeping it."""
        review = await model_of(request, wire.Review)
        return await effect_of(service, review)


async def _view(service: Service, run_id: str) -> RunView | None:
    """A run that is stored, or what its calls so far come to; None: there is neither."""
    store, shown = service.store, service.settings.page
    try:
        found, audited = await asyncio.gather(
            store.trajectory(run_id), service.audit(run_id, None, {})
        )
        run = found.trajectory
    except NotFound:
        calls = await store.tagged_calls(run_id)
        if not calls:
            return None
        found, run = None, await asyncio.to_thread(assemble, run_id, calls)
        now, records = StoredRun(run, assembled=True, trained_by={}), {one.id: one for one in calls}
        audited = await asyncio.to_thread(audit, now, records, None, {})
    said = await store.reviews.page(MAX_PAGE, trajectory=run_id)
    costs, unpriced = await asyncio.to_thread(prices, run.turns, shown.gpu_rate)
    name = hashlib.sha256(run_id.encode()).hexdigest()[:32]  # `langchain_art.export.ids.trace_id`
    return RunView(
        run=run,
        audit=audited,
        judged=explanations(run),
        reviews=[wire.Review.model_validate_json(one) for one in said.items],
        base_model=service.router.base_name,
        stored=found is not None,
        costs=costs,
        unpriced=unpriced,
        trace=f"{shown.langfuse_project}/traces/{name}" if shown.langfuse_project else None,
    )


class OpenRun(BaseModel):
    """A run that has not been stored."""

    id: str
    scenario: str | None
    node: str | None
    """Node of its last call."""
    calls: int
    tokens: int
    """Sampled tokens."""
    seconds: float
    """Seconds from the first call's start to the last one's end."""
    last_at: float
    """End of its last call: seconds since the epoch."""
    models: list[str]


class OpenRuns(BaseModel):
    """Runs that have not been stored, the latest first."""

    runs: list[OpenRun]


def read_open_runs(connection: sa.Connection) -> OpenRuns:
    """The runs whose last call is no older than `OPEN_SECONDS`.

    They still run, wait for the other runs of their group or step, or are never sent.
    """
    newest = connection.scalar(sa.select(sa.func.max(CALLS.c.number))) or 0
    stored = sa.select(TRAJECTORIES.c.id).where(TRAJECTORIES.c.id == CALLS.c.trajectory_id)
    columns = (CALLS.c.trajectory_id, CALLS.c.tags, CALLS.c.model, CALLS.c.created_at)
    query = (
        sa.select(*columns, CALLS.c.latency, sa.func.length(CALLS.c.token_ids).label("size"))
        .where(CALLS.c.number > newest - _AMONG, CALLS.c.trajectory_id.is_not(None))
        .where(CALLS.c.created_at >= time.time() - OPEN_SECONDS, ~stored.exists())
        .order_by(CALLS.c.number.desc())
    )
    found: dict[str, OpenRun] = {}
    for row in connection.execute(query):
        begun = row.created_at - row.latency
        run = found.get(row.trajectory_id)
        if run is None:
            if len(found) == _LISTED:
                continue
            tags = CallTags.model_validate_json(row.tags)
            run = found[row.trajectory_id] = OpenRun(
                id=row.trajectory_id,
                scenario=tags.scenario,
                node=tags.node,
                calls=0,
                tokens=0,
                seconds=0.0,
                last_at=row.created_at,
                models=[],
            )
        run.calls += 1
        run.tokens += row.size // _TOKEN
        run.seconds = max(run.seconds, run.last_at - begun)
        if row.model not in run.models:
            run.models.append(row.model)
    return OpenRuns(runs=list(found.values()))


class ReviewEffect(BaseModel):
    """Effect of one review if it is saved now."""

    effect: str
    """``teaches_reward`` or ``teaches_preference``: the next ``langchain-art review train`` learns
    from it. ``is_kept``: what has another name than ``human_reward`` is shown and compared, never
    trained on. Any other is its `VerdictFate`, which is why nothing learns from it."""
    policy: str | None
    """Policy that would learn; None: none."""
    revises: str | None
    """The id of this reviewer's earlier review of the same thing, which it replaces."""


async def effect_of(service: Service, review: Review) -> ReviewEffect:
    """Effect of a review by the rules of `plan_reviews`, beside what others say.

    Raises NotFound: the run is not stored, or has no such call.
    """
    run = (await service.store.trajectory(review.trajectory)).trajectory
    turns = [turn for turn in run.turns if review.call_id in (None, turn.call_id)]
    if review.call_id is not None and not turns:
        raise NotFound(f"Trajectory {run.id!r} has no call {review.call_id!r}.")
    said = [one for one in await service.store.reviews.beside(run) if one.id != review.id]
    earlier = [one for one in said if _subject(one) == _subject(review)]
    policy = learner_of(turns, service.router.serving)
    kind = "correction" if review.kind == "correction" else "reward"
    if kind == "reward" and review.name != HUMAN_REWARD:
        effect = "is_kept"
    elif policy is None:
        effect = "other_model"
    else:
        beside = [one for one in said if one not in earlier]
        found, _ = await planned(service, ReviewTraining(policy=policy), [*beside, review])
        subject = (review.trajectory, review.call_id, kind)
        effect = next(
            one.fate
            for one in found.plan.verdicts
            if (one.trajectory, one.call_id, one.kind) == subject and one.fate != "revised"
        )
    if effect == "trains":
        effect = "teaches_preference" if kind == "correction" else "teaches_reward"
    return ReviewEffect(
        effect=effect,
        policy=policy if effect.startswith("teaches") else None,
        revises=earlier[0].id if earlier else None,
    )


def _subject(one: Review) -> tuple[object, ...]:
    return one.source, one.reviewer, one.trajectory, one.call_id, one.name, one.kind
