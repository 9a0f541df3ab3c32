"""`gather`: run every scenario several times and return the groups of trajectories.

Under it are asynchronous rollouts (`GroupStream`): groups in the order in which they end, while
others still run. The caller bounds staleness: rollouts start only as far ahead of training as
`GroupStream.allow` permits (the admission rule of AReaL, arXiv 2505.24298, section 5.1).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from pydantic import ValidationError

from langchain_art._callables import run_sync
from langchain_art.call_seeds import RunSeed, run_seed
from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import check_inputs
from langchain_art.rollout.runner import Rollout, RolloutWorker, RunSource
from langchain_art.rollout.scenarios import check_count, check_scenarios, group_ids, portable
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import scenario_id


@dataclass
class GroupStream:
    """Runs scenarios group after group, as far as allowed, and returns groups as they end."""

    worker: RunSource
    """Closed at the end. Its `max_failed` is of each allowance."""
    scenario: Callable[[int], Any]
    """The scenario of the n-th group, from 0."""
    name: Callable[[int, str], str]
    """The id of that group, by n and the scenario's id."""
    group_size: int
    seed: Callable[[int, int], RunSeed] | None = None
    """The seed of a run, by n and the run's number in its group; None: from the run around, if
    that has seeds."""

    def __post_init__(self) -> None:
        if self.seed is None and (around := run_seed.get()) is not None:
            self.seed = around.within()
        self._places: deque[tuple[int, int]] = deque()
        self._runs: dict[int, list[Trajectory | None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ended: deque[tuple[int, TrajectoryGroup]] = deque()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self.allowed = 0
        """Groups that were allowed to start so far."""

    async def __aenter__(self) -> GroupStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._places.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.worker.close()

    def allow(self, groups: int) -> None:
        """Let this many more groups start."""
        if groups <= 0:
            return
        self.worker.expect(groups * self.group_size)
        for index in range(self.allowed, self.allowed + groups):
            self._runs[index] = [None] * self.group_size
            self._places.extend((index, member) for member in range(self.group_size))
        self.allowed += groups
        self._fill()

    async def take(self, groups: int) -> list[TrajectoryGroup]:
        """The next groups that end, by n. Raises RolloutFailed (see `RolloutWorker.expect`)."""
        if groups > len(self._ended) + len(self._runs):
            raise RuntimeError(f"asked for {groups} groups, {len(self._runs)} are under way")
        while len(self._ended) < groups and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        ended = sorted((self._ended.popleft() for _ in range(groups)), key=itemgetter(0))
        return [group for _, group in ended]

    def _fill(self) -> None:
        while self._places and len(self._running) < self.worker.concurrency:
            # One task per run, so that context variables set in a run end with it.
            task = asyncio.create_task(self._run(*self._places.popleft()))
            self._running.add(task)
            task.add_done_callback(self._finished)

    async def _run(self, index: int, member: int) -> None:
        scenario = self.scenario(index)
        name = scenario_id(scenario)
        if self.seed is not None:
            run_seed.set(self.seed(index, member))
        runs = self._runs[index]
        runs[member] = await self.worker.run(scenario, name)
        whole = [run for run in runs if run is not None]
        if len(whole) == self.group_size:
            del self._runs[index]
            id_, about = self.name(index, name), portable(scenario)
            try:
                group = TrajectoryGroup(id=id_, trajectories=tuple(whole), metadata=about)
            except ValidationError as error:
                raise ConfigError(f"The runs of group {id_!r} make no group: {error}") from error
            self._ended.append((index, group))

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._error = self._error or error
            self._places.clear()
        self._fill()
        self._changed.set()


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
        return [reward for group in self.groups for reward in group.rewards]

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
    on_done: Callable[[Trajectory], None] | None = None,
    max_failed: float = 0.5,
    seed: int | None = None,
) -> GatherResult:
    """Run every scenario `group_size` times, at most `concurrency` runs at once.

    Args:
        rollout: see `Rollout`. A plain ``def`` runs in a thread and keeps its context variables.
        scenarios: anything; its id is ``scenario.id``, ``scenario["id"]`` or a stable hash of it.
            It becomes ``group.metadata["scenario"]`` if it is less than 64 kB of JSON, else
            ``"scenario_left_out"`` says why not.
        group_size: runs per scenario; those are one group.
        concurrency: most runs at once, threads included.
        on_done: called after each run, in the event loop.
        max_failed: fraction of the runs that may raise.
        seed: of the model calls' sampling and of ``run.rng``, with the scenario's place and the
            run's number (`langchain_art.call_seeds`); None: drawn anew each time, but
            in a run that has seeds from those.

    Raises:
        RolloutFailed: more of them raised; the message has the first error.
        ConfigError: `rollout` is not a `Rollout` or returned something that a `Rollout` may not,
            `scenarios` are a text, one is not an input for the graph, or a number is no integer.
    """
    group_size = check_count(group_size, "group_size", 1)
    concurrency = check_count(concurrency, "concurrency", 1)
    seed = None if seed is None else check_count(seed, "seed")
    check_scenarios(scenarios, "scenarios")
    check_inputs(rollout, scenarios)
    worker = RolloutWorker(rollout, concurrency, on_done=on_done, max_failed=max_failed)
    return await gather_from(worker, scenarios, group_size=group_size, seed=seed)


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
