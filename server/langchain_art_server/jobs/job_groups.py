"""The runs of a job's groups, as the job trains on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from langchain_art.errors import Damaged
from langchain_art.wire import TrainConfig, TrainJob, TrainRequest, Trajectory
from langchain_art_server.storage.reward_snapshot import RewardSnapshot
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import CallRecord


class RunsGone(Damaged):
    """Runs of a job are not stored any more."""


@dataclass(frozen=True)
class JobGroup:
    """One group of a job: the arguments of `Batch.add_group`, and what is not among them."""

    runs: list[Trajectory]
    records: dict[str, CallRecord]
    trained: Collection[str]
    """Calls that other jobs of the lineage trained."""
    trained_before: int
    """Runs that are left out because another job of the lineage trained this policy on them."""


async def read_group(
    store: Store,
    job: TrainJob,
    request: TrainRequest,
    scored: Mapping[str, RewardSnapshot],
    ids: Sequence[str],
    lineage: Collection[int],
) -> JobGroup:
    """The runs of one group, before the job or after it, with the rewards stored with the job.

    `lineage` are the versions that the job's base descends from, and itself: what was trained on
    the way to another version, which a rollback discarded, may be trained.

    Raises:
        RunsGone: one is not stored any more.
    """
    known = await store.trajectories(ids)
    if lost := [one for one in ids if one not in known]:
        raise RunsGone(f"The trajectories {lost[:5]} are not in the database any more.")
    once = isinstance(request.config, TrainConfig) and not request.retrain
    marked = await store.jobs.trained_runs(ids, job.policy, lineage) if once else {}
    fresh = [one for one in ids if one not in marked]
    runs = [scored[one].on(known[one].trajectory) for one in fresh]
    wanted = [turn.call_id for run in runs for turn in run.turns if turn.call_id]
    records = await store.calls(wanted)
    trained = await store.jobs.trained_calls(wanted, job.policy, lineage) if once else {}
    return JobGroup(runs, records, trained.keys(), len(ids) - len(fresh))
