"""Calls, versions and deaths among replicas. The engines are values here."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from langchain_art.errors import ConfigError, EngineUnavailable, InvalidRequest
from langchain_art_server.backends.base import ChatDelta, ChatReply, ChatRequest, SamplerState
from langchain_art_server.backends.ipc.worker import WorkerDied
from langchain_art_server.backends.replicas import replica, sampler
from langchain_art_server.backends.replicas.sampler import (
    SPREAD_CALLS,
    SPREAD_FACTOR,
    ReplicatedSampler,
    StickyRuns,
)
from tests.support.replica_engines import ToldSampler, adapter_folder
from tests.support.soak import count


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LOOK_SECONDS", 0.002)
    monkeypatch.setattr(sampler, "RETRY_SECONDS", 0.002)


@pytest.fixture
async def engines() -> list[ToldSampler]:
    return [ToldSampler(number) for number in range(3)]


@pytest.fixture
async def replicas(engines: list[ToldSampler]) -> AsyncGenerator[ReplicatedSampler]:
    made = ReplicatedSampler(engines)
    await made.start()
    yield made
    await made.close()
    assert all(engine.closed for engine in engines)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


def ask(
    replicas: ReplicatedSampler, call: str, adapter: str | None = None, run: str = "", **more: bool
) -> asyncio.Task[list[ChatDelta | ChatReply]]:
    request = ChatRequest(call, [{"role": "user", "content": call}], adapter=adapter, run=run)
    request = ChatRequest(**(vars(request) | more))

    async def collect() -> list[ChatDelta | ChatReply]:
        return [piece async for piece in replicas.chat(request)]

    return asyncio.create_task(collect())


async def answer_all(engines: list[ToldSampler], *calls: asyncio.Task[Any]) -> None:
    for engine in engines:
        for call in list(engine.running):
            engine.finish(call)
    await asyncio.gather(*calls)


async def test_a_runs_calls_go_to_one_and_others_to_the_least_loaded(
    replicas: ReplicatedSampler, engines: list[ToldSampler]
) -> None:
    calls = [ask(replicas, f"{run}{i}", run=run) for i in range(2) for run in ("a", "b", "c")]
    await until(lambda: sum(len(one.running) for one in engines) == 6)
    assert [sorted(one.running) for one in engines] == [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]
    assert [one.running_calls for one in replicas.replicas] == [2, 2, 2]
    await answer_all(engines, *calls)
    assert [one.running_calls for one in replicas.replicas] == [0, 0, 0]


async def test_a_stream_that_has_begun_fails_and_is_not_made_again(
    replicas: ReplicatedSampler, engines: list[ToldSampler]
) -> None:
    call = ask(replicas, "c", run="r", stream=True)
    await until(lambda: engines[0].running)
    engines[0].die()
    with pytest.raises(WorkerDied):
        await call
    assert not any(one.running for one in engines)


async def test_a_publish_does_not_wait_for_a_replica_that_dies_of_it(
    replicas: ReplicatedSampler, engines: list[ToldSampler], tmp_path: Path
) -> None:
    stuck, real = asyncio.Event(), engines[1].load_adapter

    async def load(name: str, path: Path, *, probe: bool = True) -> None:
        await stuck.wait()
        await real(name, path, probe=probe)

    engines[1].load_adapter = load  # type: ignore[method-assign]
    publish = asyncio.create_task(
        replicas.load_adapter("p@1", adapter_folder(tmp_path / "1", "one"))
    )
    await asyncio.sleep(0.02)
    assert not publish.done(), "routed before all that live have it"
    engines[1].die()
    async with asyncio.timeout(60):
        await publish
    stuck.set()
    engines[1].revive()
    await until(lambda: engines[1].adapters == {"p@1": "one"} and engines[1].problem is None)


async def test_what_one_refuses_none_has(
    replicas: ReplicatedSampler, engines: list[ToldSampler], tmp_path: Path
) -> None:
    engines[1].refusal = ConfigError("rank 99")
    with pytest.raises(ConfigError, match="rank 99"):
        await replicas.load_adapter("p@1", adapter_folder(tmp_path / "1", "one"))
    assert [one.adapters for one in engines] == [{}, {}, {}]
    engines[1].refusal = None
    await replicas.load_adapter("p@1", adapter_folder(tmp_path / "other", "other"))
    assert [one.adapters for one in engines] == [{"p@1": "other"}] * 3


async def test_a_version_that_a_returning_replica_refuses_is_answered_by_others(
    replicas: ReplicatedSampler,
    engines: list[ToldSampler],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines[0].die()
    await replicas.load_adapter("p@1", adapter_folder(tmp_path / "1", "one"))
    engines[0].refusal = ConfigError("no space for a copy")
    engines[0].revive()
    await until(lambda: replicas.replicas[0].problem is None)
    assert replicas.replicas[0].missing == 1
    calls = [ask(replicas, f"c{i}", "p@1") for i in range(4)]
    base = ask(replicas, "base")
    await until(lambda: [len(one.running) for one in engines] == [1, 2, 2])
    engines[0].refusal = None
    monkeypatch.setattr(replica, "REFUSED_SECONDS", 0.0)
    await until(lambda: replicas.replicas[0].missing == 0)
    await answer_all(engines, *calls, base)


async def test_replicas_that_fail_in_an_unforeseen_way_are_brought_up_to_date_later(
    replicas: ReplicatedSampler,
    engines: list[ToldSampler],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Calls are refused while all fail."""
    engines[0].die()
    await replicas.load_adapter("p@1", adapter_folder(tmp_path / "1", "one"))
    for engine in engines:
        engine.die()
        engine.refusal = FileNotFoundError("its files were moved while it read them")
        engine.revive()
    async with asyncio.timeout(60):
        with pytest.raises(EngineUnavailable, match="its files were moved"):
            await ask(replicas, "c", "p@1")
    assert "Replica 0 could not be brought up to date" in caplog.text
    engines[0].refusal = None
    await until(lambda: replicas.replicas[0].problem is None)
    assert engines[0].adapters == {"p@1": "one"} and replicas.replicas[0].missing == 0
    assert engines[0].done[-1] == "load p@1 probe", "a version that was missed is probed"


async def test_with_none_alive_calls_wait_and_if_none_can_be_started_they_are_refused(
    replicas: ReplicatedSampler, engines: list[ToldSampler]
) -> None:
    for engine in engines:
        engine.die()
    assert replicas.problem == (
        "none of its replicas answers (0: its process is being started; 1: its process is being "
        "started; 2: its process is being started)"
    )
    waiting = ask(replicas, "c")
    await asyncio.sleep(0.02)
    engines[2].revive()
    await until(lambda: engines[2].running)
    engines[2].finish("c")
    assert (await waiting)[-1] and replicas.problem is None and replicas.restarts == 1
    engines[2].die()
    refused = ask(replicas, "d")
    for engine in engines:
        engine.broken = EngineUnavailable("The engine cannot be started: no such model")
        engine._up.set()  # what waited for its start is told
    with pytest.raises(EngineUnavailable, match="no such model"):
        await refused


async def test_all_sleep_and_wake_and_one_that_died_asleep_comes_back(
    replicas: ReplicatedSampler, engines: list[ToldSampler], tmp_path: Path
) -> None:
    await replicas.sleep()
    assert [one.done for one in engines] == [["sleep"]] * 3
    engines[1].die()
    async with asyncio.timeout(60):
        await replicas.wake()
    assert [engines[0].done[-1], engines[2].done[-1]] == ["wake", "wake"]
    await replicas.load_adapter("p@1", adapter_folder(tmp_path / "1", "one"))
    engines[1].revive()
    await until(lambda: replicas.replicas[1].problem is None)
    assert engines[1].adapters == {"p@1": "one"}


async def test_if_one_does_not_sleep_none_sleeps(
    replicas: ReplicatedSampler, engines: list[ToldSampler]
) -> None:
    async def sleep() -> None:
        raise EngineUnavailable("vLLM failed: 500")

    engines[1].sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailable, match="500"):
        await replicas.sleep()
    assert engines[0].done == ["sleep", "wake"] and engines[2].done == ["sleep", "wake"]


async def test_all_are_of_one_model_on_one_kind_of_device(engines: list[ToldSampler]) -> None:
    engines[0] = ToldSampler(0, device="cuda")
    with pytest.raises(ConfigError, match="Replica 1 has device='cpu', and replica 0 has 'cuda'"):
        await ReplicatedSampler(engines).start()
    assert all(one.closed for one in engines)
    engines[0].refusal = ConfigError("no such model")
    with pytest.raises(ConfigError, match="no such model"):
        await ReplicatedSampler(engines).start()


async def test_the_state_is_the_loop_lag_and_least_memory_of_those_that_answer(
    replicas: ReplicatedSampler, engines: list[ToldSampler]
) -> None:
    assert await replicas.state() == SamplerState(pytest.approx(0.3), 2000.0)
    engines[2].die()
    engines[1].die()
    assert await replicas.state() == SamplerState(pytest.approx(0.1), None)


def test_a_run_stays_with_a_replica_until_it_is_gone_or_far_more_loaded() -> None:
    runs, least = StickyRuns(), 3
    assert runs.choose("r", {0: 0, 1: 0}) == 0
    bound = SPREAD_FACTOR * least + SPREAD_CALLS
    assert runs.choose("r", {0: bound, 1: least}) == 0
    assert runs.choose("r", {0: bound + 1, 1: least}) == 1
    assert runs.choose("r", {0: 0, 1: least}) == 1
    assert runs.choose("r", {0: 8}) == 0, "the other is gone"
    assert runs.choose("r", {0: 8, 1: 0}) == 0, "it is back, without the run's prompts"
    assert [runs.choose("", {0: 1, 1: 0}) for _ in range(3)] == [1, 1, 1]
    assert [runs.choose("", {0: 0, 1: 0}) for _ in range(4)] == [0, 1, 0, 1]
    assert list(runs._homes) == ["r"], "calls of no run are not remembered"
    few = StickyRuns(most_runs=2)
    assert [few.choose(name, {0: 0, 1: 0}) for name in ("a", "b", "c")] == [0, 1, 0]
    assert list(few._homes) == ["b", "c"]


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
        for engine, other in self.pairs():
            if other.problem is None:
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
