"""Overview: the steps of every fit, the jobs that run, health and clients."""

from __future__ import annotations

import asyncio
import re

from fastapi import APIRouter, Response
from pydantic import BaseModel

from langchain_art import wire
from langchain_art.wire.training import meaning
from langchain_art_server.gateway.keys.tenants import tenant_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.page.answers import SharedAnswers

#: Jobs whose steps are shown, and lines of a log.
_JOBS, _LINES = 600, 30
#: The key that a fit gives its jobs (`langchain_art.training.fit_state`).
_OF_FIT = re.compile(r"(?P<fit>.+):(?P<policy>[^:]+):step:(?P<step>\d+)(:\d+)?")


class Step(BaseModel):
    """One step of training that has ended well."""

    job: str
    step: int
    """Step of its fit, from 1; without a fit, of the policy's jobs that are shown."""
    base: int | None
    """The version that it started from."""
    version: int
    learned: bool
    """True if it made a version: not if all was excluded."""
    at: float
    metrics: dict[str, float]
    excluded: dict[str, int]


class Series(BaseModel):
    """The steps of one policy in one fit, oldest first."""

    policy: str
    fit: str | None
    """None: jobs that no fit sent."""
    steps: list[Step]


class OpenJob(BaseModel):
    """A job that waits or runs, with the end of its log."""

    job: wire.TrainJob
    progress: float | None
    log: list[wire.JobEvent]


class Caller(BaseModel):
    """Caller: a key; with the server's own, the address (of IPv6, the /64)."""

    address: str
    running: int
    idle_seconds: float


class Overview(BaseModel):
    """The answer of ``GET /page/overview``."""

    status: wire.ServerStatus
    series: list[Series]
    open_jobs: list[OpenJob]
    failed: wire.TrainJob | None
    """The last job, if it failed."""
    clients: list[Caller]
    reasons: dict[str, str]
    """Meaning of each reason in `excluded`."""


def series_of(jobs: list[wire.TrainJob]) -> list[Series]:
    """The steps of `jobs` by fit and policy; the fit that trained last comes first."""
    found: dict[tuple[str, str | None], list[Step]] = {}
    for job in jobs:
        if job.result is None or job.state != "succeeded":
            continue
        match = _OF_FIT.fullmatch(job.key)
        mine = match is not None and match["policy"] == job.policy
        fit = match["fit"] if match is not None and mine else None
        steps = found.setdefault((job.policy, fit), [])
        step = Step(
            job=job.id,
            step=int(match["step"]) if match is not None and mine else len(steps) + 1,
            base=job.base_version,
            version=job.result.version,
            learned=job.result.version != job.base_version,
            at=job.finished_at or job.created_at,
            metrics=job.result.metrics | _tokens(job.result),
            excluded=job.result.excluded,
        )
        steps.append(step)
    series = [Series(policy=p, fit=f, steps=steps) for (p, f), steps in found.items()]
    return sorted(series, key=lambda one: -one.steps[-1].at)


def _tokens(result: wire.TrainResult) -> dict[str, float]:
    """The tokens of its nodes: the learner counts each as often as it made an update with it."""
    nodes = result.nodes.values()
    return {"tokens_trained": float(sum(node.tokens for node in nodes))} if nodes else {}


class OverviewFacts:
    """Reads them. The jobs, which are many, again only when one was added or has changed."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._jobs: tuple[int, list[wire.TrainJob], list[Series]] = (-1, [], [])

    async def read(self) -> Overview:
        """The facts now."""
        service, store = self._service, self._service.store.jobs
        changes, jobs, series = self._jobs
        if changes != store.changes:
            changes = store.changes
            jobs = await store.latest(_JOBS)
            series = await asyncio.to_thread(series_of, jobs)
            self._jobs = changes, jobs, series
        open_jobs: list[OpenJob] = []
        for job in jobs:
            if not job.ended:
                log = await store.last_events(job.id, _LINES)
                known = [one.progress for one in log if one.progress is not None]
                progress = known[-1] if known else None
                open_jobs.append(OpenJob(job=job, progress=progress, log=log))
        reasons = {name for one in series for step in one.steps for name in step.excluded}
        return Overview(
            status=await service.status(),
            series=series,
            open_jobs=open_jobs,
            failed=jobs[-1] if jobs and jobs[-1].state == "failed" else None,
            clients=[
                Caller(address=address, running=running, idle_seconds=idle)
                for address, running, idle in service.slots.clients()
                if tenant_of(address) == service.tenant
            ],
            reasons={name: meaning(name) for name in sorted(reasons)},
        )


def overview_routes(router: APIRouter, service: Service) -> None:
    """Add the overview's facts."""
    facts, shared = OverviewFacts(service), SharedAnswers()

    @router.get("/overview", response_model=Overview)
    async def overview() -> Response:
        """Return the overview."""
        return await shared.get("overview", facts.read)
