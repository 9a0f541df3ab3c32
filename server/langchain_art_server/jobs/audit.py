"""The audit of one run: which of its tokens are trained, why the others are not; their credit.

It calls the functions that a training job calls (`check_eligibility`, `rows_of`), so its answer is
what a job would do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from langchain_art.credit.candidates import CallDecision
from langchain_art.errors import Conflict, InvalidRequest, NotFound
from langchain_art.wire import TrainConfig, TrainJob, TrajectoryAudit, TurnAudit
from langchain_art_server.algorithms.sequences.prefix_tree import PrefixTree
from langchain_art_server.jobs.batch_builder import Batch, RunsGone, rows_of
from langchain_art_server.jobs.eligibility import CallEligibility, check_eligibility
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import CallRecord, StoredRun


def chosen_calls(pairs: Sequence[str]) -> dict[str, bool]:
    """`TrainRequest.trainable` from a query: ``["writer:true", "critic:false"]``.

    Raises InvalidRequest: a pair is malformed, or a name is chosen and not chosen.
    """
    trainable: dict[str, bool] = {}
    for pair in pairs:
        name, _, choice = pair.rpartition(":")
        if not name or choice not in ("true", "false"):
            raise InvalidRequest(
                f"got trainable={pair!r}, expected NAME:true or NAME:false, once per name",
                param="trainable",
            )
        if trainable.setdefault(name, choice == "true") != (choice == "true"):
            raise InvalidRequest(
                f"got trainable={name}:true and trainable={name}:false, expected one of them",
                param="trainable",
            )
    return trainable


def audit(
    stored: StoredRun,
    records: Mapping[str, CallRecord],
    policy: str | None,
    trainable: Mapping[str, bool],
    *,
    imitates: bool = False,
    trained: Collection[str] = (),
) -> TrajectoryAudit:
    """Audit a run; the arguments are those of `check_eligibility`.

    For a supervised step, the run and the records are those of `sft_records`.

    Raises InvalidRequest: a record is invalid; training raises the same error.
    """
    run = stored.trajectory
    judged = check_eligibility(run, records, policy, trainable, imitates=imitates, trained=trained)
    learners: defaultdict[str | None, list[CallEligibility]] = defaultdict(list)
    for one in judged:
        learners[policy if imitates else one.policy].append(one)
    tree = PrefixTree()
    return TrajectoryAudit(
        trajectory=run.id,
        status=run.status,
        reward=run.total_return,
        turns=tuple(_turn(index, one, tree) for index, one in enumerate(judged)),
        rows=sum(len(rows_of(turns)) for turns in learners.values()),
        trained_by=stored.trained_by,
    )


def _turn(index: int, judged: CallEligibility, tree: PrefixTree) -> TurnAudit:
    """The audit of turn `index`; `tree` holds those before it."""
    turn, record = judged.turn, judged.record
    known: dict[str, Any] = {"prefix": None, "prefix_turn": None, "prefix_tokens": 0}
    if record is not None:
        prompt, sampled = len(record.prompt_token_ids), len(record.token_ids)
        found = tree.meet(record.prompt_token_ids)
        known["prefix_tokens"] = found.shared
        if not found.shared:
            known["prefix"] = "starts"
        elif found.ends:
            known |= {"prefix": "extends", "prefix_turn": found.ends[-1]}
        else:
            known |= {"prefix": "forks", "prefix_turn": found.passes}
        tree.add(index, [*record.prompt_token_ids, *record.token_ids])
    else:
        usage = turn.usage
        prompt, sampled = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return TurnAudit(
        call_id=turn.call_id,
        node=turn.node,
        path=turn.path,
        model=record.model if record else turn.model,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        trained_tokens=sampled if judged.excluded_because is None else 0,
        excluded_because=judged.excluded_because,
        **known,
    )


#: Jobs whose decisions are kept: a reader looks at one after the other run of a step.
_KEPT = 8


class CallCredit(BaseModel):
    """Credit that one job gave to one call."""

    advantage: float
    """Advantage of each sampled token, or their mean if they have several; 0 if it is excluded."""
    token_advantages: list[float] | None
    """Advantages of the sampled tokens, where they were given one by one; else None."""
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
    teacher: str | None
    """Teacher that scored its tokens as well (`TrainConfig.distillation`); the advantages are those
    by rewards."""
    turns: list[CallCredit]


class CreditReader:
    """Computes the decisions of jobs that have ended, one job at a time.

    Nothing of them is stored. They are computed again, by the functions that the job called, from
    the rewards that were stored with the job, and refused unless they come to its own figures.
    """

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
            teacher=teacher.teacher if (teacher := request.config.distillation) else None,
            turns=[
                CallCredit(
                    advantage=one.mean,
                    token_advantages=list(given) if isinstance(given, Sequence) else None,
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
                batch.add_group(*await batch.read_group(self._store, scored, ids))
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
