"""`gather`: run every scenario several times and return the groups of trajectories."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_art._callables import run_sync
from langchain_art.call_seeds import RunSeed
from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import check_inputs
from langchain_art.rollout.group_stream import GroupStream
from langchain_art.rollout.run_source import RunSource
from langchain_art.rollout.runner import Rollout, RolloutWorker
from langchain_art.rollout.scenarios import check_scenarios, group_ids
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import scenario_id

if TYPE_CHECKING:
    from langchain_art.tracing.run import Run


@dataclass(frozen=True)
class GatherResult:
    """One group per scenario, in the scenarios' order."""

    groups: list[TrajectoryGroup]
    seconds: float
    retried: int
    """Rollouts repeated because the server was unavailable."""
    first_error: str | None

    @property
    def trajectories(self) -> list[Trajectory]:
        """All runs, failed ones included."""
        return [t for group in self.groups for t in group.trajectories]

    @property
    def rewards(self) -> list[float]:
        """The total return (`Trajectory.total_return`) of the runs that have one."""
        return [worth for t in self.trajectories if (worth := t.total_return) is not None]

    @property
    def failed(self) -> int:
        """Runs that raised."""
        return sum(t.status == "failed" for t in self.trajectories)


async def gather(
    rollout: Rollout,
    scenarios: Sequence[Any],
    *,
    group_size: int = 8,
    concurrency: int = 64,
    prefix: str | None = None,
    on_done: Callable[[Trajectory], None] | None = None,
    retries: int = 5,
    ready: Callable[[], Awaitable[object]] | None = None,
    max_failed: float = 0.5,
    on_run: Callable[[Run], None] | None = None,
    seed: int | None = None,
) -> GatherResult:
    """Run every scenario `group_size` times, at most `concurrency` runs at once.

    Args:
        rollout: see `Rollout`. A plain ``def`` runs in a thread and keeps its context variables.
        scenarios: anything; its id is ``scenario.id``, ``scenario["id"]`` or a stable hash of it.
            It becomes ``group.metadata["scenario"]`` if it is less than 64 kB of JSON.
        group_size: runs per scenario; those are one group.
        concurrency: most runs at once, threads included.
        prefix: of the group ids, ``prefix:scenario-id``. None: one that is used once.
        on_done: called after each run, in the event loop.
        retries: how often one run is repeated because the server was unavailable.
        ready: awaited before a repeated run, after a pause that grows from 0.5 s to 10 s.
        max_failed: fraction of the runs that may raise.
        on_run: called with what was recorded of each run, in the event loop (`RolloutWorker`).
        seed: of the model calls' sampling and of ``run.rng``, with the scenario's place and the
            run's number (`langchain_art.call_seeds`); None: drawn anew each time, but
            in a run that has seeds from those.

    Raises:
        RolloutFailed: more of them raised; the message has the first error.
        ServerUnreachable: raised by `ready`.
        ConfigError: `rollout` is not a `Rollout` or returned something that a `Rollout` may not,
            `scenarios` are a text, or one is not an input for the graph.
    """
    if group_size < 1 or concurrency < 1:
        raise ConfigError(f"got {group_size=} and {concurrency=}, expected both to be at least 1")
    check_scenarios(scenarios, "scenarios")
    check_inputs(rollout, scenarios)
    worker = RolloutWorker(
        rollout,
        concurrency,
        on_done=on_done,
        retries=retries,
        ready=ready,
        max_failed=max_failed,
        on_run=on_run,
    )
    return await gather_from(worker, scenarios, group_size=group_size, prefix=prefix, seed=seed)


async def gather_from(
    worker: RunSource,
    scenarios: Sequence[Any],
    *,
    group_size: int,
    prefix: str | None = None,
    seed: int | None = None,
) -> GatherResult:
    """Do as `gather`, with runs of `worker`, which is closed then."""
    started = time.monotonic()
    names = list(group_ids(prefix or uuid.uuid4().hex, map(scenario_id, scenarios)))
    async with GroupStream(
        worker,
        scenarios.__getitem__,
        lambda n, _: names[n],
        group_size,
        None if seed is None else partial(RunSeed, seed, "scenario"),
    ) as stream:
        stream.allow(len(scenarios))
        groups = await stream.take(len(scenarios))
    return GatherResult(groups, time.monotonic() - started, worker.retried, worker.first_error)


def gather_sync(rollout: Rollout, scenarios: Sequence[Any], **options: Any) -> GatherResult:
    """`gather` for programs without an event loop."""
    return run_sync(gather(rollout, scenarios, **options), "gather")
