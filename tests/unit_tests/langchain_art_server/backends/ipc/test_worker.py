import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable, PromptTooLong
from langchain_art_server.backends.ipc import heartbeat
from langchain_art_server.backends.ipc import worker as worker_module
from langchain_art_server.backends.ipc.channel import Channel, EngineCall, pack
from langchain_art_server.backends.ipc.child_process import EngineProgram
from langchain_art_server.backends.ipc.fork_server import can_fork
from langchain_art_server.backends.ipc.worker import (
    EngineSocket,
    PendingCall,
    Worker,
    WorkerDied,
    WorkerHung,
)
from tests.support.engines import alive
from tests.support.soak import in_soak_alone

REPO = Path(__file__).parents[5]
TARGET = "tests.support.worker_child:serve"
IMPORTS = ("tests.support.worker_child",)
ENV = {"PYTHONPATH": f"{REPO}:{REPO / 'server'}"}

in_its_loop = pytest.mark.asyncio(loop_scope="module")
#: For what a worker does when its engine ends: that is the same however the engine was started.
forked_alone = pytest.mark.parametrize(
    "imports",
    [in_soak_alone("program") if can_fork() else "program", "forked"],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=["program", "forked"])
def imports(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if request.param == "forked" and not can_fork():
        pytest.skip("needs Linux and a CPU build of torch")
    return IMPORTS if request.param == "forked" else ()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(imports: tuple[str, ...]) -> AsyncIterator[Worker]:
    """One for all tests that leave it running, in whose event loop they run."""
    async with running(imports) as one:
        yield one


@pytest.fixture
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent child is noticed in a second."""
    for module in (worker_module, heartbeat):
        monkeypatch.setattr(module, "TICK_SECONDS", 0.1)


@contextlib.asynccontextmanager
async def running(
    imports: tuple[str, ...], config: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Worker]:
    one = Worker(TARGET, config or {}, env=ENV, imports=imports, **options)
    await one.start()
    try:
        yield one
    finally:
        await one.close()


@in_its_loop
async def test_calls_at_once_get_what_each_sent_events_in_order_and_errors_as_they_were(
    worker: Worker,
) -> None:
    exact = {"text": 'é😀\x00"\n', "floats": [0.1, -5.342500686645508, 1e-300], "none": None}
    larger_than_any_buffer = {"text": "x" * (8 << 20)}
    sent = [*({"i": i} for i in range(200)), exact, larger_than_any_buffer]
    assert await asyncio.gather(*(worker.call("echo", one) for one in sent)) == sent
    got = [item async for item in worker.stream("count", {"n": 50})]
    assert got == [("event", i) for i in range(50)] + [("result", "done")]
    with pytest.raises(PromptTooLong, match=r"^too long$") as caught:
        await worker.call("raise", {})
    assert caught.value.param == "messages"
    with pytest.raises(ArtError, match="ZeroDivisionError: by zero"):
        await worker.call("bug", {})


def test_a_timed_wait_for_a_call_ends_however_late_its_thread_goes_on() -> None:
    """Else a sampler, which gathers calls so, answers none that it has until another comes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Channel(theirs).inbox
        before = signal.signal(signal.SIGUSR1, lambda _signal, _frame: time.sleep(0.5))
        stop = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        end = threading.Timer(10, inbox.put, (EngineCall(1, "end", {}),))
        try:
            stop.start()
            end.start()
            with pytest.raises(queue.Empty):
                inbox.get(timeout=0.2)
        finally:
            end.cancel()
            stop.join()
            signal.signal(signal.SIGUSR1, before)


async def test_frames_are_heard_whole_however_they_are_cut() -> None:
    sent = [("event", "é" * i) for i in range(12)]
    stream = b"".join(pack(1, *frame) for frame in sent)
    for size in (*range(1, 12), len(stream)):
        worker = Worker(TARGET, {})
        end = EngineSocket(worker._take, worker._lost)
        heard: list[tuple[str, Any]] = []

        def hear(*frame: Any, heard: list[tuple[str, Any]] = heard) -> None:
            heard.append(frame)

        worker._pending[1] = PendingCall(b"", True, True, hear)
        for at in range(0, len(stream), size):
            end.data_received(stream[at : at + size])
        assert heard == sent
        assert not end.gone.done()
        end.connection_lost(None)
        assert end.gone.done()
        assert isinstance(heard[-1][1], WorkerDied)


async def test_a_start_that_is_refused_or_dies_raises_and_leaves_no_process(
    tmp_path: Path, imports: tuple[str, ...]
) -> None:
    for config, kind, words in (
        ({"refuse": "no such model"}, ConfigError, r"^no such model$"),
        ({"dies_at_start": str(tmp_path)}, EngineUnavailable, "process ended"),
    ):
        worker = Worker(TARGET, config, env=ENV, imports=imports)
        with pytest.raises(kind, match=words):
            await worker.start()
        assert worker.pid is None and not worker.up.is_set()


async def begun(worker: Worker) -> asyncio.Task[Any]:
    """A call that waits for ever, and has given its event."""
    task = asyncio.create_task(worker.call("wait", {}))
    await asyncio.sleep(0)
    await worker.call("echo", {})  # answered after the call before it
    return task


@in_its_loop
async def test_a_stream_closed_early_and_a_cancelled_task_cancel_their_calls(
    worker: Worker,
) -> None:
    before = await worker.call("cancelled", {})

    async def until(expected: int) -> None:
        async with asyncio.timeout(20):
            while await worker.call("cancelled", {}) != expected:
                await asyncio.sleep(0.02)

    stream = worker.stream("wait", {})
    assert await anext(stream) == ("event", "waiting")
    await until(before)
    await stream.aclose()
    await until(before + 1)
    task = await begun(worker)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(before + 2)


@in_its_loop
async def test_a_call_that_may_not_be_repeated_is_not_sent_again_and_another_thrice(
    worker: Worker, tmp_path: Path
) -> None:
    restarts = worker.restarts
    dying = worker.call("die_unless", {"file": str(tmp_path / "died")}, resend=False)
    with pytest.raises(WorkerDied, match="ended during this call") as caught:
        await dying
    assert caught.value.retry_after
    waiting = worker.call("echo", {"i": 1}, resend=False)  # made while there is no engine
    assert not worker.up.is_set() and await waiting == {"i": 1}
    assert worker.restarts == restarts + 1
    with pytest.raises(WorkerDied):  # a call that always kills the child is given up
        await worker.call("die", {})
    assert worker.restarts == restarts + 4
    assert await worker.call("echo", {}) == {}


@in_its_loop
async def test_kill_9_from_outside_loses_no_call(worker: Worker) -> None:
    waiting, restarts = await begun(worker), worker.restarts
    assert not waiting.done()
    os.kill(worker.pid or 0, signal.SIGKILL)
    await asyncio.sleep(0)
    assert await worker.call("echo", {"i": 1}) == {"i": 1}
    assert worker.restarts == restarts + 1
    # It gave an event before the crash, so it can not be repeated without its caller's knowledge.
    with pytest.raises(WorkerDied):
        await waiting


@pytest.mark.skipif(not can_fork(), reason="needs Linux and a CPU build of torch")
async def test_engines_outlive_what_they_were_forked_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProgram, "_forks", None)  # other tests' servers have theirs
    worker = Worker(TARGET, {}, env=ENV, imports=IMPORTS)
    await worker.start()
    try:
        first = worker.pid
        server = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
        assert await worker.call("echo", {"i": 1}) == {"i": 1}
        assert worker.restarts == 0
        worker.end()  # it is forked again, from another one
        assert await asyncio.wait_for(worker.call("echo", {"i": 2}), 30) == {"i": 2}
        assert worker.restarts == 1 and worker.pid not in (None, first)
    finally:
        await worker.close()


@forked_alone
async def test_on_ready_puts_the_state_back_before_calls_are_sent_again(
    imports: tuple[str, ...], tmp_path: Path
) -> None:
    """Also if a child dies in it."""

    async def restore(info: dict[str, Any]) -> None:
        assert info["model"] == "m"
        if worker.restarts:
            await worker.call("die_unless", {"file": str(tmp_path / "died")}, early=True)
        await worker.call("remember", {"value": 42}, early=True)

    worker = Worker(TARGET, {}, restore, env=ENV, imports=imports)
    try:
        await worker.start()
        assert await worker.call("recall", {}) == 42
        os.kill(worker.pid or 0, signal.SIGKILL)
        assert await asyncio.wait_for(worker.call("recall", {}), 30) == 42
        assert (tmp_path / "died").exists()
    finally:
        await worker.close()


@forked_alone
async def test_starts_that_keep_failing_end_in_a_refusal_until_one_works(
    imports: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_FAILED_STARTS", 2)
    monkeypatch.setattr(worker_module, "MAX_PAUSE", 0.2)
    flag = tmp_path / "flag"
    async with running(imports, {"dies_at_start": str(flag)}) as worker:
        flag.touch()
        with pytest.raises(EngineUnavailable, match="cannot be started"):
            await worker.call("die", {})
        with pytest.raises(EngineUnavailable, match="cannot be started"):
            await worker.call("echo", {})
        assert "cannot be started" in (worker.problem or "")
        flag.unlink()
        await asyncio.wait_for(worker.up.wait(), 30)
        assert worker.problem is None
        assert await worker.call("echo", {"i": 1}) == {"i": 1}


@in_its_loop
@pytest.mark.usefixtures("short_ticks")
async def test_a_child_that_is_stopped_is_replaced(worker: Worker) -> None:
    first, restarts = worker.pid, worker.restarts
    os.kill(first or 0, signal.SIGSTOP)
    assert await asyncio.wait_for(worker.call("echo", {"i": 1}), 30) == {"i": 1}
    assert (worker.restarts, worker.problem) == (restarts + 1, None)
    assert worker.pid != first


@forked_alone
@pytest.mark.usefixtures("short_ticks")
async def test_a_child_may_rest_without_calls_and_is_replaced_where_it_hangs_with_one(
    imports: tuple[str, ...],
) -> None:
    async with running(imports, hang_seconds=0.5) as worker:
        await asyncio.sleep(1.5)  # three times as long
        assert (worker.restarts, worker.problem) == (0, None)
        with pytest.raises(WorkerHung, match=r"did nothing for 0\.5 s"):
            await asyncio.wait_for(worker.call("hang", {}), 30)  # which is not sent again
        assert await worker.call("echo", {"i": 1}) == {"i": 1}
        assert worker.restarts == 1


async def test_close_fails_open_calls_and_ends_the_child(imports: tuple[str, ...]) -> None:
    async with running(imports) as worker:
        pid = worker.pid or 0
        task = await begun(worker)
        await worker.close()
        with pytest.raises(EngineUnavailable, match="shut down"):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(EngineUnavailable, match="shut down"):
            await worker.call("echo", {})


def test_the_child_ends_when_its_parent_is_killed(imports: tuple[str, ...]) -> None:
    code = (
        "import asyncio, sys\n"
        "from langchain_art_server.backends.ipc.worker import Worker\n"
        "async def main():\n"
        f"    worker = Worker({TARGET!r}, {{}}, imports={imports!r})\n"
        "    await worker.start()\n"
        "    print(worker.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | ENV
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(200):
        if not alive(child):
            return
        time.sleep(0.05)
    raise AssertionError("it runs")
