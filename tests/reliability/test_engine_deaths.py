"""Engines that are killed and stopped under many calls: each call is whole, or refused in words."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.engines import engines
from tests.support.hot_swap import train_once
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.stub_engines import StubServer, marked

KILLS, HANGS, CALLERS = count(3, 100), count(0, 20), count(16, 32)


class Caller(threading.Thread):
    """Calls one after the other, streamed and not; keeps what it got."""

    def __init__(self, server: StubServer, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._server, self._number, self._stop_it = server, number, stop
        self.whole: list[str] = []
        self.met: Counter[str] = Counter()

    def run(self) -> None:
        with self._server.http() as http:
            while not self._stop_it.is_set():
                turn = sum(self.met.values())
                said = [{"role": "user", "content": f"{self._number} {turn}"}]
                body = {"model": "tiny", "messages": said, "stream": turn % 2 == 0}
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


@pytest.mark.soak("F5", KILLS + HANGS, f"engines' deaths, {HANGS} hangs, under {CALLERS} callers")
@pytest.mark.slow
@pytest.mark.timeout(count(300, 3600))
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_is_whole_or_refused_whenever_the_engine_dies(tmp_path: Path) -> None:
    draw = random.Random(drawn_seed())
    server, stop = StubServer(tmp_path / "data", seconds=(0.05, 0.5)), threading.Event()
    server.start()
    callers = [Caller(server, number, stop) for number in range(CALLERS)]
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
