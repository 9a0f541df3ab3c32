"""Versions change under running calls: none is excluded, none mixes two versions."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import torch

from langchain_art import ArtClient
from langchain_art_server.backends.peft.learner_core import LearnerCore
from tests.support.hot_swap import row_of, train_once
from tests.support.live_server import BASE_MODEL, LiveServer

STEPS, CALLERS = 3, 16
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
    torch.set_num_threads(1)
    core = LearnerCore(str(BASE_MODEL))
    for version, calls in by_version.items():
        folder = art_server.data_dir / "adapters" / POLICY / str(version)
        sample = calls[:6] + calls[-6:]  # those at the swaps are the last and the first
        rows = [row_of(call) for call in sample]
        for call, again in zip(sample, core.logprobs(folder, rows), strict=True):
            said = len(call["token_ids"])
            assert max(abs(again[-said:] - call["logprobs"])) <= 1e-3, (version, call["id"])
