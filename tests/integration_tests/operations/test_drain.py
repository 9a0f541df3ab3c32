"""The end of a server on SIGTERM: what runs ends, nothing is lost, and what is cut is counted."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines import engines, part_of
from tests.support.live_server import FaultyServer, ForkedServer, LiveServer
from tests.support.soak import count
from tests.support.steps_of_a_fit import new_id, ok, rewarded

CHAT = "/v1/chat/completions"
SAY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "When?"}]}
CALLERS, DRAINS = 100, count(1, 200)
SUMMARY = re.compile(
    r"Stopped after ([\d.]+) s: (\d+) running requests ended, (\d+) were cut, (\d+) new ones were"
)


def said_by(server: LiveServer) -> str:
    """The log on one line, which the console breaks into several."""
    return " ".join(server.log.read_text().split())


def summary(server: LiveServer) -> tuple[float, int, int, int]:
    """Seconds; requests that ended, were cut, were refused."""
    seconds, *numbers = SUMMARY.findall(said_by(server))[-1]
    return float(seconds), *map(int, numbers)


def started(server: LiveServer, seconds: float) -> Any:
    """The process of a server with so many `drain_seconds`, started."""
    file = server.data_dir.with_suffix(".toml")
    file.write_text(f"drain_seconds = {seconds}\n")
    if str(file) not in server._args:
        server._args += ["--config", str(file)]
    return server.start().process


def goes_on(server: LiveServer, job: dict[str, Any]) -> dict[str, Any]:
    """The job of a server that was ended and has been started again, which has succeeded."""
    with server.http() as http:
        found = http.get(f"/v1/jobs/{job['id']}", params={"wait": 30}).json()
    assert found["state"] == "succeeded", found
    return found


async def call_until_refused(server: LiveServer, number: int, answered: set[str]) -> None:
    """One call after the other, until the server takes no more."""
    body = SAY | {"max_tokens": 12, "seed": number, "stream": number % 2 == 0}
    async with httpx.AsyncClient(base_url=server.root, timeout=60) as http:
        while True:
            answer = None
            try:
                async with http.stream("POST", CHAT, json=body) as answer:
                    said = (await answer.aread()).decode()
            except httpx.TransportError:
                assert answer is None, "an answer was cut"
                return
            if answer.status_code == 503:
                assert "retry-after" in answer.headers
                return
            assert answer.status_code == 200, said
            assert not body["stream"] or "data: [DONE]" in said
            answered.add(re.findall(r'"id":"(chatcmpl-\w+)"', said)[0])


async def drained(server: LiveServer, answered: set[str]) -> float:
    """SIGTERM under many callers; the seconds until the process has ended."""
    process, enough = server.process, len(answered) + CALLERS // 2
    assert process is not None
    async with asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            group.create_task(call_until_refused(server, number, answered))
        while len(answered) < enough:
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0
        return time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(max(300, 20 * DRAINS))
def test_no_call_is_lost_by_a_drain(tmp_path: Path) -> None:
    """Each call is answered whole and stored, or was refused before anything was done for it."""
    server = ForkedServer(tmp_path / "data")
    answered, seconds = set[str](), list[float]()
    for _ in range(DRAINS):
        seconds.append(asyncio.run(drained(server.start(), answered)))
        assert summary(server)[2] == 0  # by the deadline
    with sqlite3.connect(server.data_dir / "art.sqlite3") as database:
        stored = {row[0] for row in database.execute("select id from calls")}
    assert answered <= stored
    print(f"{DRAINS} drains, {len(answered)} calls, at most {max(seconds):.1f} s")  # noqa: T201


def pause_sampler(server: LiveServer) -> None:
    for pid in engines(server):
        if part_of(pid) == "sampler":
            os.kill(pid, signal.SIGSTOP)


def running_calls(http: httpx.Client) -> float:
    found = re.search(r"^langchain_art_calls\S* ([\d.]+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def two_runs(http: httpx.Client) -> list[str]:
    return [rewarded(http, new_id("run"), float(n), max_tokens=4, seed=n) for n in range(2)]


def training(http: httpx.Client, runs: list[str]) -> dict[str, Any]:
    """The job of these runs, which has begun."""
    train = {"policy": "tiny", "groups": [runs]}
    job = ok(http.post("/v1/train", json=train, headers={"Idempotency-Key": runs[0]}))
    while http.get(f"/v1/jobs/{job['id']}").json()["state"] != "running":
        time.sleep(0.02)
    return job


def waiting_job(server: FaultyServer, http: httpx.Client) -> dict[str, Any]:
    """A job of two runs, which waits in its step, or before it, until the fault is taken back."""
    runs = two_runs(http)
    server.fault("learner waits")
    return training(http, runs)


@pytest.mark.wall_clock  # a poll ends at once, or after 30 s
def test_a_drain_waits_for_a_step_and_cuts_what_takes_too_long(tmp_path: Path) -> None:
    server = FaultyServer(tmp_path / "data")
    job = alive_and_not_ready(server, started(server, 60))
    process = started(server, 0.5)
    assert goes_on(server, job)["attempts"] == 1  # the step that ran was finished, not done again
    with server.http() as http:
        assert http.get("/v1/policies/tiny").json()["version"] == 1
    job = cut_and_counted(server, process)
    server.fault("")
    process = started(server, 0.5)
    goes_on(server, job)
    job = asks_a_sampler_that_is_cut(server, process)
    process = started(server, 3600)
    goes_on(server, job)
    ends_at_a_second_interrupt(server, process)


def alive_and_not_ready(server: FaultyServer, process: Any) -> dict[str, Any]:
    """While it drains; the job that it waits for."""
    with server.http() as http:
        job = waiting_job(server, http)
        polled: list[dict[str, Any]] = []

        def poll() -> None:
            with server.http() as other:
                polled.append(other.get(f"/v1/jobs/{job['id']}", params={"wait": 30}).json())

        waiter = threading.Thread(target=poll)
        waiter.start()
        time.sleep(1.0)  # it is sent
        process.send_signal(signal.SIGHUP)  # as SIGTERM
        while (ready := http.get("/readyz")).status_code == 200:
            time.sleep(0.02)
        assert "shutting down" in ready.json()["reasons"]["server"]
        assert http.get("/healthz").status_code == 200
        assert "langchain_art_ready 0.0" in http.get("/metrics").text
        refused = http.post(CHAT, json=SAY)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        refused = http.post("/v1/messages", json=SAY)
        assert refused.status_code == 503 and refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "overloaded_error"
        with httpx.Client(base_url=server.root) as new:  # on a new connection, too
            assert new.get("/v1/models").status_code == 503
        waiter.join(15)
        assert [one["state"] for one in polled] == ["running"], "a poll is no reason to wait"
        assert process.poll() is None, "the step runs"
        server.fault("")
        assert process.wait(60) == 0
    _, ended, cut, refusals = summary(server)
    assert (ended, cut, refusals) == (1, 0, 3)
    return job


def cut_and_counted(server: FaultyServer, process: Any) -> dict[str, Any]:
    """What does not end in time; the job that was cut."""
    answers: dict[str, tuple[int, str, str]] = {}
    begun: dict[str, threading.Event] = {f"stream {n}": threading.Event() for n in range(4)}

    def call(name: str, **more: Any) -> None:
        body = SAY | {"max_tokens": 1500} | more
        with server.http() as http, http.stream("POST", CHAT, json=body) as answer:
            said = ""
            for text in answer.iter_text():
                said += text
                if answer.status_code == 200 and name in begun:
                    begun[name].set()
            retry = answer.headers.get("retry-after", "")
            answers[name] = answer.status_code, retry, said

    with server.http() as http:
        job = waiting_job(server, http)
    streams = [
        threading.Thread(target=call, args=(name,), kwargs={"stream": True, "n": 8})
        for name in begun
    ]
    for one in streams:
        one.start()
    assert all(one.wait(60) for one in begun.values())
    pause_sampler(server)
    with server.http() as http:
        before, held = -1, running_calls(http)
        while held != before:  # what it had answered has come
            time.sleep(0.3)
            before, held = held, running_calls(http)
        whole = threading.Thread(target=call, args=("whole",))
        whole.start()
        while running_calls(http) == held:
            time.sleep(0.02)
    process.terminate()
    assert process.wait(60) == 0
    for one in (*streams, whole):
        one.join(20)
    status, retry, said = answers.pop("whole")
    assert (status, json.loads(said)["error"]["code"]) == (503, "engine_unavailable")
    assert int(retry) > 0
    cut = 1
    for status, _, said in answers.values():
        if status == 200:  # what has begun ends with an error, unless it had ended before
            last = [line for line in said.splitlines() if line][-1]
            assert last == "data: [DONE]" or "engine_unavailable" in last
            cut += last != "data: [DONE]"
        else:
            assert status == 503
            cut += 1
    assert cut >= 2 and summary(server)[2] == cut
    assert f"The job {job['id']} goes on at the next start." in said_by(server)
    return job


def asks_a_sampler_that_is_cut(server: LiveServer, process: Any) -> dict[str, Any]:
    """Before its step, and after it, a job asks the sampler for probes; it goes on."""
    with server.http() as http, ThreadPoolExecutor(1) as pool:
        runs = two_runs(http)
        pause_sampler(server)
        job = training(http, runs)  # on a sampler that does not answer
        call = begun_call(server, http, pool)
        process.terminate()
        assert process.wait(60) == 0
        assert call.result().status_code == 503
    assert summary(server)[2] == 1
    assert f"The job {job['id']} goes on at the next start." in said_by(server)
    return job


def begun_call(
    server: LiveServer, http: httpx.Client, pool: ThreadPoolExecutor
) -> Future[httpx.Response]:
    call = pool.submit(httpx.post, f"{server.root}{CHAT}", json=SAY, timeout=60)
    while running_calls(http) == 0:
        time.sleep(0.02)
    return call


def ends_at_a_second_interrupt(server: LiveServer, process: Any) -> None:
    """Whatever the deadline is, and a call that runs is refused."""
    pause_sampler(server)
    with server.http() as http, ThreadPoolExecutor(1) as pool:
        call = begun_call(server, http, pool)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert call.result().status_code == 503
    assert summary(server)[2] == 1


def test_an_idle_server_ends_by_itself(tmp_path: Path) -> None:
    """A job keeps it; what only reads or is refused, and workers without work, do not."""
    server = FaultyServer(tmp_path / "data")
    server._args += ["--stop-when-idle-seconds", "2"]
    server.start()
    process, begun = server.process, time.monotonic()
    assert process is not None
    with server.http() as http:
        waiting_job(server, http)
        time.sleep(2.5)
        assert process.poll() is None, "a job runs"
        server.fault("")
        asked, lease = 0, {"worker": "w", "rollout": "agent:play", "slots": 1, "free": 1}
        with contextlib.suppress(httpx.TransportError):
            while process.poll() is None and time.monotonic() < begun + 60:
                http.get("/status")
                assert http.post(CHAT, json={}).status_code in (400, 503)
                assert http.post("/v1/rollouts/lease", json=lease).status_code in (200, 503)
                asked += 1
                time.sleep(0.2)
    assert asked > 1
    assert process.wait(60) == 0
    assert "No call and no job for 2 s" in said_by(server)
    server._args[-1] = "0.001"  # idle as it starts
    process = server._launch()
    assert process.wait(120) == 0, server.log.read_text()
    assert said_by(server).count("No call and no job for") == 2
    assert "Traceback" not in said_by(server)
