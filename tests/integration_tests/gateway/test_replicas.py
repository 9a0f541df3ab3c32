"""Two real engines behind one server: what is told when one dies, and what its calls get."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines import engines, part_of
from tests.support.hot_swap import train_once
from tests.support.live_server import ForkedServer

CALLS = 24


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkedServer]:
    with ForkedServer(tmp_path / "data", module="tests.support.replicated_server") as made:
        yield made


def until(http: httpx.Client, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not holds(found := http.get("/status").json()):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def ask(http: httpx.Client, number: int, tokens: int) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"When is audit {number}?"}]}
    # Hot enough to go on for long.
    body |= {"max_tokens": tokens, "temperature": 2.0, "art": {"trajectory_id": f"run-{number}"}}
    return http.post("/v1/chat/completions", json=body)


def test_no_call_is_lost_when_an_engine_is_killed(server: ForkedServer) -> None:
    with server.http() as http, ThreadPoolExecutor(CALLS) as pool:
        train_once(http, 0)
        told = until(http, lambda found: True)["replicas"]
        assert [(one["name"], one["problem"], one["missing"]) for one in told] == [
            ("0", None, 0),
            ("1", None, 0),
        ]
        before = http.get("/status").json()["calls"]
        calls = [pool.submit(ask, http, number, 200) for number in range(CALLS)]
        busy = lambda found: all(one["running_calls"] >= 4 for one in found["replicas"])  # noqa: E731
        until(http, busy)
        victim = [pid for pid in engines(server) if part_of(pid) == "sampler"][1]
        os.kill(victim, signal.SIGKILL)
        away = until(http, lambda found: any(one["problem"] for one in found["replicas"]))
        assert away["ready"] and away["reasons"] == {}
        answers = [call.result() for call in calls]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["model"] for answer in answers} == {"tiny@1"}
        assert http.get("/status").json()["calls"] == before + CALLS
        back = until(http, lambda found: not any(one["problem"] for one in found["replicas"]))
        assert back["engine_restarts"] == 1
        assert [one["missing"] for one in back["replicas"]] == [0, 0]
        assert http.get("/readyz").json() == {"ready": True, "replicas": {"0": None, "1": None}}
        train_once(http, 1)
        models = [ask(http, CALLS + number, 4).json()["model"] for number in range(4)]
        assert models == ["tiny@2"] * 4
    assert "is made again" in server.log.read_text()


def test_the_server_is_not_ready_once_no_engine_is(server: ForkedServer) -> None:
    with server.http() as http:
        for pid in engines(server):
            if part_of(pid) == "sampler":
                os.kill(pid, signal.SIGKILL)
        while (answer := http.get("/readyz")).status_code == 200:
            time.sleep(0.001)
        why = answer.json()["reasons"]["sampler"]
        assert why.startswith("none of its replicas answers (0: its process is being started; 1: ")
        assert ask(http, 0, 4).status_code == 200  # it waits
