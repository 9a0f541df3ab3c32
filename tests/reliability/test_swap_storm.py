"""Versions change, and engines are killed and stopped, under many calls.

Each call is whole and of the version that it began with, or refused in words.
"""

import json
import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from langchain_art import ArtClient, TrainConfig
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from tests.support.engines import engines, resident
from tests.support.hot_swap import check_versions, train_once
from tests.support.live_server import LiveServer, small_model
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.steps_of_a_fit import rewarded
from tests.support.stub_engines import StubServer, marked

STEPS, CALLERS = count(1, 3), 8
KILLS, HANGS, MANY = count(3, 100), count(0, 20), count(16, 32)
SWAPS, STORMED = count(8, 3000), count(32, 64)
#: Versions that may have a directory: those that are kept, the first, the one that serves, and
#: those that answer calls just now.
KEPT = 4 + 2 + 8
POLICY = "swapped"


class Caller(threading.Thread):
    """Calls one after the other, streamed and not; keeps what it got."""

    def __init__(self, server: LiveServer, number: int, stop: threading.Event, **asked: Any):
        super().__init__(daemon=True)
        self._server, self._number, self._stop_it, self._asked = server, number, stop, asked
        self.whole: list[str] = []
        self.met: Counter[str] = Counter()

    def run(self) -> None:
        with self._server.http() as http:
            while not self._stop_it.is_set():
                turn = sum(self.met.values())
                said = [{"role": "user", "content": f"{self._number} {turn % 8}"}]
                body = {"messages": said, "stream": turn % 2 == 0} | self._asked
                with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    content = answer.read()
                if answer.status_code == 503:
                    assert int(answer.headers["retry-after"]) > 0
                    assert json.loads(content)["error"]["code"] == "engine_unavailable"
                    self.met["refused"] += 1
                    time.sleep(0.02)
                    continue
                assert answer.status_code == 200, content
                self._heard(content, streamed=turn % 2 == 0)

    def _heard(self, content: bytes, streamed: bool) -> None:
        if not streamed:
            self.whole.append(json.loads(content)["id"])
            self.met["whole"] += 1
            return
        events = [line[6:] for line in content.decode().split("\n") if line.startswith("data: ")]
        if events[-1] == "[DONE]":
            self.whole.append(json.loads(events[0])["id"])
            self.met["streamed whole"] += 1
        else:  # an error after the reply had begun
            assert json.loads(events[-1])["error"]["code"] == "engine_unavailable", events[-1]
            self.met["ended by an error"] += 1


@pytest.mark.soak
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_keep_the_version_that_they_began_with(art_server: LiveServer) -> None:
    stop = threading.Event()
    # Hot enough to go on for long: the version changes in the middle of most calls.
    asked = {"model": POLICY, "max_tokens": 200, "temperature": 1.5}
    callers = [Caller(art_server, number, stop, **asked) for number in range(CALLERS)]

    def ended() -> int:
        return sum(caller.met.total() for caller in callers)

    with ArtClient(art_server.base_url) as client:
        client.create_policy(POLICY)
    try:
        with art_server.http() as http:
            for caller in callers:
                caller.start()
            for step in range(STEPS):
                train_once(http, step, POLICY)
                # One call more than there are callers: its caller began it after the swap.
                enough = ended() + CALLERS + 1
                while ended() < enough:
                    time.sleep(0.02)
            stop.set()
            for caller in callers:
                caller.join()
            assert {how for caller in callers for how in caller.met} == {"whole", "streamed whole"}
            whole = [call for caller in callers for call in caller.whole]
            records = [http.get(f"/v1/calls/{call}").json() for call in whole]
    finally:
        stop.set()
    by_version: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_version[record["version"]].append(record)
    assert set(by_version) == set(range(STEPS + 1))
    # Those at the swaps are the last and the first.
    sample = [call for calls in by_version.values() for call in calls[:6] + calls[-6:]]
    check_versions(art_server, sample, small_model(), POLICY)


@pytest.mark.soak("F8", SWAPS, f"swaps under {STORMED} callers")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 7200))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_storm_of_versions_fails_no_call_and_mixes_none(tmp_path: Path) -> None:
    """A new version each 200 ms, over engines that say which weights they have."""
    server, stop = StubServer(tmp_path / "data", seconds=(0.05, 0.5)), threading.Event()
    server.start()
    server.policy = POLICY
    asked = {"model": POLICY, "max_tokens": 200, "temperature": 1.5}
    callers = [Caller(server, number, stop, **asked) for number in range(STORMED)]
    folders = server.data_dir / "adapters" / POLICY
    weights: dict[int, Path] = {}
    try:
        with ArtClient(server.base_url) as client, server.http() as http:
            client.create_policy(POLICY)
            with ThreadPoolExecutor(64) as pool:
                groups = list(pool.map(lambda step: sampled(http, step), range(SWAPS)))
            for caller in callers:
                caller.start()
            memory: list[int] = []
            begun = time.monotonic()
            for step, group in enumerate(groups):
                job = client.train([group], POLICY, TrainConfig(max_staleness=None))
                assert client.wait(job).version == step + 1
                time.sleep(max(0.0, begun + 0.2 * step - time.monotonic()))
                weights[step + 1] = tmp_path / f"weights-{step + 1}"
                shutil.copy(folders / str(step + 1) / WEIGHTS_FILE, weights[step + 1])
                assert len(list(folders.iterdir())) <= KEPT
                memory.append(resident([server.process.pid, *engines(server)]))
            stop.set()
            for caller in callers:
                caller.join()
            assert {how for caller in callers for how in caller.met} == {"whole", "streamed whole"}
            calls = [call for caller in callers for call in caller.whole]
            versions = set[int]()
            for call in random.Random(0).sample(calls, min(len(calls), count(300, 5000))):
                record = http.get(f"/v1/calls/{call}").json()
                versions.add(record["version"])
                if record["version"]:
                    assert marked(record, weights[record["version"]]), call
            assert len(versions) > SWAPS / 4
    finally:
        stop.set()
        server.stop()
    tenth = len(memory) // 10 or 1
    second, last = (statistics.fmean(part) for part in (memory[tenth : 2 * tenth], memory[-tenth:]))
    print(f"{len(calls)} calls; memory: last tenth / second tenth = {last / second:.3f}")  # noqa: T201
    assert last <= second * (1.05 if SWAPS >= 1000 else 1.5)


def sampled(http: httpx.Client, step: int) -> list[str]:
    """Two runs to learn from."""
    runs = [f"{POLICY}-{step}-{one}" for one in range(2)]
    for reward, run in enumerate(runs):
        said = [{"role": "user", "content": run}]
        rewarded(http, run, reward, model=POLICY, messages=said)
    return runs


@pytest.mark.soak("F5", KILLS + HANGS, f"engines' deaths, {HANGS} hangs, under {MANY} callers")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 3600))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_is_whole_or_refused_whenever_the_engine_dies(tmp_path: Path) -> None:
    draw = random.Random(drawn_seed())
    server, stop = StubServer(tmp_path / "data", seconds=(0.05, 0.5)), threading.Event()
    server.start()
    callers = [Caller(server, number, stop, model="tiny") for number in range(MANY)]
    signals = [signal.SIGKILL] * KILLS + [signal.SIGSTOP] * HANGS
    draw.shuffle(signals)
    steps = min(8, KILLS // 2)
    try:
        with server.http() as http:
            for caller in callers:
                caller.start()
            for number, sent in enumerate(signals):
                if number % (len(signals) // steps) == 0:
                    train_once(http, int(http.get("/v1/policies/tiny").json()["version"]))
                time.sleep(draw.uniform(0.0, 0.4))
                [pid] = engines(server)
                os.kill(pid, sent)
                until_replaced(http, server, pid)
            stop.set()
            for caller in callers:
                caller.join()
            whole = [call for caller in callers for call in caller.whole]
            met = sum((caller.met for caller in callers), Counter[str]())
            trained = 8 * http.get("/v1/policies/tiny").json()["version"]
            assert http.get("/status").json()["calls"] == len(whole) + trained, (
                "a call that ended in an error was kept, or one that was answered was not"
            )
            assert met["refused"] and met["whole"] and met["streamed whole"], met
            kept = {int(p.name): p for p in (server.data_dir / "adapters" / "tiny").iterdir()}
            for call in draw.sample(whole, min(len(whole), count(200, 2000))):
                record = http.get(f"/v1/calls/{call}").raise_for_status().json()
                if (folder := kept.get(record["version"])) is not None:
                    assert marked(record, folder / "adapter_model.safetensors"), call
    finally:
        stop.set()
        server.stop()
    print(", ".join(f"{many:,} {what}" for what, many in met.items()))  # noqa: T201


def until_replaced(http: httpx.Client, server: StubServer, pid: int) -> None:
    deadline = time.monotonic() + 90
    while pid in engines(server) or http.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline, server.log.read_text()[-2000:]
        time.sleep(0.01)
