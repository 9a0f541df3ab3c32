import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import ChatReply, ChatRequest
from langchain_art_server.backends.ipc.worker import WorkerDied
from langchain_art_server.backends.replicas import sampler
from langchain_art_server.backends.replicas.sampler import ReplicatedSampler
from tests.support.replica_engines import ToldSampler, adapter_folder
from tests.support.soak import count

T = TypeVar("T")
REPLICAS = st.integers(0, 2)


class Replicas(RuleBasedStateMachine):
    """Versions are published by name and content, and a name is used again with other content."""

    def __init__(self) -> None:
        super().__init__()
        self.before, sampler.LOOK_SECONDS = sampler.LOOK_SECONDS, 0.0005
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.engines = [ToldSampler(number) for number in range(3)]
        self.sampler = ReplicatedSampler(self.engines)
        self.published: dict[str, str] = {}
        self.using: dict[str, str] = {}
        self.calls: dict[str, asyncio.Task[list[ChatReply]]] = {}
        self.expected: dict[str, str] = {}
        self.deaths = Counter[str]()
        self.made = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def settle(self) -> None:
        """Until the living have caught up and no call is between two replicas."""
        while any(e.problem is None and r.problem for e, r in self.pairs()) or self.homeless():
            await asyncio.sleep(0.0005)

    def pairs(self) -> list[tuple[ToldSampler, Any]]:
        return list(zip(self.engines, self.sampler.replicas, strict=True))

    def homeless(self) -> list[str]:
        running = [call for one in self.engines if one.problem is None for call in one.running]
        return [
            call for call, task in self.calls.items() if not task.done() and call not in running
        ]

    @property
    def alive(self) -> list[ToldSampler]:
        return [one for one in self.engines if one.problem is None]

    @initialize()
    def start(self) -> None:
        self.run(self.sampler.start())

    @rule(number=st.integers(0, 3))
    def publish(self, number: int) -> None:
        """Under a path of its own, which is moved when all the living have it."""
        name = f"p@{number}"
        if name in self.published:
            return
        self.made += 1
        staged = adapter_folder(Path(self.folder.name, f"staged-{self.made}"), f"w{self.made}")
        self.run(self.sampler.load_adapter(name, staged, probe=False))
        final = staged.rename(Path(self.folder.name, f"final-{self.made}"))
        self.run(self.sampler.load_adapter(name, final))
        self.published[name] = f"w{self.made}"
        for engine, replica in self.pairs():
            if replica.problem is None:
                assert engine.adapters[name] == f"w{self.made}", "routed before all have it"

    @rule(number=st.integers(0, 3))
    def unload(self, number: int) -> None:
        name = f"p@{number}"
        used = {self.using[call] for call, task in self.calls.items() if not task.done()}
        if self.published.keys() <= used or name in used or name not in self.published:
            return
        del self.published[name]
        self.run(self.sampler.unload_adapter(name))

    @precondition(lambda self: len(self.alive) > 1)
    @rule(number=REPLICAS)
    def die(self, number: int) -> None:
        if self.engines[number].problem is None:
            self.deaths.update(list(self.engines[number].running))
            self.engines[number].die()
            self.run(self.settle())

    @rule(number=REPLICAS)
    def revive(self, number: int) -> None:
        if self.engines[number].problem is not None:
            self.engines[number].revive()

    @precondition(lambda self: self.published)
    @rule(data=st.data(), run=st.sampled_from(["", "a", "b"]))
    def call(self, data: st.DataObject, run: str) -> None:
        self.made += 1
        name = data.draw(st.sampled_from(sorted(self.published)))
        messages = [{"role": "user", "content": f"{self.made}"}]
        request = ChatRequest(f"c{self.made}", messages, adapter=name, run=run)

        async def collect() -> list[ChatReply]:
            return [one async for one in self.sampler.chat(request) if isinstance(one, ChatReply)]

        self.calls[request.id] = self.loop.create_task(collect())
        self.using[request.id], self.expected[request.id] = name, self.published[name]
        self.run(self.settle())

    @precondition(lambda self: any(one.running for one in self.alive))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([one for one in self.alive if one.running]))
        call = sorted(engine.running)[0]
        engine.finish(call)
        [reply] = self.run(self.calls.pop(call))
        assert reply.content == f"{engine.number} {self.expected[call]}"

    @invariant()
    def no_call_is_lost(self) -> None:
        for call in [call for call, task in self.calls.items() if task.done()]:
            error = self.calls.pop(call).exception()
            if self.deaths[call] > sampler.MAX_DEATHS:  # among others: each may be the reason
                assert isinstance(error, InvalidRequest | WorkerDied)
            else:  # as the only one
                assert self.deaths[call] == sampler.MAX_DEATHS
                assert isinstance(error, InvalidRequest)

    def teardown(self) -> None:
        for engine in self.engines:
            if engine.problem:
                engine.revive()
        self.run(self.settle())
        for engine in self.engines:
            assert engine.adapters == self.published
            for call in list(engine.running):
                engine.finish(call)
        replies = [self.run(task) for task in self.calls.values()]
        assert all(len(one) == 1 for one in replies)
        assert [one.missing for one in self.sampler.replicas] == [0, 0, 0]
        self.run(self.sampler.close())
        self.loop.close()
        self.folder.cleanup()
        sampler.LOOK_SECONDS = self.before


TestReplicas = Replicas.TestCase
pytest.mark.soak(TestReplicas)
TestReplicas.settings = settings(max_examples=count(10, 30), stateful_step_count=25, deadline=None)
