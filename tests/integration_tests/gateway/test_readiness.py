"""Readiness tells the truth of engines that are stopped, killed or not loaded yet."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from langchain_art.client.sync_client import ArtClient
from langchain_art.errors import EngineUnavailable
from tests.support.engines import engines, part_of
from tests.support.hot_swap import train_once
from tests.support.live_server import (
    ForkedServer,
    HastyServer,
    LiveServer,
    await_answer,
)
from tests.support.soak import share
from tests.support.steps_of_a_fit import rewarded, trained

ASK = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "?"}]}


def readiness(server: LiveServer) -> httpx.Response:
    return httpx.get(f"{server.root}/readyz", timeout=60)


def await_readiness(server: LiveServer, holds: Callable[[httpx.Response], bool]) -> httpx.Response:
    """The first answer for which it holds, within the 30 s in which a fault is noticed."""
    deadline = time.monotonic() + 120
    while True:
        answer = readiness(server)
        if holds(answer):
            return answer
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.slow
def test_an_engine_that_is_stopped_is_noticed_and_replaced(tmp_path: Path) -> None:
    with HastyServer(tmp_path / "data") as server:
        for pid in engines(server):
            part = part_of(pid)
            if part == "sampler" or share():  # `test_quotas` stops a learner
                is_noticed_and_replaced(server, pid, part)


def is_noticed_and_replaced(server: LiveServer, pid: int, part: str) -> None:
    os.kill(pid, signal.SIGSTOP)
    answer = await_readiness(server, lambda answer: answer.status_code == 503)
    assert answer.json()["ready"] is False
    assert "has not answered for" in answer.json()["reasons"][part]
    assert int(answer.headers["retry-after"]) > 0
    with ArtClient(server.base_url) as client:
        words = rf"The server is not ready\. {part}: .* has not answered for"
        with pytest.raises(EngineUnavailable, match=words):
            client.ready(timeout=0.1)
    assert httpx.get(f"{server.root}/healthz").status_code == 200
    if part == "sampler":  # a call that it was sent meanwhile is not sent to the next one
        ended = httpx.post(f"{server.base_url}/chat/completions", json=ASK, timeout=60)
        assert ended.status_code == 503 and "ended during this call" in ended.text
        assert int(ended.headers["retry-after"]) > 0
    await_readiness(server, lambda answer: "started" in answer.text or answer.is_success)
    await_readiness(server, lambda answer: answer.json() == {"ready": True})
    assert pid not in engines(server)


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
        await_answer(f"{self.root}/readyz", self.process, self.log, holds=lambda answer: True)


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


CALLS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    data = tmp_path_factory.mktemp("replicas") / "data"
    with ForkedServer(data, module="tests.support.replicated_server") as made:
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


@dataclass(frozen=True)
class Answer:
    begun: float
    ended: float
    response: httpx.Response


def keep_asking(server: LiveServer, stop: Event, answers: list[Answer]) -> None:
    """One call after the other, until a step is done."""
    with server.http() as http:
        while not stop.is_set():
            begun = time.monotonic()
            response = http.post("/v1/chat/completions", json=ASK)
            answers.append(Answer(begun, time.monotonic(), response))
            if response.status_code == 503:
                stop.wait(0.05)


def test_calls_wait_for_a_step_and_are_answered_by_what_it_made(tmp_path: Path) -> None:
    """With vLLM, steps and calls take turns in `test_backend_pairs`."""
    settings = "take_turns = true\nmax_waiting_calls = 2\n"
    server = ForkedServer(tmp_path / "data", settings=settings).start()
    stop, answers = Event(), [list[Answer]() for _ in range(6)]
    with ExitStack() as ending:
        ending.callback(server.stop)
        pool = ending.enter_context(ThreadPoolExecutor(6))
        ending.callback(stop.set)
        http = ending.enter_context(server.http())
        ids = [
            rewarded(http, f"turns-{seed}", float(seed % 2), seed=seed, max_tokens=64)
            for seed in range(8)
        ]
        asking = [pool.submit(keep_asking, server, stop, found) for found in answers]
        # A step is soon over: all are to ask while it runs.
        while not all(found or one.done() for found, one in zip(answers, asking, strict=True)):
            time.sleep(0.01)
        job = trained(http, [ids], config={"learning_rate": 2e-5, "optimizer_steps": 4})
    assert job["state"] == "succeeded", job
    all_of_them = [answer for found in answers for answer in found]
    refused = [answer for answer in all_of_them if answer.response.status_code != 200]
    assert {answer.response.status_code for answer in refused} == {503}
    for one in refused:
        assert int(one.response.headers["retry-after"]) >= 1
        assert "2 calls wait" in one.response.json()["error"]["message"]
        meanwhile = [
            answer.response.json()["model"]
            for answer in all_of_them
            if answer.begun < one.ended
            and answer.ended > one.begun
            and answer.response.status_code == 200
        ]
        assert meanwhile.count("tiny@1") >= 2  # those that waited
