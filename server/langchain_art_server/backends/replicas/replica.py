"""One of several samplers: what it has loaded, what it has missed, and whether it gets calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from langchain_art.errors import ConfigError, Damaged, EngineUnavailable
from langchain_art.wire import ReplicaStatus
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, ModelInfo, Sampler
from langchain_art_server.backends.models.adapter_files import check_sampled

log = logging.getLogger(__name__)
#: Seconds after which an adapter that a replica refused when it caught up is tried again.
REFUSED_SECONDS = 30.0


@dataclass(frozen=True)
class WantedAdapter:
    """An adapter that all replicas are to have.

    A name that is unloaded and loaded again is of another `generation`; a path may change.
    `published` is False while the live ones are loading it.
    """

    path: Path
    generation: int
    published: bool


class Replica:
    """A sampler among others. It is live if it answers and has caught up since its last restart.

    `wanted` are the adapters that all of them are to have, by name; it is shared, and changes.
    """

    def __init__(self, number: int, sampler: Sampler, wanted: Mapping[str, WantedAdapter]) -> None:
        self.number, self.sampler, self._wanted = number, sampler, wanted
        self.calls = 0  # calls that it is answering
        #: Reason for which its last start failed; None: it did not, or there was none.
        self.failure: EngineUnavailable | None = None
        self.asleep = False
        self._caught_up_at = -1  # its restarts then
        # What its engine may have loaded, and what it has for certain.
        self._held: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._refused: dict[str, tuple[int, float]] = {}
        self._lock = asyncio.Lock()

    @property
    def info(self) -> ModelInfo:
        """See `ChatEngine.info`."""
        return self.sampler.info

    @property
    def problem(self) -> str | None:
        """Reason why it gets no calls now; None: it does."""
        if (problem := self.sampler.problem) is not None:
            return problem
        if self._caught_up_at != self.sampler.restarts:
            return "it loads the versions that it has missed"
        return None

    @property
    def live(self) -> bool:
        """True if it gets calls."""
        return self.problem is None

    @property
    def missing(self) -> list[str]:
        """Names of the adapters that it is to have and has not."""
        return [name for name in self._wanted if not self.has(name)]

    @property
    def status(self) -> ReplicaStatus:
        """Status for ``/status``."""
        return ReplicaStatus(
            name=str(self.number),
            problem=self.problem,
            running_calls=self.calls,
            restarts=self.sampler.restarts,
            missing=len(self.missing),
        )

    def has(self, name: str) -> bool:
        """True if it has loaded the adapter of this name that is wanted."""
        wanted = self._wanted.get(name)
        if wanted is None or name not in self._loaded:
            return False
        return self._held.get(name) == wanted.generation

    def refuses(self, name: str) -> bool:
        """True if it could not load the adapter when it caught up, and is not to try yet again."""
        generation, at = self._refused.get(name, (-1, 0.0))
        wanted = self._wanted.get(name)
        known = wanted is not None and wanted.generation == generation
        return known and time.monotonic() - at < REFUSED_SECONDS

    @property
    def is_behind(self) -> bool:
        """True if `catch_up` has something to do."""
        due = any(self._wanted[name].published for name in self._due())
        return due or not self.live or bool(self._outdated())

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        """See `Sampler.chat`. Raises EngineUnavailable if it is not live."""
        if (problem := self.problem) is not None:
            raise EngineUnavailable(f"Replica {self.number}: {problem}.", retry_after=2)
        self.calls += 1
        try:
            async with aclosing(self.sampler.chat(request)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.calls -= 1

    async def load(self, name: str, *, probe: bool) -> None:
        """Load the adapter of this name that is wanted. Raises what the sampler raises."""
        async with self._lock:
            if wanted := self._wanted.get(name):  # otherwise it was unloaded meanwhile
                await self._load(name, wanted, probe)

    async def unload(self, name: str) -> None:
        """Unload what it has of this name."""
        async with self._lock:
            await self._unload(name)

    async def sleep(self) -> None:
        """See `Sampler.sleep`."""
        async with self._lock:
            await self.sampler.sleep()
            self.asleep = True

    async def wake(self) -> None:
        """See `Sampler.wake`."""
        self.asleep = False
        await self.sampler.wake()

    async def catch_up(self) -> None:
        """Wait until it answers, and load what it has missed: it is live then.

        Raises EngineUnavailable: it cannot be started, or died meanwhile.
        """
        await self.sampler.ready()
        async with self._lock:
            if self.asleep:
                return
            restarts = self.sampler.restarts
            if restarts != self._caught_up_at:
                self._loaded.clear()  # as far as it has them, to load them again takes no time
                self._refused.clear()
            while (outdated := self._outdated()) + (due := self._due()):
                for name in outdated:
                    await self._unload(name)
                for name in due:
                    await self._load_missed(name)
            if self.sampler.restarts == restarts:
                self._caught_up_at = restarts

    def _outdated(self) -> list[str]:
        """Names that it may have loaded and that are not wanted, or are of other files now."""
        wanted = self._wanted
        return [n for n, g in self._held.items() if n not in wanted or wanted[n].generation != g]

    def _due(self) -> list[str]:
        return [name for name in self.missing if not self.refuses(name)]

    async def _load_missed(self, name: str) -> None:
        """Load an adapter after its publication: its files are checked, and its effect."""
        if (wanted := self._wanted.get(name)) is None:
            return
        try:
            await check_sampled(wanted.path)
            await self._load(name, wanted, probe=True)
        except (ConfigError, Damaged):
            now = self._wanted.get(name)
            if now is not None and now.path == wanted.path:  # otherwise it was moved: try again
                log.exception("Replica %d could not load %s, as the others had.", self.number, name)
                self._refused[name] = wanted.generation, time.monotonic()

    async def _load(self, name: str, wanted: WantedAdapter, probe: bool) -> None:
        if self._held.get(name, wanted.generation) != wanted.generation:
            await self._unload(name)
        self._held[name] = wanted.generation
        await self.sampler.load_adapter(name, wanted.path, probe=probe)
        self._loaded.add(name)
        self._refused.pop(name, None)

    async def _unload(self, name: str) -> None:
        self._loaded.discard(name)
        await self.sampler.unload_adapter(name)
        self._held.pop(name, None)
