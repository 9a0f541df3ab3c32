"""`LocalServer`: a server as a child process, restarted if it ends, stopped with its context."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from langchain_art.client.http_request import SILENCE
from langchain_art.errors import ServerUnreachable
from langchain_art.packages import require_packages

log = logging.getLogger(__name__)
_POLL = 0.1


class LocalServer:
    """``langchain-art serve`` as a child process on a free loopback port. A context manager.

    Where a ``with`` cannot hold it, over a notebook's cells, it is started and stopped.

    If the server ends, it is restarted on the same port with the same data, and clients that retry
    (as `Trainer` does) continue. If this program ends, killed or not, the server ends, too. Its
    output goes to ``<data_dir>.log``.

    Example::

        with LocalServer("Qwen/Qwen2.5-0.5B-Instruct", policies=["my-agent"]) as server:
            model = ChatART(model="my-agent", base_url=server.base_url)

    Args:
        model: base model, a hub name or a local path.
        policies: made at start if they are not there.
        data_dir: database and adapters; kept when the server stops.
        options: more options of ``langchain-art serve``, as on the command line.

    Raises:
        ConfigError: the server's packages are not installed.
        ServerUnreachable: it ended before it was ready; the message has the end of its log.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        policies: Sequence[str] = (),
        data_dir: str | Path = "art-data",
        options: Sequence[str] = (),
    ) -> None:
        require_server()
        data_dir = Path(data_dir)
        self.log = data_dir.with_name(f"{data_dir.name}.log")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self.restarts = 0
        self._argv = [sys.executable, "-m", "langchain_art_server", str(model)]
        self._argv += ["--port", str(self.port), "--data-dir", str(data_dir)]
        for policy in policies:
            self._argv += ["--policy", policy]
        self._argv += options
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id, while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> LocalServer:
        """Start the server and wait until it is ready, however long it loads its model.

        One that runs goes on as it is; one that was stopped is started again.
        """
        if self._watcher is not None:
            return self
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._spawn()
        try:
            self._await_ready()
        except BaseException:
            self._end()
            raise
        self._stopping.clear()
        self._watcher = threading.Thread(target=self._watch, name="local-server", daemon=True)
        self._watcher.start()
        return self

    def __enter__(self) -> LocalServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let running requests finish, then stop the server."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()  # else it might start a server after this one
            self._watcher = None
        self._end()

    def _spawn(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,  # this program's end of it is closed when it ends
                stdout=log,
                stderr=log,
                env=os.environ | {"ART_ENDS_WITH_STDIN": "1"},
                start_new_session=True,  # Ctrl-C stops the fit: a notebook sends it to the group
            )

    def _await_ready(self) -> None:
        assert self._process is not None
        begun: float | None = time.monotonic()
        url = f"http://127.0.0.1:{self.port}/readyz"
        with httpx.Client(timeout=5) as client:  # one: to make a TLS context takes 20 ms of CPU
            while self._process.poll() is None:
                if begun is not None and time.monotonic() - begun > SILENCE:
                    log.warning(
                        "waiting for the local server, which loads its model (%s)", self.log
                    )
                    begun = None
                with contextlib.suppress(httpx.TransportError):
                    if client.get(url).status_code == 200:
                        return
                time.sleep(_POLL)
        words = self.log.read_text(errors="replace").strip()[-2000:]
        raise ServerUnreachable(f"The local server did not start ({self.log}). It said:\n{words}")

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL):
            if self._process is not None and (status := self._process.poll()) is not None:
                self.restarts += 1
                log.warning(
                    "The local server ended with status %d and is started again (restart %d). Its "
                    "output is in %s.",
                    status,
                    self.restarts,
                    self.log,
                )
                self._spawn()
                self._stopping.wait(min(30.0, 0.2 * 2**self.restarts))

    def _end(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()


def require_server() -> None:
    """Raises ConfigError if this environment has the client only."""
    needed = ("langchain_art_server", "fastapi", "sqlalchemy", "torch", "transformers", "peft")
    require_packages("A server", needed, "local")
