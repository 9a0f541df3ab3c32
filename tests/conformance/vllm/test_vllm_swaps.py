"""Versions come and go under streams: published, loaded, routed to, unloaded, deleted.

``make soak`` makes 1,000 of them; ``-o log_cli=true`` shows figures.
"""

import asyncio
import itertools
import logging
import shutil
import statistics
import time
from pathlib import Path

import pytest

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatReply
from langchain_art_server.backends.vllm.sampler import VllmSampler
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.policies.router import MAX_PINNED_LOADED, Router
from tests.support.engines import resident
from tests.support.soak import count
from tests.support.tiny_models import ask, check_logprobs, save_adapter, with_adapter
from tests.support.vllm_engine import command, guard_of, vllm_of
from tests.support.vllm_sampling import chat, pid_of

log = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm-sampler"),
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="session"),
]
SWAPS = count(60, 1000)
STREAMS, WEIGHTS, KEPT = 32, 8, 4
#: Of memory, from half of the swaps to all. In the first few dozen vLLM's own heaps still fill.
GROWTH = 1.05 if SWAPS >= 500 else 1.25


class Stream:
    """Asks the policy's bare name, one reply after the other, and keeps some of them."""

    heard: list[tuple[int, ChatReply]]

    def __init__(self, router: Router, sampler: VllmSampler, number: int) -> None:
        self._router, self._sampler, self._number = router, sampler, number
        self.heard, self.ended, self.versions = [], 0, set[int]()

    async def run(self, stop: asyncio.Event) -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            async with self._router.use("p") as target:
                text = f"the weather in Paris and the mail {self._number} {turn % 3}"
                request = ask(text, adapter=target.adapter, stream=True, max_tokens=40)
                reply = await chat(self._sampler, request)
            assert target.version is not None
            self.ended += 1
            self.versions.add(target.version)
            if turn % max(1, SWAPS // 60) == 0:
                self.heard.append((target.version, reply))


async def test_versions_come_and_go_under_streams(
    vllm_sampler: VllmSampler, vllm_model: Path, tmp_path: Path
) -> None:
    weights = [save_adapter(tmp_path / f"w{i}", vllm_model, 10 + i) for i in range(WEIGHTS)]
    store = AdapterStore(tmp_path / "adapters")
    router = Router("base", store, vllm_sampler)
    seconds: list[float] = []
    kept: list[int] = []

    async def swap(version: int) -> None:
        staged = store.stage()
        for file in weights[version % WEIGHTS].glob("adapter_*"):
            shutil.copy(file, staged)
        begun = time.monotonic()
        store.publish(staged, "p", version, {})
        await router.serve("p", version)
        await router.trim()
        seconds.append(time.monotonic() - begun)
        kept.append(version)
        for old in kept[:-KEPT]:
            try:
                await router.forget("p", old)
            except InvalidRequest:
                continue  # it answers calls: later
            store.delete("p", old)
            kept.remove(old)

    await swap(0)
    stop = asyncio.Event()
    streams = [Stream(router, vllm_sampler, number) for number in range(STREAMS)]
    running = [asyncio.create_task(stream.run(stop)) for stream in streams]
    held = [pid_of(vllm_sampler), *vllm_of(pid_of(vllm_sampler))]
    before = 0
    for version in range(1, SWAPS + 1):
        await swap(version)
        assert not any(task.done() for task in running), "a stream failed"
        if version == SWAPS // 2:
            before = resident(held)
    after = resident(held)
    stop.set()
    await asyncio.gather(*running)

    ended = sum(stream.ended for stream in streams)
    served = set[int]().union(*(stream.versions for stream in streams))
    log.warning("%d swaps, median %.3f s; %d streams", SWAPS, statistics.median(seconds), ended)
    log.warning("memory: %d MiB at half, %d MiB after", before >> 20, after >> 20)
    assert len(served) > SWAPS / 10
    assert after <= GROWTH * before
    folder = Path(command(guard_of(pid_of(vllm_sampler)))[3])
    assert len(list(folder.glob("adapter-*"))) <= MAX_PINNED_LOADED + KEPT + len(weights)
    for number, path in enumerate(weights):  # from the version that was routed to, and no other
        mine = [
            reply
            for stream in streams
            for version, reply in stream.heard
            if version % WEIGHTS == number
        ]
        check_logprobs(with_adapter(vllm_model, path), mine[:: len(mine) // 40 or 1])
    for version in list(router._loaded):
        await vllm_sampler.unload_adapter(version)
