"""An engine whose process another process holds: over TCP, with files that are copied to it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import EngineUnavailable
from langchain_art_server.backends.ipc.child_process import SECRET_BYTES, NoPlace
from langchain_art_server.backends.ipc.worker import Worker, WorkerDied
from langchain_art_server.backends.ray.engines import EngineHost, RayPlace
from tests.support.engines import alive
from tests.support.local_actors import LocalActors

REPO = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("seats_here")
TARGET = "tests.support.worker_child:serve"
ENV = {"PYTHONPATH": f"{REPO}:{REPO / 'server'}"}


@pytest.fixture
async def make() -> AsyncIterator[Callable[[], Any]]:
    made: list[Worker] = []

    async def start() -> Worker:
        made.append(Worker(TARGET, {}, env=ENV, place=RayPlace("Replica 0", {"CPU": 1}, 5)))
        await made[-1].start()
        return made[-1]

    yield start
    for worker in made:
        await worker.close()


async def pid_of(worker: Worker) -> int:
    infos: list[dict[str, Any]] = []

    async def note(info: dict[str, Any]) -> None:
        infos.append(info)

    worker._on_ready = note
    worker.end()
    while not infos:
        await asyncio.sleep(0.02)
    await worker.call("echo", {})
    return infos[-1]["pid"]


async def test_calls_pass_through_a_killed_engine_starts_again_and_ends_with_its_connection(
    make: Any,
) -> None:
    worker = await make()
    sent = {"text": 'é😀\x00"\n' + "x" * (2 << 20), "floats": [0.1, -5.342500686645508, 1e-300]}
    assert await worker.call("echo", sent) == sent
    pid = await pid_of(worker)
    stream = worker.stream("wait", {}, resend=False)
    assert await anext(stream) == ("event", "waiting")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await anext(stream)
    assert await worker.call("echo", {"again": True}) == {"again": True}
    assert worker.restarts == 2
    pid, placed = await pid_of(worker), worker.place._placed
    assert alive(pid)
    await worker.close()
    for _ in range(250):
        if not alive(pid):
            break
        await asyncio.sleep(0.02)
    assert not alive(pid) and placed.closed


async def test_without_room_calls_are_refused_with_what_is_missing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await make()
    monkeypatch.setattr(LocalActors, "missing", "Replica 0 waits for room: Missing: GPU")
    worker.end()
    with pytest.raises(EngineUnavailable, match="Missing: GPU"):
        async with asyncio.timeout(20):
            while True:
                await worker.call("echo", {})
                await asyncio.sleep(0.02)
    assert worker.problem == "Replica 0 waits for room: Missing: GPU"
    monkeypatch.setattr(LocalActors, "missing", "")
    async with asyncio.timeout(20):
        while not worker.up.is_set():
            await asyncio.sleep(0.02)
    assert await worker.call("echo", {"i": 1}) == {"i": 1} and worker.problem is None


async def test_a_start_without_room_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalActors, "missing", "Missing: CPU")
    worker = Worker(TARGET, {}, env=ENV, place=RayPlace("Replica 0", {"CPU": 1}, 5))
    with pytest.raises(NoPlace, match="Missing: CPU"):
        await worker.start()
    await worker.close()


async def test_files_are_where_the_engine_is_while_they_are_needed(
    make: Any, tmp_path: Path
) -> None:
    worker = await make()
    for name, content in (("a", b"\x00\xff"), ("b", b"not asked for")):
        (tmp_path / name).write_bytes(content)
    async with worker.place.folder(tmp_path, ("a",)) as copy:
        assert copy != tmp_path and copy.parent.stat().st_mode & 0o777 == 0o700
        assert {one.name: one.read_bytes() for one in copy.iterdir()} == {"a": b"\x00\xff"}
    assert not copy.exists()


def test_only_who_knows_the_secret_gets_the_engine() -> None:
    host = EngineHost()
    address, port, said = host.start((TARGET, {}, ENV, (), sys.executable), 60)
    secret = bytes.fromhex(said)
    assert len(secret) == SECRET_BYTES
    for wrong in (b"\x00" * SECRET_BYTES, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection((address, port), timeout=10) as stranger:
            stranger.sendall(wrong)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    with socket.create_connection((address, port), timeout=10) as server:
        server.sendall(secret)
        body = b'[1,"call",{"method":"echo","params":{"i":1}}]'
        server.sendall(len(body).to_bytes(4, "big") + body)
        size = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
        assert server.recv(size, socket.MSG_WAITALL) == b'[1,"result",{"i":1}]'
        with pytest.raises(ConnectionRefusedError):  # one connection, and no second
            socket.create_connection((address, port), timeout=10)
    host._end()
