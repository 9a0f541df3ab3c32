"""Cancelled loads, unloads and calls of vLLM's host, whose vLLM is a stub that takes its time."""

import asyncio
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art_server.backends.ipc.channel import EngineCall
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.vllm.adapter_copies import AdapterCopies
from langchain_art_server.backends.vllm.host import VllmHost
from langchain_art_server.config import Settings
from tests.support.tiny_models import save_adapter, save_model


class Vllm:
    """Holds adapters by name; goes on when its client hangs up."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.names = seconds, set[str]()

    async def load(self, name: str, _folder: Path) -> None:
        self.names.add(name)
        await asyncio.sleep(self.seconds)

    async def unload(self, name: str) -> None:
        await asyncio.sleep(self.seconds)
        self.names.discard(name)


class Held:
    """A host, its model, and what it answered with an error."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.model = folder, save_model(folder / "model")
        settings = Settings(model=str(self.model), device="cpu", data_dir=folder)
        outline, self.vllm = load_outline(settings), Vllm(seconds)
        self.errors: list[Exception] = []
        self.host: Any = object.__new__(VllmHost)
        self.copies = AdapterCopies(outline.model, 8, "float32")
        channel = SimpleNamespace(
            result=lambda *_: None, flush=lambda: None, error=lambda _, e: self.errors.append(e)
        )
        self.host.__dict__ |= {
            "_copies": self.copies,
            "_vllm": self.vllm,
            "_adapters": {},
            "_loading": asyncio.Lock(),
            "_running": {},
            "_flush_is_due": False,
            "_channel": channel,
            "info": outline.info,
        }
        self.host._methods = {
            "load_adapter": self.host._load_adapter,
            "unload_adapter": self.host._unload_adapter,
            "chat": self._chat,
        }

    async def _chat(self, call: EngineCall) -> None:
        """A call that goes on until it is cancelled; it ends as the host's own do."""
        adapter = self.host._hold(call)
        try:
            await asyncio.Event().wait()
        finally:
            if (unused := self.host._release(adapter)) is not None:
                await self.host._free(unused)

    def take(self, number: int, method: str, **params: Any) -> EngineCall:
        self.host.take(call := EngineCall(number, method, params))
        return call

    def load(self, number: int) -> EngineCall:
        path = str(save_adapter(self.folder / f"adapter-{number}", self.model, number))
        return self.take(number, "load_adapter", name="p@1", path=path, probe=False)

    async def settled(self) -> None:
        """Return when no call runs; those that were cancelled meanwhile are ended."""
        watch = asyncio.create_task(self.host.cancel_calls())
        async with asyncio.timeout(20):
            while self.host._running:
                await asyncio.sleep(0.01)
        watch.cancel()

    def require_nothing(self) -> None:
        assert not [*self.copies.folder.iterdir()] and not self.vllm.names


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path, 0.2)
    yield made
    shutil.rmtree(made.copies.folder)


async def test_a_cancelled_load_leaves_nothing_and_its_name_is_free(held: Held) -> None:
    call = held.load(1)
    while not held.vllm.names:
        await asyncio.sleep(0.001)
    call.cancelled = True  # its job was; it then unloads the name
    held.take(2, "unload_adapter", name="p@1")
    await held.settled()
    held.require_nothing()
    held.load(3)
    await held.settled()
    assert not held.errors and held.vllm.names


async def test_a_cancelled_call_frees_an_adapter_that_was_unloaded(held: Held) -> None:
    held.load(1)
    await held.settled()
    call = held.take(2, "chat", adapter="p@1")
    await asyncio.sleep(0.01)
    held.take(3, "unload_adapter", name="p@1")
    await asyncio.sleep(0.01)
    call.cancelled = True
    await held.settled()
    held.require_nothing()


def test_a_copy_that_fails_leaves_nothing(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = save_adapter(held.folder / "adapter", held.model, 1)

    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"as far as there was room")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ConfigError, match="No space left"):
        held.copies.add("p@1", adapter)
    held.require_nothing()
