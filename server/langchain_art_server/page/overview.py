"""Overview: the steps of every fit, jobs, health and clients; and the view of the last jobs."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel

from langchain_art import wire
from langchain_art.wire.training import meaning
from langchain_art_server.gateway.keys.tenants import tenant_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.page.answers import SharedAnswers

#: Jobs whose steps are shown, jobs that are listed, and lines of a log.
_JOBS, _LISTED, _LINES = 600, 200, 30
#: The key that a fit gives its jobs (`langchain_art.training.fit_state`).
_OF_FIT = re.compile(r"(?P<fit>.+):(?P<policy>[^:]+):step:(?P<step>\d+)(:\d+)?")
_ID = re.compile(r"(?<=.)-[0-9a-f]{12}$")


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
    """Its name, with its id if a later one has the same. None: jobs that no fit sent."""
    steps: list[Step]


class Overview(BaseModel):
    """The answer of ``GET /page/overview``."""

    status: wire.ServerStatus
    series: list[Series]
    open_jobs: list[dict[str, Any]]
    """Each ``job`` that waits or runs, with its ``progress`` and the end of its ``log``."""
    failed: wire.TrainJob | None
    """The last job, if it failed."""
    clients: list[dict[str, Any]]
    """Callers: each one's ``address`` (a key; with the server's own, the address, of IPv6 the /64),
    calls that are ``running``, and ``idle_seconds``."""
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
        # The learner counts each token as often as it made an update with it; the nodes do once.
        tokens = float(sum(node.tokens for node in job.result.nodes.values()))
        step = Step(
            job=job.id,
            step=int(match["step"]) if match is not None and mine else len(steps) + 1,
            base=job.base_version,
            version=job.result.version,
            learned=job.result.version != job.base_version,
            at=job.finished_at or job.created_at,
            metrics=job.result.metrics | ({"tokens_trained": tokens} if job.result.nodes else {}),
            excluded=job.result.excluded,
        )
        steps.append(step)
    series = [Series(policy=p, fit=f, steps=steps) for (p, f), steps in found.items()]
    series.sort(key=lambda one: -one.steps[-1].at)
    named: set[tuple[str, str]] = set()
    for one in series:
        name = _ID.sub("", one.fit or "")
        if one.fit is not None and (one.policy, name) not in named:
            named.add((one.policy, name))
            one.fit = name
    return series


class OverviewFacts:
    """Reads them. The jobs, which are many, again only when one was added or has changed."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._jobs: tuple[int, list[wire.TrainJob], list[Series]] = (-1, [], [])

    async def read(self) -> Overview:
        """The facts now."""
        service, store = self._service, self._service.store.jobs
        changes, jobs, series = self._jobs
        if service.fleet is not None or changes != store.changes:
            changes = store.changes
            jobs = await store.latest(_JOBS)
            series = await asyncio.to_thread(series_of, jobs)
            self._jobs = changes, jobs, series
        open_jobs: list[dict[str, Any]] = []
        for job in jobs:
            if not job.ended:
                log = await store.last_events(job.id, _LINES)
                known = [one.progress for one in log if one.progress is not None]
                progress = known[-1] if known else None
                open_jobs.append({"job": job, "progress": progress, "log": log})
        reasons = {name for one in series for step in one.steps for name in step.excluded}
        return Overview(
            status=await service.status(),
            series=series,
            open_jobs=open_jobs,
            failed=jobs[-1] if jobs and jobs[-1].state == "failed" else None,
            clients=[
                {"address": address, "running": running, "idle_seconds": idle}
                for address, running, idle in service.slots.clients()
                if tenant_of(address) == service.tenant
            ],
            reasons={name: meaning(name) for name in sorted(reasons)},
        )


def overview_routes(router: APIRouter, service: Service) -> None:
    """Add the overview's facts, and the jobs'."""
    facts, shared = OverviewFacts(service), SharedAnswers()

    @router.get("/overview")
    async def overview() -> Response:
        """Return the overview."""
        return await shared.get("overview", facts.read)

    @router.get("/jobs")
    async def latest() -> Response:
        """Get the last jobs, newest first, and whether there are older ones."""

        async def read() -> dict[str, Any]:
            jobs = (await service.store.jobs.latest(_LISTED + 1))[::-1]
            return {"jobs": jobs[:_LISTED], "more": len(jobs) > _LISTED}

        return await shared.get("latest", read)

    @router.get("/jobs/{job_id}")
    async def one(job_id: str) -> Response:
        """Get one job, the last 200 lines of its log, and what its reasons mean.

        They are those of what was excluded, by ``calls.…`` or the node's own name of it.
        """

        async def read() -> dict[str, Any]:
            job = await service.store.jobs.get(job_id)
            names = set(job.result.excluded if job.result else ())
            for node in job.result.nodes.values() if job.result else ():
                names |= set(node.excluded)
            log = await service.store.jobs.last_events(job_id, 200)
            reasons = {name: meaning(name) for name in sorted(names)}
            return {"job": job, "log": log, "reasons": reasons}

        return await shared.get(f"job {job_id}", read)
