"""A sampler that is a value, with the promises of `ProcessSampler`; it dies when told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_art.errors import ConfigError, EngineUnavailable, UnknownModel
from langchain_art_server.backends.base import (
    ChatDelta,
    ChatReply,
    ChatRequest,
    ModelInfo,
    SamplerState,
)
from langchain_art_server.backends.ipc.worker import WorkerDied

INFO = ModelInfo("m", "m", 1, "cpu", "float32", 64, 16, 8)


class ToldSampler:
    """Answers a call when it is told to, with its own number and what it loaded for the adapter."""

    def __init__(self, number: int, **info: Any) -> None:
        self.number, self.info = number, replace(INFO, **info)
        self.restarts = 0
        self.problem: str | None = None
        self.adapters: dict[str, str] = {}
        self.broken: EngineUnavailable | None = None
        self.refusal: Exception | None = None
        self.done: list[str] = []
        self.running: dict[str, asyncio.Future[None]] = {}
        self.closed = False
        self._up = asyncio.Event()
        self._up.set()

    @property
    def engines(self) -> tuple[ToldSampler, ...]:
        return (self,)

    @property
    def replicas(self) -> tuple[()]:
        return ()

    def die(self) -> None:
        """As by ``kill -9``."""
        self.problem = "its process is being started"
        self._up.clear()
        for call in self.running.values():
            if not call.done():
                call.set_exception(WorkerDied("The engine's process ended during this call."))

    def revive(self) -> None:
        """Started again, with the adapters that it had."""
        self.restarts += 1
        self.problem = None
        self._up.set()

    def finish(self, call: str) -> None:
        """Answer a call."""
        self.running[call].set_result(None)

    async def start(self) -> None:
        if self.refusal:
            raise self.refusal

    async def close(self) -> None:
        self.closed = True

    async def ready(self) -> None:
        if self.broken:
            raise self.broken
        await self._up.wait()

    async def state(self) -> SamplerState | None:
        free = 1000.0 * (self.number + 1) if self.number else None
        return None if self.problem else SamplerState(0.1 * (self.number + 1), free)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        await self.ready()
        loaded = "base"
        if request.adapter is not None:
            if request.adapter not in self.adapters:
                raise UnknownModel(f"got the adapter {request.adapter!r}")
            loaded = self.adapters[request.adapter]
        self.running[request.id] = asyncio.get_running_loop().create_future()
        try:
            if request.stream:
                yield ChatDelta("a")
            await self.running[request.id]
        finally:
            del self.running[request.id]
        yield ChatReply([1], [2], [-1.0], f"{self.number} {loaded}", [], "stop")

    async def load_adapter(self, name: str, path: Path, *, probe: bool = True) -> None:
        await self.ready()
        if self.refusal:
            raise self.refusal
        try:
            content = (path / "content").read_text()
        except FileNotFoundError as error:  # it was moved meanwhile
            raise ConfigError(f"{path} can not be read: {error}") from error
        if self.adapters.get(name, content) != content:
            raise ConfigError(f"{name} is loaded from another path. A name is used once.")
        self.adapters[name] = content
        self.done.append(f"load {name}{' probe' if probe else ''}")

    async def unload_adapter(self, name: str) -> None:
        await self.ready()
        self.adapters.pop(name, None)

    async def sleep(self) -> None:
        await self.ready()
        self.done.append("sleep")

    async def wake(self) -> None:
        await self.ready()
        self.done.append("wake")


def adapter_folder(folder: Path, content: str) -> Path:
    """A folder that stands for an adapter of this content."""
    folder.mkdir(exist_ok=True)
    (folder / "content").write_text(content)
    return folder
