"""Readiness tells the truth: engines that are stopped or cannot start, a database that is gone."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import httpx
import pytest

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import EngineUnavailable
from tests.support.engines import engines, part_of
from tests.support.live_server import TLS, ForkedServer, LiveServer
from tests.support.postgres import Postgres

ASK = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "?"}]}


def readiness(server: LiveServer) -> httpx.Response:
    return httpx.get(f"{server.root}/readyz", timeout=60, verify=TLS)


def await_readiness(server: LiveServer, holds: Callable[[httpx.Response], bool]) -> httpx.Response:
    """The first answer for which it holds, within the 30 s in which a fault is noticed."""
    deadline = time.monotonic() + 120
    while True:
        answer = readiness(server)
        if holds(answer):
            return answer
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


@pytest.mark.slow
def test_an_engine_that_is_stopped_is_noticed_and_replaced(art_server: LiveServer) -> None:
    await_readiness(art_server, lambda answer: answer.status_code == 200)
    for pid in engines(art_server):
        part = part_of(pid)
        os.kill(pid, signal.SIGSTOP)
        answer = await_readiness(art_server, lambda answer: answer.status_code == 503)
        assert answer.json()["ready"] is False
        assert "has not answered for" in answer.json()["reasons"][part]
        assert int(answer.headers["retry-after"]) > 0
        with ArtClient(art_server.base_url) as client:
            words = rf"The server is not ready\. {part}: .* has not answered for"
            with pytest.raises(EngineUnavailable, match=words):
                client.ready(timeout=0.1)
        assert httpx.get(f"{art_server.root}/healthz").status_code == 200
        if part == "sampler":  # a call that it was sent meanwhile is not sent to the next one
            ended = httpx.post(f"{art_server.base_url}/chat/completions", json=ASK, timeout=60)
            assert ended.status_code == 503 and "ended during this call" in ended.text
            assert int(ended.headers["retry-after"]) > 0
        await_readiness(art_server, lambda answer: "started" in answer.text or answer.is_success)
        await_readiness(art_server, lambda answer: answer.json() == {"ready": True})
        assert pid not in engines(art_server)


def test_a_database_that_is_gone_is_told_until_it_is_back(
    tmp_path: Path, postgres: Postgres
) -> None:
    with ForkedServer(tmp_path / "data", "--database-url", postgres.database()) as server:
        postgres.crash()
        answer = await_readiness(server, lambda answer: answer.status_code == 503)
        assert "cannot be written to or read" in answer.json()["reasons"]["store"]
        postgres.start()
        await_readiness(server, lambda answer: answer.json() == {"ready": True})


class LoadingServer(ForkedServer):
    """Starts when the file `start_when` is there."""

    def __init__(self, folder: Path) -> None:
        self.start_when = folder / "start"
        super().__init__(
            folder / "data",
            env={"START_WHEN": str(self.start_when)},
            module="tests.support.waiting_server",
        )

    def listen(self) -> None:
        """Launch it, and wait for the first answer."""
        self.process = self._launch()
        deadline = time.monotonic() + 120
        while True:
            try:
                readiness(self)
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.02)


def test_a_server_that_loads_its_model_says_so(tmp_path: Path) -> None:
    server, said = LoadingServer(tmp_path), list[str]()
    server.listen()
    words = "The server is loading its model"
    try:
        with (
            ArtClient(server.base_url, patience=1) as hasty,
            ArtClient(server.base_url, patience=120, on_wait=said.append) as client,
            httpx.Client(base_url=server.root, timeout=60) as kept,
        ):
            with pytest.raises(EngineUnavailable, match=words):
                hasty.status()
            for path in ("/healthz", "/readyz", "/status", "/nowhere"):
                answer = kept.get(path)
                assert answer.status_code == 503 and answer.headers["retry-after"] == "2", path
            long = kept.post("/v1/chat/completions", content=b"x" * (1 << 20))
            assert long.status_code == 503
            waiting = Thread(target=client.status)
            waiting.start()
            while not said:
                time.sleep(0.02)
            server.start_when.touch()
            waiting.join()
            assert words in said[0] and said[-1].startswith(f"{server.base_url} answers again")
            assert kept.get("/healthz").status_code == 200
            assert kept.post("/v1/chat/completions", json=ASK).status_code == 200
    finally:
        server.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_is_ended_while_it_loads(tmp_path: Path, number: int) -> None:
    server = LoadingServer(tmp_path)
    server.listen()
    assert server.process is not None
    server.process.send_signal(number)
    assert server.process.wait(60) != 0
    with pytest.raises(httpx.ConnectError):
        readiness(server)
