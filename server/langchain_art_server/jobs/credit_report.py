"""Credit that a job gave to a run's calls: the advantage of each, or why it is excluded.

Nothing of it is stored. It is computed again, by the functions that the job called, from the
rewards that were stored with the job; and it is refused unless it comes to the job's own figures.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from langchain_art.credit.candidates import CallDecision
from langchain_art.errors import Conflict, NotFound
from langchain_art.wire import TrainConfig, TrainJob
from langchain_art_server.jobs.batch_builder import Batch, RunsGone, read_group
from langchain_art_server.storage.store import Store

#: Jobs whose decisions are kept: a reader looks at one after the other run of a step.
_KEPT = 8


class CallCredit(BaseModel):
    """Credit that one job gave to one call."""

    advantage: float
    """Advantage of each sampled token, or their mean if they have several; 0 if it is excluded."""
    token_advantages: list[float] | None
    """Advantages of the sampled tokens, where they were given one by one; else None."""
    weight: float
    """Weight of each sampled token in the loss."""
    excluded_because: str | None
    """Reason as in `TrainResult.excluded`; None: it was trained."""


class RunCredit(BaseModel):
    """Credit that one job gave to the calls of one run."""

    job: str
    policy: str
    step: int | None
    """The version that the job made."""
    reward: float | None
    """The run's reward with which the job trained."""
    given: bool
    """True if its advantages came with the job (`TrainRequest.advantages`)."""
    teacher: str | None
    """Teacher that scored its tokens as well (`TrainConfig.distillation`); the advantages are those
    by rewards."""
    turns: list[CallCredit]


class CreditReader:
    """Computes the decisions of jobs that have ended, one job at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._known: OrderedDict[str, Mapping[str, Sequence[CallDecision]]] = OrderedDict()

    async def of_run(self, trajectory_id: str, job_id: str) -> RunCredit:
        """Read the credit that a job gave to the calls of a run.

        Raises:
            NotFound: there is no such job, or the run is in none of its groups.
            Conflict: the job has not succeeded, or is no step by rewards; or its runs changed
                since, so that what it gave cannot be computed any more.
        """
        job = await self._store.jobs.get(job_id)
        request, scored, step = await self._store.jobs.payload(job_id)
        if job.state != "succeeded" or not isinstance(request.config, TrainConfig):
            raise Conflict(
                f"Job {job_id} gave no advantages: it is {job.state}, with a "
                f"{type(request.config).__name__}; expected one that succeeded with a TrainConfig."
            )
        if trajectory_id not in scored:
            raise NotFound(f"Job {job_id} had no trajectory {trajectory_id!r}.")
        async with self._turn:
            if job_id not in self._known:
                self._known[job_id] = await self._decisions(job)
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            found = self._known[job_id].get(trajectory_id, ())
        return RunCredit(
            job=job_id,
            policy=job.policy,
            step=step,
            reward=scored[trajectory_id].reward,
            given=request.advantages is not None,
            teacher=teacher.teacher if (teacher := request.config.distillation) else None,
            turns=[
                CallCredit(
                    advantage=one.mean,
                    token_advantages=list(given) if isinstance(given, Sequence) else None,
                    weight=one.weight,
                    excluded_because=one.excluded_because,
                )
                for one in found
                for given in [one.advantage]
            ],
        )

    async def _decisions(self, job: TrainJob) -> Mapping[str, Sequence[CallDecision]]:
        request, scored, _ = await self._store.jobs.payload(job.id)
        parents = await self._store.jobs.parents(request.policy)
        batch = Batch(request, job.base_version or 0, parents)
        try:
            for ids in request.groups:
                group = await read_group(self._store, job, request, scored, ids, batch.lineage)
                batch.add_group(group.runs, group.records, group.trained)
                if group.trained_before:
                    batch.excluded["runs.already_trained"] += group.trained_before
        except RunsGone as gone:
            raise _changed(job, str(gone)) from gone
        await asyncio.to_thread(batch.settle)
        its = job.result.metrics if job.result else {}
        if other := [name for name, value in batch.metrics.items() if its.get(name) != value]:
            name = other[0]
            raise _changed(job, f"{name} is {batch.metrics[name]:g}, and was {its.get(name)}")
        return batch.decided


def _changed(job: TrainJob, why: str) -> Conflict:
    return Conflict(
        f"What job {job.id} gave to each call cannot be computed any more, because its runs or "
        f"their calls changed since: {why}"
    )
