"""Start, steps and turns of sampler and learner, each byte of each GPU in a ledger.

The server's own code decides: `fill_in` how much vLLM takes, `Service` who starts first,
`JobRunner` who has the device, `VllmClient` how a wake is tried again, `LearnerCore` what it does
when memory runs out. The ledger stands for CUDA: it refuses what does not fit.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from langchain_art.gpu_memory import PROCESS_BYTES, MemoryNeeds, Shape
from langchain_art.wire import TrainConfig
from langchain_art_server.backends.base import LearnerStep, ModelInfo
from langchain_art_server.backends.models.loading import LoadedModel
from langchain_art_server.backends.peft import learner_core, packer
from langchain_art_server.backends.peft.forest.packing import ForestRows
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.vllm import client, process
from langchain_art_server.backends.vllm.client import VllmClient
from langchain_art_server.config import Settings, VllmSettings
from langchain_art_server.gateway.service import Service
from tests.cuda.test_server_settings import ASLEEP, MODELS
from tests.support.learner_cases import LENIENT, SHAPE, folder, fresh, make_rows, shake

GB = 10**9
CONFIG, BILLIONS = MODELS["Qwen/Qwen3-8B"]
IDLE = MemoryNeeds(Shape.of_config(CONFIG), "bfloat16", 16).idle + PROCESS_BYTES
#: Tokens whose activations would fill what is free at the first step.
TOKENS = 300
#: How much more they take than the learner expects, so that the first attempt fails.
SURPRISE = 1.7


@dataclass
class Card:
    """The memory of one GPU."""

    total: int
    held: dict[str, float] = field(default_factory=dict[str, float])
    refused: list[str] = field(default_factory=list[str])

    @property
    def free(self) -> float:
        return self.total - sum(self.held.values())

    def take(self, who: str, size: float) -> bool:
        """Let `who` hold so much, if there is room."""
        if size - self.held.get(who, 0) > self.free:
            self.refused.append(who)
            return False
        self.held[who] = size
        return True


class LedgerSampler:
    """vLLM as far as memory goes: it refuses to start or to wake without its share."""

    problem, restarts, info = None, 0, SimpleNamespace(weights="")

    def __init__(self, settings: Settings, cards: list[Card]) -> None:
        self._cards, self._settings, self.share = cards, settings, 0.0
        #: Called when a wake was refused: the driver hears of freed memory a moment later.
        self.later: Callable[[], None] = lambda: None
        self.client = VllmClient(Path("none"))
        self.client._http = httpx.AsyncClient(
            base_url="http://vllm", transport=httpx.MockTransport(self._answer)
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        wanted = ASLEEP if request.url.path == "/sleep" else self.share
        if not (held := self._cards[0].take("vllm", wanted)):
            self.later()
        return httpx.Response(200 if held else 500, text="CUDA Error: out of memory")

    async def start(self) -> None:
        info = ModelInfo("m", "m", int(BILLIONS * GB), "cuda", "bfloat16", 32768, 151936, 16)
        holder: Any = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: CONFIG))
        seen = [{"total": one.total, "free": one.free} for one in self._cards]
        settings, _ = process.fill_in(self._settings, LoadedModel(holder, None, set(), info), seen)
        assert isinstance(settings.sampler, VllmSettings) and settings.sampler.gpu_memory
        before = self._cards[0].free
        await asyncio.sleep(0.05)  # it profiles
        assert self._cards[0].free == before, "what others took meanwhile is off its cache"
        self.share = settings.sampler.gpu_memory * self._cards[0].total
        assert self._cards[0].take("vllm", self.share), "vLLM refuses to start"

    async def sleep(self) -> None:
        await self.client.change("/sleep?level=1&mode=wait")

    async def wake(self) -> None:
        await self.client.wake(10.0)

    async def close(self) -> None: ...


class LedgerLearner:
    """Our learner's core, whose activations are taken from a card."""

    problem, restarts, weights = None, 0, ""

    def __init__(self, core: LearnerCore, card: Card) -> None:
        self._core, self.card = core, card

    async def start(self) -> None:
        assert self.card.take("learner", IDLE)

    async def step(self, request: LearnerStep) -> None:
        await asyncio.to_thread(self._core.step, request, lambda *_: None)

    def give_back(self) -> None:
        self.card.held["learner"] = IDLE

    async def close(self) -> None: ...


@pytest.fixture
def core(tmp_path: Path) -> LearnerCore:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return LearnerCore(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("options", "gigabytes"),
    [
        ({}, 80),
        ({"take_turns": True}, 48),
        ({"device": "cuda:1"}, 48),
        ({"device": "cuda:1", "take_turns": True}, 24),
    ],
    ids=["together", "in turns", "two cards", "two cards in turns"],
)
async def test_nobody_takes_more_than_there_is_and_all_is_given_back(
    options: dict[str, Any],
    gigabytes: int,
    core: LearnerCore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = [Card(gigabytes << 30) for _ in range(2)]
    settings = Settings(model="m", sampler=VllmSettings(), data_dir=tmp_path / "data", **options)
    card = cards["device" in options]
    sampler, learner = LedgerSampler(settings, cards), LedgerLearner(core, card)
    sampler.later = learner.give_back
    engines: tuple[Any, Any] = sampler, learner
    service = Service(settings, *engines)
    parent = shake(fresh(core, tmp_path))
    core._hold(parent)
    plain, sweep = core.packer._measured(), ForestRows.sweep
    each: list[float] = []

    def limited(packing: ForestRows, scorer: Any, visit: Any, progress: Any = None) -> None:
        if progress is not None and not card.take(
            "learner", IDLE + packing.alive * each[0] * SURPRISE
        ):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        sweep(packing, scorer, visit, progress)

    def free(_device: Any) -> float:
        each[:] = each or [card.free / TOKENS]
        return card.free / each[0] * core.packer.peak(plain)

    monkeypatch.setattr(client, "WAKE_PAUSE", 0.01)
    monkeypatch.setattr(packer.Packer, "_device", torch.device("cuda"))
    monkeypatch.setattr(packer, "free_bytes", free)
    monkeypatch.setattr(ForestRows, "sweep", limited)
    monkeypatch.setattr(learner_core, "free_cache", learner.give_back)
    try:
        await service._start_engines()
        assert cards[0].held["vllm"] == sampler.share > BILLIONS * 2 * GB
        for number in (1, 2):
            request = LearnerStep(
                parent,
                folder(tmp_path, f"out-{number}"),
                number,
                make_rows(60),
                TrainConfig(learning_rate=1e-3, **LENIENT),
            )
            async with service.jobs._gate(), service.jobs._device():
                if settings.take_turns:
                    assert cards[0].held["vllm"] == ASLEEP
                await learner.step(request)
            learner.give_back()
            assert cards[0].held["vllm"] == sampler.share
            assert card.held["learner"] == IDLE
    finally:
        await service.close()
    # The first step ran out of memory once, and the learner has known better since.
    assert card.refused.count("learner") == 1
    shares_a_card = settings.take_turns and card is cards[0]
    assert ("vllm" in cards[0].refused) == shares_a_card, "a wake that came too early"
