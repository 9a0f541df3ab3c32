"""A sampler in a child process: the server's end, the same for every engine.

Needs no torch. After a restart of the child, the adapters that were loaded are loaded again before
waiting calls are sent. A chat call that was running when the child died is never sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from pydantic_core import to_json

from langchain_art.errors import ConfigError, Damaged, EngineUnavailable, InvalidRequest
from langchain_art.wire import ReplicaStatus
from langchain_art_server.backends.base import (
    ChatDelta,
    ChatEngine,
    ChatReply,
    ChatRequest,
    ModelInfo,
    SamplerState,
)
from langchain_art_server.backends.ipc.chat_codec import unpack_reply
from langchain_art_server.backends.ipc.child_process import EnginePlace
from langchain_art_server.backends.ipc.worker import Worker, WorkerDied
from langchain_art_server.backends.models.adapter_files import (
    SAMPLED_FILES,
    Identity,
    check_files,
    check_sampled,
    identity,
)
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
_STATE_SECONDS = 2.0  # an engine that does not answer for so long is silent
MAX_DEATHS = 2  # deaths of which a request is the only one left, from which on it is refused
#: Seconds for which a death is remembered: engines also die for reasons of their own.
_REMEMBERED = 600.0
_MAX_KNOWN = 64  # most deaths that are remembered


class PoisonRequests:
    """The requests of one sampler that were running at a death of its process, by digest."""

    def __init__(self) -> None:
        #: When each death was, and the requests of which it may be.
        self._deaths: OrderedDict[Hashable, tuple[float, set[bytes]]] = OrderedDict()

    def __bool__(self) -> bool:
        """True while any death is remembered; otherwise nothing has to be asked."""
        while self._deaths:
            number, (at, _) = next(iter(self._deaths.items()))
            if time.monotonic() - at <= _REMEMBERED:
                return True
            del self._deaths[number]
        return False

    def add(self, request: ChatRequest, death: Hashable) -> None:
        """Remember that a request was running at a death; `death` numbers the engine's deaths."""
        _, running = self._deaths.setdefault(death, (time.monotonic(), set()))
        running.add(_digest(request))  # the choices of one request die together
        if len(self._deaths) > _MAX_KNOWN:
            self._deaths.popitem(last=False)

    def check(self, request: ChatRequest) -> bool:
        """True if a request was running at a death.

        Raises InvalidRequest: it is the only one left of too many; says so, and what to do.
        """
        key = _digest(request)
        alone = sum(running == {key} for _, running in self._deaths.values())
        if alone >= MAX_DEATHS:
            log.error("The request %s is refused: %d deaths of the engine.", key.hex(), alone)
            raise InvalidRequest(
                f"The engine's process ended {alone} times while it had this very request, which "
                f"is refused for {_REMEMBERED / 60:.0f} minutes so that it cannot end it again. "
                "Change the request; if it is an ordinary one, report it with the server's log."
            )
        return any(key in running for _, running in self._deaths.values())

    def answered(self, request: ChatRequest) -> None:
        """Clear a request, which the engine has survived."""
        key = _digest(request)
        for number, (_, running) in list(self._deaths.items()):
            running.discard(key)
            if not running:
                del self._deaths[number]


def _digest(request: ChatRequest) -> bytes:
    """Digest of what the client sent: a retry has another id, and may get a newer version."""
    same = vars(request) | {"id": None, "adapter": None, "client": None, "run": None}
    return blake2b(to_json(same, inf_nan_mode="constants"), digest_size=16).digest()


class ProcessSampler(Worker):
    """A `base.Sampler` over a child process."""

    target: ClassVar[str]  # entry point of the child process, as ``module:function``
    imports: ClassVar[tuple[str, ...]] = ()  # see `Worker`

    @staticmethod
    def gpus(settings: Settings) -> int:
        """Number of GPUs that one takes to itself. Raises ConfigError if the settings say none."""
        return 0

    def __init__(
        self,
        settings: Settings,
        replica: int | None = None,
        place: EnginePlace | None = None,
        *,
        config: Mapping[str, Any] = {},
        env: Mapping[str, str] = {},
    ) -> None:
        """`config` is for the child beside the settings, `env` beside the variables set here.

        `replica` is which of several it is, from 0; None: the only one. `place` is where it runs;
        None: on this machine.
        """
        untold = {"api_key", "host", "database_url", "fleet"}
        told = settings.model_dump(mode="json", exclude=untold)
        super().__init__(
            self.target,
            {**told, **config},
            self._restore,
            hang_seconds=settings.sampler.hang_seconds,
            env={"TOKENIZERS_PARALLELISM": "false", **env},
            imports=self.imports,
            place=place,
        )
        self.engines: Sequence[ChatEngine] = (self,)
        self.replicas: tuple[ReplicaStatus, ...] = ()
        self._suspects = PoisonRequests()
        self._info: ModelInfo | None = None
        self._adapters: dict[str, tuple[Path, Identity]] = {}
        # Adapters that a restart did not load again, because the disk had changed them.
        self._damaged: dict[str, Path] = {}

    @property
    def info(self) -> ModelInfo:
        """The model as the engine loaded it. Raises EngineUnavailable before `start`."""
        if self._info is None:
            raise EngineUnavailable("The sampler is not started yet.", retry_after=2)
        return self._info

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        """See `Sampler.chat`."""
        if self._damaged and request.adapter in self._damaged:
            await self._load_restored(request.adapter)
        suspected = bool(self._suspects) and self._suspects.check(request)
        try:
            if not request.stream:
                yield unpack_reply(await self.call("chat", vars(request), resend=False))
            else:
                replies = self.stream("chat", vars(request), resend=False)
                async with contextlib.aclosing(replies):
                    async for kind, payload in replies:
                        yield ChatDelta(**payload) if kind == "event" else unpack_reply(payload)
        except WorkerDied:
            self._suspects.add(request, self.restarts)
            raise
        if suspected:
            self._suspects.answered(request)

    async def ready(self) -> None:
        """See `Sampler.ready`."""
        await self.call("state", {})

    async def state(self) -> SamplerState | None:
        """See `Sampler.state`. Waits at most `_STATE_SECONDS` for the answer."""
        if not self.up.is_set():
            return None
        try:
            async with asyncio.timeout(_STATE_SECONDS):
                return SamplerState(**await self.call("state", {}, resend=False))
        except (TimeoutError, EngineUnavailable):
            return None

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        """See `Sampler.load_adapter`."""
        path, files = path.resolve(), await asyncio.to_thread(identity, path)
        if name not in self._adapters or self._adapters[name][1] != files:
            place = self.place
            async with place.folder(path, SAMPLED_FILES) as there:
                params = {"name": name, "path": str(there), "probe": probe}
                # Started again elsewhere, it would look for the files in vain.
                await self.call("load_adapter", params, resend=place.same_disk)
        self._adapters[name] = path, files
        self._damaged.pop(name, None)

    async def unload_adapter(self, name: str) -> None:
        """See `Sampler.unload_adapter`."""
        self._adapters.pop(name, None)
        self._damaged.pop(name, None)
        await self.call("unload_adapter", {"name": name})

    async def sleep(self) -> None:
        """Do nothing: the engine keeps its memory, if it does not say otherwise."""

    async def wake(self) -> None:
        """See `sleep`."""

    async def _restore(self, info: dict[str, Any]) -> None:
        self._info = ModelInfo(**info)
        for name in list(self._adapters):
            await self._reload(name)

    async def _load_restored(self, name: str) -> None:
        """Load an adapter that was damaged, if it was put back. Raises Damaged."""
        path = self._damaged[name]
        try:
            await asyncio.to_thread(check_files, path, SAMPLED_FILES)
        except Damaged as error:
            raise Damaged(f"{error} Put it back from a backup, or roll back.") from error
        await self.load_adapter(name, path)

    async def _reload(self, name: str) -> None:
        while (adapter := self._adapters.get(name)) is not None:
            try:
                await check_sampled(adapter[0])
                async with self.place.folder(adapter[0], SAMPLED_FILES) as there:
                    params = {"name": name, "path": str(there), "probe": True}
                    await self.call("load_adapter", params, early=True)
            except (ConfigError, Damaged) as error:
                if self._adapters.get(name) == adapter:  # otherwise its files were moved: try again
                    # Its calls get Damaged or UnknownModel; other adapters and the base go on.
                    if isinstance(error, Damaged):
                        self._damaged[name] = adapter[0]
                    log.exception("The adapter %s could not be loaded again.", name)
                    del self._adapters[name]
            else:
                return
