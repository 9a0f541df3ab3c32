"""The wall clock steps back and forth while calls and jobs run: only what is displayed changes."""

import random
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.hot_swap import train_once
from tests.support.live_server import FaultyServer
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.steps_of_a_fit import ok

JUMPS = count(3, 200)
CHAT = "/v1/chat/completions"
YEAR = 365 * 86_400
ASK: list[Any] = [{"role": "user", "content": "When is the falcon review?"}]


@pytest.fixture
def http(faulty_server: FaultyServer) -> Iterator[httpx.Client]:
    with faulty_server.http() as client:
        yield client
    faulty_server.fault("")


def ask(http: httpx.Client, run: str, messages: list[Any] = ASK, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "seed": 1}
    return ok(http.post(CHAT, json=body | {"art": {"trajectory_id": run}} | more))


def rewarded(http: httpx.Client, run: str) -> list[dict[str, Any]]:
    return ok(http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0}))["turns"]


def test_a_step_back_during_a_call(http: httpx.Client, faulty_server: FaultyServer) -> None:
    run = f"t-{uuid.uuid4().hex}"
    body = {"model": "tiny", "messages": ASK, "max_tokens": 256, "seed": 1, "stream": True}
    begun = time.monotonic()
    with http.stream("POST", CHAT, json=body | {"art": {"trajectory_id": run}}) as answer:
        parts = answer.iter_lines()
        next(parts)
        faulty_server.fault("clock -20")
        assert list(parts), "the call had ended before the clock was set"
    [turn] = rewarded(http, run)
    assert 0 < turn["latency"] <= time.monotonic() - begun


@pytest.mark.soak("F6", JUMPS, "jumps of the server's clock, up to ten years")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 1800))
def test_no_jump_changes_an_order_a_limit_or_a_step(
    http: httpx.Client, faulty_server: FaultyServer
) -> None:
    draw, policy = random.Random(drawn_seed()), f"p-{uuid.uuid4().hex[:8]}"
    http.post("/v1/policies", json={"name": policy}).raise_for_status()
    restarts = http.get("/status").json()["engine_restarts"]
    runs = list[str]()
    for step in range(JUMPS):
        now = draw.choice((-10 * YEAR, 10 * YEAR, -3600, 3600, draw.randint(-YEAR, YEAR)))
        faulty_server.fault(f"clock {now}")
        runs.append(f"t-{uuid.uuid4().hex}")
        begun = time.monotonic()
        first = ask(http, runs[-1], model=policy)
        faulty_server.fault(f"clock {-now}")
        said = [*ASK, first["choices"][0]["message"], {"role": "user", "content": "go on"}]
        second = ask(http, runs[-1], said, model=policy)
        turns = rewarded(http, runs[-1])
        assert [turn["call_id"] for turn in turns] == [first["id"], second["id"]]
        assert [turn["extends"] for turn in turns] == [None, 0]
        assert all(0 <= turn["latency"] <= time.monotonic() - begun for turn in turns)
        newest = http.get("/v1/trajectories", params={"limit": len(runs), "prefix": "t-"}).json()
        assert [one["id"] for one in newest["data"]] == runs[::-1]
        if step % 5 == 0:
            train_once(http, step // 5, policy)
            jobs = http.get("/v1/jobs", params={"policy": policy}).json()["data"]
            assert [job["result"]["version"] for job in jobs] == list(range(1, step // 5 + 2))
            kept = http.get(f"/v1/policies/{policy}/checkpoints").json()["data"]
            numbers = [one["version"] for one in kept]
            assert numbers == sorted(numbers) and numbers[-1] == step // 5 + 1
    status = http.get("/status").json()
    assert status["engine_restarts"] == restarts and status["ready"]
    assert status["uptime"] < YEAR
