"""Sampler and learner on one device: calls wait for a training step, and too many are sent away."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.live_server import ForkedServer, LiveServer
from tests.support.steps_of_a_fit import rewarded, trained


@dataclass(frozen=True)
class Answer:
    """What a call got, and when it was under way."""

    begun: float
    ended: float
    response: httpx.Response


class Caller(threading.Thread):
    """Asks one call after the other until a step is done."""

    def __init__(self, server: LiveServer, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.server, self.stop = server, stop
        self.answers: list[Answer] = []

    def run(self) -> None:
        with self.server.http() as http:
            while not self.stop.is_set():
                body = {"model": "tiny", "messages": [{"role": "user", "content": "When?"}]}
                begun = time.monotonic()
                response = http.post("/v1/chat/completions", json=body | {"max_tokens": 4})
                self.answers.append(Answer(begun, time.monotonic(), response))
                if response.status_code == 503:
                    self.stop.wait(0.05)


def test_calls_wait_for_a_step_and_are_answered_by_what_it_made(tmp_path: Path) -> None:
    """With vLLM, steps and calls take turns in `test_backend_pairs`."""
    settings = "take_turns = true\nmax_waiting_calls = 2\n"
    server = ForkedServer(tmp_path / "data", settings=settings).start()
    stop = threading.Event()
    callers = [Caller(server, stop) for _ in range(6)]
    try:
        with server.http() as http:
            ids = [
                rewarded(http, f"turns-{seed}", float(seed % 2), seed=seed, max_tokens=64)
                for seed in range(8)
            ]
            for caller in callers:
                caller.start()
            while not all(caller.answers or not caller.is_alive() for caller in callers):
                time.sleep(0.01)  # a step is soon over: all are to ask while it runs
            job = trained(http, [ids], config={"learning_rate": 2e-5, "optimizer_steps": 4})
    finally:
        stop.set()
        for caller in callers:
            caller.join()
        server.stop()
    assert job["state"] == "succeeded", job
    answers = [answer for caller in callers for answer in caller.answers]
    refused = [answer for answer in answers if answer.response.status_code != 200]
    assert {answer.response.status_code for answer in refused} == {503}
    assert all(int(answer.response.headers["retry-after"]) >= 1 for answer in refused)
    for one in refused:
        assert "2 calls wait" in one.response.json()["error"]["message"]
        meanwhile = [
            answer.response.json()["model"]
            for answer in answers
            if answer.begun < one.ended
            and answer.ended > one.begun
            and answer.response.status_code == 200
        ]
        assert meanwhile.count("tiny@1") >= 2  # those that waited
