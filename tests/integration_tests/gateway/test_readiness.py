"""Readiness tells the truth: engines that are stopped or cannot start, a database that is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

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
    server = ForkedServer(tmp_path / "data", "--database-url", postgres.database()).start()
    try:
        postgres.crash()
        answer = await_readiness(server, lambda answer: answer.status_code == 503)
        assert "cannot be written to or read" in answer.json()["reasons"]["store"]
        postgres.start()
        await_readiness(server, lambda answer: answer.json() == {"ready": True})
    finally:
        server.stop()
