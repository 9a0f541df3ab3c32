"""A server whose processes are killed at random moments, and a client that goes on all the same."""

import contextlib
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import httpx

from langchain_art.errors import Damaged
from langchain_art_server.backends.models.adapter_files import check_files
from tests.support.engines import engines, part_of
from tests.support.live_server import LiveServer

#: Seconds after which a request that is not answered has failed.
PATIENCE = 120.0


class Patient:
    """Sends each request again until it is answered by something else than 503.

    With `root`, the address of a proxy, each request has a connection of its own.
    """

    def __init__(self, server: LiveServer, root: str | None = None) -> None:
        self.server, self.http = server, server.http()
        if root is not None:
            alone = httpx.Limits(max_keepalive_connections=0)
            self.http = httpx.Client(limits=alone, timeout=20)
        #: Servers that are asked one after the other, and which of them was asked last, and when.
        self.roots, self.at, self.sent = [root or server.root], 0, 0.0
        self.answered = self.resent = 0

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE
        while True:
            self.at = (self.at + 1) % len(self.roots)
            with contextlib.suppress(httpx.TransportError):
                url, self.sent = self.roots[self.at] + path, time.time()
                answer = self.http.request(method, url, json=body, headers=headers)
                if answer.status_code != 503:
                    self.answered += 1
                    return answer
                assert "retry-after" in answer.headers, answer.text
            self.resent += 1
            assert time.monotonic() < deadline, f"{method} {path} is not answered"
            time.sleep(0.02)

    def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = self.ask(method, path, body, **headers)
        assert answer.status_code in (200, 202), (method, path, answer.status_code, answer.text)
        return answer.json()

    def train(self, key: str, body: Any) -> dict[str, Any]:
        """A job, ordered again with its key if a death has ended it; as it succeeded."""
        while True:
            job = self.ok("POST", "/v1/train", body, **{"Idempotency-Key": key})
            while job["state"] in ("queued", "running"):
                job = self.ok("GET", f"/v1/jobs/{job['id']}?wait=2")
            if not job["retryable"]:
                assert job["state"] == "succeeded", job
                return job


class Witness(threading.Thread):
    """Posts trajectories all the while and remembers which were acknowledged."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__(daemon=True)
        self.server, self.acknowledged, self.stop = server, list[str](), threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            one = f"witness-{uuid.uuid4().hex}"
            try:
                answer = httpx.post(
                    f"{self.server.base_url}/trajectories",
                    json={"id": one, "reward": 0.5},
                )
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code == 200:
                self.acknowledged.append(one)
            time.sleep(0.02)


class Killer(threading.Thread):
    """Kills the server, its sampler or its learner at random moments, and starts the server again.

    `progress` counts what the client has got done. The sampler is killed once in between: a call
    that is the only one of two of its deaths is refused, by design (`ipc.process_sampler`).
    """

    def __init__(
        self,
        server: LiveServer,
        draw: random.Random,
        most: int,
        pause: float,
        progress: Callable[[], int],
    ) -> None:
        super().__init__(daemon=True)
        self.server, self.stop, self.torn = server, threading.Event(), list[str]()
        self.kills, self.starts = list[str](), list[float]()
        self._draw, self._most, self._pause, self._progress = draw, most, pause, progress

    def run(self) -> None:
        sampled = -1
        while len(self.kills) < self._most and not self.stop.is_set():
            time.sleep(self._draw.uniform(0.0, self._pause))
            kind = self._draw.choice(("server", "server", "sampler", "learner"))
            if kind == "server":
                self.server.kill()
                self.kills.append(kind)
                self._look()
                self._start_again()
            elif kind == "learner" or self._progress() != sampled:
                with contextlib.suppress(OSError):  # it has ended already
                    for pid in engines(self.server):
                        if part_of(pid) == kind:
                            os.kill(pid, signal.SIGKILL)
                            self.kills.append(kind)
                if kind == "sampler":  # after it: the call that it had was sent by now
                    sampled = self._progress()

    def _start_again(self) -> None:
        """As an init would. Now and then it is killed while it starts, too."""
        if self._draw.random() < 0.15 and len(self.kills) < self._most:
            self.server.process = self.server._launch()
            time.sleep(self._draw.uniform(0.0, 1.0))
            self.server.kill()
            self.kills.append("starting server")
            self._look()
        begun = time.monotonic()
        self.server.start()
        self.starts.append(time.monotonic() - begun)

    def _look(self) -> None:
        """Whether the disk shows a version that is not whole, now that nobody hides it."""
        for folder in (self.server.data_dir / "adapters").glob("[!.]*/[0-9]*"):
            try:
                check_files(folder)
            except Damaged as error:
                self.torn.append(str(error))
