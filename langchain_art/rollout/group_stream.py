"""Asynchronous rollouts: groups in the order in which they end, while others still run.

The caller bounds staleness: rollouts start only as far ahead of training as `GroupStream.allow`
permits (the admission rule of AReaL, arXiv 2505.24298, section 5.1).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from pydantic import ValidationError

from langchain_art.call_seeds import RunSeed, run_seed
from langchain_art.errors import ConfigError
from langchain_art.rollout.run_source import RunSource
from langchain_art.rollout.scenarios import portable
from langchain_art.wire import Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import scenario_id


@dataclass
class GroupStream:
    """Runs scenarios group after group, as far as allowed, and returns groups as they end.

    Example::

        async with GroupStream(worker, scenarios.__getitem__, names, 8) as stream:
            stream.allow(32)
            first = await stream.take(16)   # sixteen groups, those that ended first
    """

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
