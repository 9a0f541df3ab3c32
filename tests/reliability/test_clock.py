"""The wall clock steps back while calls run: only what is displayed changes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.live_server import FaultyServer

ASK: list[Any] = [{"role": "user", "content": "When is the falcon review?"}]


@pytest.fixture
def http(faulty_server: FaultyServer) -> Iterator[httpx.Client]:
    with faulty_server.http() as client:
        yield client
    faulty_server.fault("")


def ask(http: httpx.Client, run: str, messages: list[Any] = ASK, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "seed": 1}
    answer = http.post("/v1/chat/completions", json=body | {"art": {"trajectory_id": run}} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rewarded(http: httpx.Client, run: str) -> list[dict[str, Any]]:
    answer = http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0})
    assert answer.status_code == 200, answer.text
    return answer.json()["turns"]


def test_a_step_back_during_a_call(http: httpx.Client, faulty_server: FaultyServer) -> None:
    run = f"t-{uuid.uuid4().hex}"
    step = threading.Timer(0.1, faulty_server.fault, ["clock -20"])
    step.start()
    begun = time.monotonic()
    ask(http, run, max_tokens=256)
    step.join()
    assert time.monotonic() - begun > 0.1, "the call had ended before the clock was set"
    [turn] = rewarded(http, run)
    assert 0.1 < turn["latency"] <= time.monotonic() - begun


def test_a_step_back_between_turns(http: httpx.Client, faulty_server: FaultyServer) -> None:
    run = f"t-{uuid.uuid4().hex}"
    first = ask(http, run)
    faulty_server.fault("clock -20")
    reply = first["choices"][0]["message"]
    second = ask(http, run, [*ASK, reply, {"role": "user", "content": "go on"}])
    turns = rewarded(http, run)
    assert [turn["call_id"] for turn in turns] == [first["id"], second["id"]]
    assert [turn["extends"] for turn in turns] == [None, 0]
    newest = http.get("/v1/trajectories", params={"limit": 1}).json()["data"]
    assert [one["id"] for one in newest] == [run]
