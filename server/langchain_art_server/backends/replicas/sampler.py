"""Several samplers as one: replicas of one model, each on GPUs, or on a machine, of its own.

A run's calls go to one replica (`sticky_runs`). A version is loaded by all that are live, and only
then routed to. One that dies or does not answer gets no calls; its calls without a first delta are
made again on another replica, with the same version. It gets calls again once it has been started
again and has loaded what it has missed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable
from langchain_art.wire import ReplicaStatus
from langchain_art_server.backends.base import (
    ChatDelta,
    ChatEngine,
    ChatReply,
    ChatRequest,
    ModelInfo,
    Sampler,
    SamplerState,
)
from langchain_art_server.backends.ipc.process_sampler import PoisonRequests
from langchain_art_server.backends.ipc.worker import WorkerDied
from langchain_art_server.backends.replicas.replica import Replica, WantedAdapter

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.1  # seconds between two looks at a replica's state
RETRY_SECONDS = 1.0  # seconds until what could not be started is waited for again
MAX_DEATHS = 2  # replicas that may die of one call, which fails with the next one


class ReplicatedSampler:
    """A `base.Sampler` over others, which may be in child processes or elsewhere."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._wanted: dict[str, WantedAdapter] = {}
        self._replicas = [Replica(n, one, self._wanted) for n, one in enumerate(samplers)]
        self._generations = itertools.count(1)
        self._runs, self._suspects = StickyRuns(), PoisonRequests()
        self._followers: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def info(self) -> ModelInfo:
        """The model, with the shortest context of all."""
        return min((one.info for one in self._replicas), key=lambda info: info.max_model_len)

    @property
    def restarts(self) -> int:
        """Restarts of all replicas together."""
        return sum(one.sampler.restarts for one in self._replicas)

    @property
    def problem(self) -> str | None:
        """None while one replica answers."""
        if self._live():
            return None
        why = "; ".join(f"{one.number}: {one.problem}" for one in self._replicas)
        return f"none of its replicas answers ({why})"

    @property
    def engines(self) -> Sequence[ChatEngine]:
        """The live replicas; their calls are not made again on another."""
        return self._live()

    @property
    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """See `Sampler.replicas`."""
        return tuple(one.status for one in self._replicas)

    async def start(self) -> None:
        """Start all at once. Raises ConfigError if one cannot be, or is not like the first."""
        starts = [one.sampler.start() for one in self._replicas]
        try:
            failed = [one for one in await asyncio.gather(*starts, return_exceptions=True) if one]
            if failed:
                raise failed[0]
            for one in self._replicas:
                self._check_same(one)
                await one.catch_up()
        except BaseException:
            await self.close()
            raise
        self._followers += [asyncio.create_task(self._follow(one)) for one in self._replicas]

    def _check_same(self, replica: Replica) -> None:
        expected, got = asdict(self.info), asdict(replica.info)
        for name, value in expected.items():
            if got[name] != value:
                raise ConfigError(
                    f"Replica {replica.number} has {name}={got[name]!r}, and replica 0 has "
                    f"{value!r}; expected the same. Is there a GPU for each of [sampler] replicas?"
                )

    async def close(self) -> None:
        """End all."""
        self._closing = True
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        await asyncio.gather(*(one.sampler.close() for one in self._replicas))

    async def ready(self) -> None:
        """Wait until one replica is live. Raises EngineUnavailable if none can be started."""
        while not self._live():
            failures = [one.failure for one in self._replicas if one.failure]
            if self._closing or len(failures) == len(self._replicas):
                why = failures[0] if failures else "The sampler is shut down."
                raise EngineUnavailable(f"No replica answers. {why}", retry_after=30)
            await asyncio.sleep(LOOK_SECONDS)

    async def _follow(self, replica: Replica) -> None:
        """Bring a replica up to date whenever it is behind, as long as the sampler runs."""
        was_live = True
        while True:
            if replica.is_behind and not replica.asleep:
                if was_live and not replica.live:
                    log.warning("Replica %d gets no calls: %s.", replica.number, replica.problem)
                was_live = replica.live
                try:
                    await replica.catch_up()
                    replica.failure = None
                except EngineUnavailable as error:
                    replica.failure = error
                    await asyncio.sleep(RETRY_SECONDS)
                except Exception as error:  # it would be behind for ever, and nobody be told
                    log.exception("Replica %d could not be brought up to date.", replica.number)
                    replica.failure = EngineUnavailable(f"It cannot load its adapters: {error}")
                    await asyncio.sleep(RETRY_SECONDS)
                if replica.live and not was_live:
                    log.warning("Replica %d gets calls again.", replica.number)
                    was_live = True
            await asyncio.sleep(LOOK_SECONDS)

    def _live(self) -> list[Replica]:
        return [one for one in self._replicas if one.live]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        """See `Sampler.chat`. Made again on another replica if one dies before the first delta."""
        suspected, deaths = bool(self._suspects) and self._suspects.check(request), 0
        while True:
            replica, begun = await self._replica_for(request), False
            try:
                async with aclosing(replica.chat(request)) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
                break
            except EngineUnavailable as error:
                deaths += 1
                if isinstance(error, WorkerDied):
                    self._suspects.add(request, (replica.number, replica.sampler.restarts))
                if begun or deaths > MAX_DEATHS or self._closing:
                    raise
                suspected = self._suspects.check(request)
                log.warning("A call of replica %d is made again: %s", replica.number, error)
        if suspected:
            self._suspects.answered(request)

    async def _replica_for(self, request: ChatRequest) -> Replica:
        """The replica for a call, once one is live that has its version."""
        while True:
            await self.ready()
            if found := self._that_answer(request.adapter):
                calls = {one.number: one.calls for one in found}
                return self._replicas[self._runs.choose(request.run, calls)]
            await asyncio.sleep(LOOK_SECONDS)

    def _that_answer(self, adapter: str | None) -> list[Replica]:
        """The live replicas that have an adapter; all if none will have it, and they say why."""
        live = self._live()
        if adapter is None or adapter not in self._wanted:
            return live
        return [one for one in live if one.has(adapter)] or (
            live if all(one.refuses(adapter) for one in live) else []
        )

    async def state(self) -> SamplerState | None:
        """The longest lag and the least free memory of those that answer; None: none does."""
        answered = await asyncio.gather(*(one.sampler.state() for one in self._live()))
        states = [state for state in answered if state is not None]
        if not states:
            return None
        known = [state.free_bytes for state in states if state.free_bytes is not None]
        lag = max(state.loop_lag for state in states)
        return SamplerState(
            lag,
            min(known, default=None),
            running=sum(state.running for state in states),
            waiting=sum(state.waiting for state in states),
        )

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        """Load an adapter in all live replicas; the others load it before they get calls again.

        Raises what one of them raises; then none has it.
        """
        old = self._wanted.get(name)
        generation = old.generation if old else next(self._generations)
        new = WantedAdapter(path.resolve(), generation, published=old is not None)
        self._wanted[name] = new
        try:
            await self._in_live(lambda one: one.load(name, probe=probe))
        except BaseException:
            if old is None:
                await self.unload_adapter(name)
            raise
        if self._wanted.get(name) is new:
            self._wanted[name] = replace(new, published=True)

    async def unload_adapter(self, name: str) -> None:
        """See `Sampler.unload_adapter`. Replicas that are not live do it when they catch up."""
        self._wanted.pop(name, None)
        await self._each([one for one in self._replicas if one.live], lambda one: one.unload(name))

    async def sleep(self) -> None:
        """Put all to sleep; one that is being started first starts.

        Raises the error of one that answers and does not sleep; then none sleeps.
        """
        slept = await asyncio.gather(
            *(one.sleep() for one in self._replicas), return_exceptions=True
        )
        errors = [
            error
            for one, error in zip(self._replicas, slept, strict=True)
            if error is not None and (one.live or not isinstance(error, EngineUnavailable))
        ]
        if errors or not any(one.asleep for one in self._replicas):
            await self.wake()
            raise next(error for error in (*errors, *slept) if error is not None)

    async def wake(self) -> None:
        """Wake all. One that died, or does not wake, is started again meanwhile."""
        await self._each(self._replicas, lambda one: one.wake())

    async def _in_live(self, do: Callable[[Replica], Awaitable[None]]) -> None:
        """Do it in each live replica, once there is one. Raises the first error but of death."""
        while True:
            await self.ready()
            errors = await self._each(live := self._live(), do)
            refused = [error for error in errors if not isinstance(error, EngineUnavailable)]
            if refused:
                raise refused[0]
            if len(errors) < len(live):
                return
            if errors and any(one.live for one in live):
                raise errors[0]

    async def _each(
        self, replicas: Sequence[Replica], do: Callable[[Replica], Awaitable[None]]
    ) -> list[ArtError]:
        """Do it in each, and wait for those that are live.

        Returns the errors; an EngineUnavailable for one that was not waited for.
        """
        tasks = {asyncio.ensure_future(do(replica)): replica for replica in replicas}
        open_tasks = set(tasks)
        try:
            while open_tasks:
                _, open_tasks = await asyncio.wait(open_tasks, timeout=LOOK_SECONDS)
                open_tasks = {task for task in open_tasks if tasks[task].live}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors: list[ArtError] = []
        for task, replica in tasks.items():
            if task.cancelled():
                errors.append(EngineUnavailable(f"Replica {replica.number} ended meanwhile."))
            elif error := task.exception():
                if not isinstance(error, ArtError):
                    raise error
                log.warning("Replica %d: %s", replica.number, error)
                errors.append(error)
        return errors


#: A run leaves its replica for the least loaded one when that has `n` open calls and its own has
#: more than `SPREAD_FACTOR` · n + `SPREAD_CALLS`.
SPREAD_FACTOR, SPREAD_CALLS = 2, 8
MOST_RUNS = 1 << 16  # runs whose replica is remembered: those that had a call last


class StickyRuns:
    """Remembers each run's replica, whose prefix cache holds the run's prompts.

    Replicas are numbers. A run that had to leave its replica stays with the new one.
    """

    def __init__(self, most_runs: int = MOST_RUNS) -> None:
        self._most_runs = most_runs
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._turns = itertools.count(1)
        self._last: Counter[int] = Counter()

    def choose(self, run: str, calls: Mapping[int, int]) -> int:
        """The replica for a call of `run` (``""``: of none); `calls` are the open ones of each.

        It is the run's, if it is among them and not far more loaded than the least loaded one; else
        the latter. Of equally loaded ones, that which was given a run longest ago.
        """
        home = self._homes.get(run) if run else None
        most = SPREAD_FACTOR * min(calls.values()) + SPREAD_CALLS
        if home is None or home not in calls or calls[home] > most:
            home = min(calls, key=lambda one: (calls[one], self._last[one]))
            self._last[home] = next(self._turns)
        if run:
            self._homes[run] = home
            self._homes.move_to_end(run)
            if len(self._homes) > self._most_runs:
                self._homes.popitem(last=False)
        return home
