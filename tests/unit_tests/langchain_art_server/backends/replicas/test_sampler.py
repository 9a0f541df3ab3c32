"""Calls, versions and deaths among replicas. The engines are values here."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from langchain_art.errors import ConfigError, EngineUnavailable
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


def said(task: asyncio.Task[list[ChatDelta | ChatReply]]) -> list[str | None]:
    return [piece.content for piece in task.result()]


async def test_a_runs_calls_go_to_one_and_others_to_the_least_loaded(
    replicas: ReplicatedSampler, engines: list[ToldSampler]
) -> None:
    calls = [ask(replicas, f"{run}{i}", run=run) for i in range(3) for run in ("a", "b", "c")]
    await until(lambda: sum(len(one.running) for one in engines) == 9)
    assert [sorted(one.running) for one in engines] == [
        ["a0", "a1", "a2"],
        ["b0", "b1", "b2"],
        ["c0", "c1", "c2"],
    ]
    assert [one.running_calls for one in replicas.replicas] == [3, 3, 3]
    for engine in engines:
        for call in list(engine.running):
            engine.finish(call)
    await asyncio.gather(*calls)
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
    for engine in engines:
        for call in list(engine.running):
            engine.finish(call)
    await asyncio.gather(*calls, base)


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
