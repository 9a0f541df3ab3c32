"""Versions change under running calls: none is excluded, none mixes two versions."""

import random
import shutil
import statistics
import threading
import time
from collections import defaultdict
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
from tests.support.soak import count
from tests.support.steps_of_a_fit import rewarded
from tests.support.stub_engines import StubServer, marked

STEPS, CALLERS = count(1, 3), 8
SWAPS, STORMED = count(8, 3000), count(32, 64)
#: Versions that may have a directory: those that are kept, the first, the one that serves, and
#: those that answer calls just now.
KEPT = 4 + 2 + 8
POLICY = "swapped"


class Caller(threading.Thread):
    """Asks the policy by its bare name, one call after the other, and keeps what it got."""

    def __init__(self, server: LiveServer, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.number, self.stop = server, number, stop
        self.calls: list[str] = []
        self.refused: list[str] = []

    def run(self) -> None:
        with self.server.http() as http:
            for turn in range(10_000):
                if self.stop.is_set():
                    return
                question = f"When is the Falcon audit? {self.number} {turn % 3}"
                body = {"model": POLICY, "messages": [{"role": "user", "content": question}]}
                # Hot enough to go on for long: the version changes in the middle of most calls.
                body |= {"max_tokens": 200, "temperature": 1.5}
                answer = http.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    self.calls.append(answer.json()["id"])
                else:
                    self.refused.append(answer.text)


def total(callers: list[Caller]) -> int:
    return sum(len(caller.calls) + len(caller.refused) for caller in callers)


@pytest.mark.soak
def test_calls_keep_the_version_that_they_began_with(art_server: LiveServer) -> None:
    stop = threading.Event()
    callers = [Caller(art_server, number, stop) for number in range(CALLERS)]
    with ArtClient(art_server.base_url) as client:
        client.create_policy(POLICY)
    try:
        with art_server.http() as http:
            for caller in callers:
                caller.start()
            for step in range(STEPS):
                train_once(http, step, POLICY)
                # One call more than there are callers: its caller began it after the swap.
                enough = total(callers) + CALLERS + 1
                while total(callers) < enough:
                    time.sleep(0.02)
            stop.set()
            for caller in callers:
                caller.join()
            assert not [text for caller in callers for text in caller.refused]
            asked = [call for caller in callers for call in caller.calls]
            records = [http.get(f"/v1/calls/{call}").json() for call in asked]
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
def test_a_storm_of_versions_fails_no_call_and_mixes_none(tmp_path: Path) -> None:
    """A new version each 200 ms, over engines that say which weights they have."""
    server, stop = StubServer(tmp_path / "data", seconds=(0.05, 0.5)), threading.Event()
    server.start()
    server.policy = POLICY
    callers = [Caller(server, number, stop) for number in range(STORMED)]
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
            assert not [text for caller in callers for text in caller.refused]
            asked = [call for caller in callers for call in caller.calls]
            versions = set[int]()
            for call in random.Random(0).sample(asked, min(len(asked), count(300, 5000))):
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
    print(f"{len(asked)} calls; memory: last tenth / second tenth = {last / second:.3f}")  # noqa: T201
    assert last <= second * (1.05 if SWAPS >= 1000 else 1.5)


def sampled(http: httpx.Client, step: int) -> list[str]:
    """Two runs to learn from."""
    runs = [f"{POLICY}-{step}-{one}" for one in range(2)]
    for reward, run in enumerate(runs):
        said = [{"role": "user", "content": run}]
        rewarded(http, run, reward, model=POLICY, messages=said)
    return runs
