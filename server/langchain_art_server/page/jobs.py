"""Jobs' view: the last jobs, with what each node learned from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from langchain_art import wire
from langchain_art.wire.training import meaning
from langchain_art_server.gateway.service import Service
from langchain_art_server.page.answers import SharedAnswers
from langchain_art_server.storage.pages import MAX_PAGE


class LatestJobs(BaseModel):
    """The answer of ``GET /page/jobs``."""

    jobs: list[wire.TrainJob]
    """Newest first."""
    more: bool
    """True if there are older ones."""


class OneJob(BaseModel):
    """The answer of ``GET /page/jobs/{job_id}``."""

    job: wire.TrainJob
    log: list[wire.JobEvent]
    """Last 200 lines."""
    reasons: dict[str, str]
    """Meaning of each reason of what was excluded, by ``calls.…`` or the node's own name of it."""


def job_routes(router: APIRouter, service: Service) -> None:
    """Add the jobs' facts."""
    shared = SharedAnswers()

    @router.get("/jobs", response_model=LatestJobs)
    async def latest(limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 200) -> Response:
        """The last jobs."""

        async def read() -> LatestJobs:
            jobs = (await service.store.jobs.latest(limit + 1))[::-1]
            return LatestJobs(jobs=jobs[:limit], more=len(jobs) > limit)

        return await shared.get(f"latest {limit}", read)

    @router.get("/jobs/{job_id}", response_model=OneJob)
    async def one(job_id: str) -> Response:
        """One job, its log, and what its reasons mean."""
        return await shared.get(f"job {job_id}", lambda: _one(service, job_id))


async def _one(service: Service, job_id: str) -> OneJob:
    job = await service.store.jobs.get(job_id)
    names = set(job.result.excluded if job.result else ())
    for node in job.result.nodes.values() if job.result else ():
        names |= set(node.excluded)
    log = await service.store.jobs.last_events(job_id, 200)
    return OneJob(job=job, log=log, reasons={name: meaning(name) for name in sorted(names)})
