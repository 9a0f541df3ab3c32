"""Sampler and learner on one card, whose memory is a ledger here: who takes it when, who waits."""

import asyncio
import logging
import os
import queue
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import httpx
import pytest

from langchain_art_server.backends.ipc.channel import EngineCall
from langchain_art_server.backends.models import device
from langchain_art_server.backends.peft import child
from langchain_art_server.backends.vllm import client
from langchain_art_server.backends.vllm.client import VllmClient, VllmError
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings, VllmSettings
from langchain_art_server.gateway.service import Service


@dataclass
class Card:
    """Gigabytes of one GPU."""

    total: int = 80
    vllm: int = 0
    used: int = 0  # by the learner's tensors
    kept: int = 0  # by torch's allocator in the learner, for later
    refused: int = 0

    def free_cache(self) -> None:
        self.kept = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        """What vLLM answers, of which all takes 40."""
        if request.url.path == "/sleep":
            self.vllm = 0
        elif self.total - self.used - self.kept < 40:
            self.refused += 1
            return httpx.Response(500, text="CUDA Error: out of memory at cumem_allocator.cpp:62")
        else:
            self.vllm = 40
        return httpx.Response(200)

    def client(self) -> VllmClient:
        made = VllmClient(Path("none"))
        made._http = httpx.AsyncClient(
            base_url="http://vllm", transport=httpx.MockTransport(self.answer)
        )
        return made


class LearnerOn:
    """A core whose step uses all that the sleeping sampler has left."""

    info: ClassVar[dict[str, Any]] = {}
    name = "none"
    base = None

    def __init__(self, card: Card, fails: bool) -> None:
        self._card, self._fails = card, fails

    def step(self, _request: Any, _progress: Any) -> dict[str, float]:
        self._card.used, self._card.kept = 16, 60
        if self._fails:
            raise ValueError("the step failed")
        return {}


@pytest.mark.parametrize("fails", [False, True])
def test_the_learner_has_given_back_its_memory_when_the_step_is_answered(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, answers = Card(), list[tuple[str, int]]()
    monkeypatch.setattr(device, "free_cache", card.free_cache)
    monkeypatch.setattr(child, "_make_core", lambda _config, _beside: LearnerOn(card, fails))
    monkeypatch.setattr(child, "unpack_step", lambda _params: None)
    inbox: queue.SimpleQueue[EngineCall] = queue.SimpleQueue()
    for number, method in enumerate(("start", "step", "end")):
        inbox.put(EngineCall(number, method, {"beside": []}))

    class Channel:
        """Notes what the parent is told, and how much the card's other user finds then."""

        def __init__(self) -> None:
            self.inbox, self.queued = inbox, list[str]()

        def listen(self) -> None: ...

        def result(self, call: EngineCall, _payload: Any) -> None:
            self.queued.append(f"{call.method} result")

        def error(self, call: EngineCall, _error: Exception) -> None:
            self.queued.append(f"{call.method} error")

        def flush(self) -> None:
            answers.extend((one, card.total - card.used - card.kept) for one in self.queued)
            self.queued.clear()
            if answers[-1][0] == "end error":
                raise InterruptedError

    with pytest.raises(InterruptedError):
        child.serve(cast(Any, Channel()), {})
    assert answers[1] == (f"step {'error' if fails else 'result'}", 64)


async def test_a_wake_that_finds_too_little_memory_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "WAKE_PAUSE", 0.01)
    card = Card(used=16, kept=60)
    waking = asyncio.create_task(card.client().wake(10.0))
    while card.refused < 3 and not waking.done():
        await asyncio.sleep(0.01)
    assert not waking.done()
    card.free_cache()
    await waking
    assert card.vllm == 40


async def test_a_wake_that_never_succeeds_is_an_error_after_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "WAKE_PAUSE", 0.01)
    card = Card(used=76)
    with pytest.raises(VllmError, match="out of memory"):
        await card.client().wake(0.1)
    assert card.refused > 1


class Sampler(VllmSampler):
    """The real one over a child that cannot start while a file says that memory is taken."""

    target: ClassVar[str] = "tests.support.worker_child:serve"

    async def _restore(self, info: dict[str, Any]) -> None: ...


async def test_a_sampler_that_dies_asleep_starts_when_the_learner_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(model="none", sampler=VllmSettings(), data_dir=tmp_path)
    taken, sampler = tmp_path / "taken", Sampler(settings)
    sampler._program._config = {"dies_at_start": str(taken)}  # pyright: ignore[reportAttributeAccessIssue]
    await sampler.start()
    try:
        await sampler.sleep()
        taken.touch()
        assert sampler.pid is not None
        with caplog.at_level(logging.WARNING):
            os.kill(sampler.pid, signal.SIGKILL)
            await asyncio.sleep(1.5)
            assert not sampler.up.is_set()
            taken.unlink()  # the learner's step ends
            async with asyncio.timeout(20):
                await sampler.wake()
        assert sampler.up.is_set() and sampler.restarts == 1
        assert "could not be started" not in caplog.text
    finally:
        await sampler.close()


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"sampler": VllmSettings()}, ["sampler", "sampler ready", "learner", "learner ready"]),
        ({}, ["sampler", "learner", "sampler ready", "learner ready"]),
        (
            {"sampler": VllmSettings(), "device": "cpu"},
            ["sampler", "learner", "sampler ready", "learner ready"],
        ),
    ],
)
async def test_vllm_measures_a_card_before_the_learner_loads_its_weights(
    table: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    """What others take while it starts, vLLM takes off its own cache."""
    seen: list[str] = []

    def engine(name: str) -> Any:
        async def start() -> None:
            seen.append(name)
            await asyncio.sleep(0.05)
            seen.append(f"{name} ready")

        async def close() -> None: ...

        info = SimpleNamespace(weights="")
        told = {"problem": None, "restarts": 0, "info": info, "weights": ""}
        return SimpleNamespace(start=start, close=close, **told)

    settings = Settings(model="none", data_dir=tmp_path, **table)
    service = Service(settings, engine("sampler"), engine("learner"))
    await service._start_engines()
    await service.close()
    assert seen == expected
