"""Sampler and learner on one card, whose memory is a ledger here: who takes it when, who waits."""

import asyncio
import logging
import os
import queue
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import httpx
import pytest

from langchain_art.errors import ConfigError
from langchain_art_server.backends.ipc.channel import EngineCall
from langchain_art_server.backends.models import device
from langchain_art_server.backends.peft import child
from langchain_art_server.backends.vllm import client
from langchain_art_server.backends.vllm.client import VllmClient, VllmError
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.config import Settings, VllmSettings
from langchain_art_server.gateway.service import Service


class LearnerOn:
    """A core whose step uses all that the sleeping sampler has left."""

    info: ClassVar[dict[str, Any]] = {}
    name = "none"
    base = None

    def __init__(self, card: dict[str, int], fails: bool) -> None:
        self._card, self._fails = card, fails

    def step(self, _request: Any, _progress: Any) -> dict[str, float]:
        self._card |= {"used": 16, "kept": 60}
        if self._fails:
            raise ValueError("the step failed")
        return {}


@pytest.mark.parametrize("fails", [False, True])
def test_the_learner_has_given_back_its_memory_when_the_step_is_answered(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    #: Gigabytes of tensors, and of what torch's allocator keeps for later.
    card = {"used": 0, "kept": 0}
    answers = list[tuple[str, dict[str, int]]]()
    monkeypatch.setattr(device, "free_cache", lambda: card.update(kept=0))
    monkeypatch.setattr(child, "_make_core", lambda _config, _beside: LearnerOn(card, fails))
    monkeypatch.setattr(child, "unpack_step", lambda _params: None)
    inbox: queue.SimpleQueue[EngineCall] = queue.SimpleQueue()
    for number, method in enumerate(("start", "step", "end")):
        inbox.put(EngineCall(number, method, {"beside": []}))

    class Channel:
        """Notes what the parent is told, and what the card's other user finds taken then."""

        def __init__(self) -> None:
            self.inbox, self.queued = inbox, list[str]()

        def listen(self) -> None: ...

        def result(self, call: EngineCall, _payload: Any) -> None:
            self.queued.append(f"{call.method} result")

        def error(self, call: EngineCall, _error: Exception) -> None:
            self.queued.append(f"{call.method} error")

        def flush(self) -> None:
            answers.extend((one, dict(card)) for one in self.queued)
            self.queued.clear()
            if answers[-1][0] == "end error":
                raise InterruptedError

    with pytest.raises(InterruptedError):
        child.serve(cast(Any, Channel()), {})
    assert answers[1] == (f"step {'error' if fails else 'result'}", {"used": 16, "kept": 0})


async def test_a_wake_is_tried_again_and_one_that_never_succeeds_is_an_error_after_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "WAKE_PAUSE", 0.01)
    refused: list[str] = []
    freed_after = 3

    def answer(request: httpx.Request) -> httpx.Response:
        refused.append(request.url.path)
        full = len(refused) <= freed_after
        return httpx.Response(500 if full else 200, text="CUDA Error: out of memory")

    made = VllmClient(Path("none"))
    made._http = httpx.AsyncClient(base_url="http://vllm", transport=httpx.MockTransport(answer))
    await made.wake(10.0)
    assert len(refused) == 4
    freed_after = 1 << 30
    with pytest.raises(VllmError, match="out of memory"):
        await made.wake(0.1)
    assert len(refused) > 5


async def test_on_a_gpu_vllm_has_its_memory_before_the_learner_takes_any(tmp_path: Path) -> None:
    """Its own cache lacks the memory that others take while it profiles."""
    order: list[str] = []

    class Engine:
        info, weights = SimpleNamespace(weights=""), ""

        def __init__(self, name: str) -> None:
            self.name = name

        async def start(self) -> None:
            order.append(f"{self.name} starts")
            await asyncio.sleep(0.01)
            order.append(f"{self.name} runs")

    settings = Settings(model="m", sampler=VllmSettings(), data_dir=tmp_path, device="cuda")
    engines: tuple[Any, Any] = Engine("vLLM"), Engine("learner")
    await Service(settings, *engines)._start_engines()
    assert order == ["vLLM starts", "vLLM runs", "learner starts", "learner runs"]
    engines[1].weights = "nf4 0123456789abcdef"
    with pytest.raises(ConfigError, match=r"unquantised weights and a learner.*nf4 \w{16}"):
        await Service(
            settings.model_copy(update={"data_dir": tmp_path / "other"}), *engines
        )._start_engines()


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
