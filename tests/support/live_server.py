"""A real server as a child process: the very command that a user runs."""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
from httpx._transports import default as transports

if TYPE_CHECKING:
    from tests.support.forked_start import ForkedProgram

REPO = Path(__file__).parents[2]
BASE_MODEL = REPO / "examples" / "email_search" / "base_model"


@functools.cache
def _tls(
    _file: str | None,
    _folder: str | None,
    create: Callable[..., ssl.SSLContext] = transports.create_ssl_context,
    **asked: Any,
) -> ssl.SSLContext:
    return create(**asked)


# All of httpx's clients in a process share a context: to read the certificates takes 27 ms of CPU.
transports.create_ssl_context = lambda **asked: _tls(
    os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"), **asked
)


#: Below the ports of outgoing connections, one of which could take a server's while it loads.
_PORTS = range(20_000, 32_000)
#: Open files whose locks hold the ports of this process; the system frees them at its end.
_reserved: list[int] = []


def free_port() -> int:
    """A port that nothing listens on, and that no other process of the tests gets."""
    folder = Path(tempfile.gettempdir()) / "langchain-art-test-ports"
    folder.mkdir(exist_ok=True)
    for port in random.Random().sample(_PORTS, 1000):
        file = os.open(folder / str(port), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(file)
            continue
        _reserved.append(file)
        return port
    raise RuntimeError(f"got no free port in {_PORTS}, expected one")


@functools.cache
def small_model(**config: Any) -> Path:
    """The demo's base model with the first of its three layers, and `config` changed.

    As good for tests of what is around a model, at half the cost of a token.
    """
    from safetensors.numpy import load_file, save_file  # needs the server's packages

    folder = tempfile.TemporaryDirectory(prefix="langchain-art-test-model-")
    atexit.register(folder.cleanup)
    model = Path(folder.name) / BASE_MODEL.name
    shutil.copytree(BASE_MODEL, model)
    weights = load_file(model / "model.safetensors")
    kept = {name: one for name, one in weights.items() if not re.search(r"layers\.[1-9]", name)}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    whole = json.loads((model / "config.json").read_text())
    whole |= {"num_hidden_layers": 1, "layer_types": whole["layer_types"][:1]}
    (model / "config.json").write_text(json.dumps(whole | config))
    return model


def await_answer(
    url: str,
    process: Any,
    log: Path,
    timeout: float = 300,
    holds: Callable[[httpx.Response], bool] = lambda answer: answer.is_success,
) -> None:
    """Wait until a server that was started answers at `url`; else kill it and show its log."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if holds(httpx.get(url)):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
        process.wait()
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")


class LiveServer:
    """``langchain-art serve`` on a free port, restartable on the same one.

    `settings` stands in a file beside `data_dir`, which is its ``--config``.
    """

    def __init__(
        self,
        data_dir: Path,
        *args: str,
        settings: str = "",
        model: Path | str = BASE_MODEL,
        env: dict[str, str] | None = None,
        module: str = "langchain_art_server",
    ) -> None:
        self.port = free_port()
        self.data_dir, self.model = data_dir, str(model)
        self.api_key = (env or {}).get("ART_API_KEY", "")
        self.root = f"http://127.0.0.1:{self.port}"
        self.base_url = f"{self.root}/v1"
        self.policy = "tiny"
        self.base_name = "base_model"
        self.log = data_dir.parent / f"{data_dir.name}.log"
        self._module = module
        self._args = [str(model), "--port", str(self.port), "--data-dir", str(data_dir)]
        self._args += ["--policy", self.policy, "--served-model-name", self.base_name, *args]
        if settings:
            config = data_dir.parent / f"{data_dir.name}.toml"
            config.write_text(settings)
            self._args += ["--config", str(config)]
        self._env = {k: v for k, v in os.environ.items() if k != "ART_API_KEY"}
        self._env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | (env or {})
        self.process: subprocess.Popen[bytes] | ForkedProgram | None = None

    def _launch(self) -> subprocess.Popen[bytes] | ForkedProgram:
        with self.log.open("ab") as log:
            return subprocess.Popen(self._argv, env=self._env, stdout=log, stderr=log, cwd=REPO)

    @property
    def _argv(self) -> list[str]:
        return [sys.executable, "-m", self._module, *self._args]

    def start(self, timeout: float = 300) -> Self:
        self.process = self._launch()
        await_answer(f"{self.root}/readyz", self.process, self.log, timeout)
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def refusal(self, timeout: float = 120) -> str:
        """What it says where it must not start: words, no traceback, and exit status 1."""
        self._env["COLUMNS"] = "1000"
        before = self.log.stat().st_size if self.log.exists() else 0
        self.process = self._launch()
        try:
            status = self.process.wait(timeout)
        finally:
            self.process.kill()
        said = self.log.read_bytes()[before:].decode()
        assert status == 1 and "Traceback" not in said, said[-4000:]
        return said

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=120)

    def http(self, key: str = "") -> httpx.Client:
        """A client with a key, by default the server's own."""
        key = key or self.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.root, headers=headers, timeout=300)


class ForkedServer(LiveServer):
    """The same program on the same arguments, started cheaply (`tests.support.forked_start`).

    For tests whose subject is neither the start nor, by default, the model. All of a process have
    one hash seed.
    """

    def __init__(
        self, data_dir: Path, *args: str, model: Path | str | None = None, **more: Any
    ) -> None:
        super().__init__(data_dir, *args, model=model or small_model(), **more)

    def _launch(self) -> ForkedProgram:
        from tests.support import forked_start  # needs the server's packages

        return forked_start.start(self._module, self._args, self._env, REPO, self.log)


class HastyServer(ForkedServer):
    """The server over whose time limits tests wait; in ``make soak`` alone they are its own."""

    def __init__(self, data_dir: Path, *args: str, **more: Any) -> None:
        from tests.support.soak import share  # needs pytest

        module = "langchain_art_server" if share() else "tests.support.hasty_server"
        super().__init__(data_dir, *args, module=module, **more)


class FaultyServer(ForkedServer):
    """The same server with engines that go wrong as told (`tests.support.faulty_server`)."""

    def __init__(self, data_dir: Path) -> None:
        self.switch = data_dir.parent / f"{data_dir.name}-fault"
        self.fault("")
        env = {"FAULT_FILE": str(self.switch)}
        super().__init__(data_dir, env=env, module="tests.support.faulty_server")

    def fault(self, name: str) -> None:
        """From now on; "" is none."""
        self.switch.write_text(name)


class RuleServer(ForkedServer):
    """The same server with the rule-following model (`tests.support.rule_model`).

    `context` is the length of its context in tokens.
    """

    _read = 0  # bytes of the journal
    _lines: tuple[dict[str, Any], ...] = ()

    def __init__(self, data_dir: Path, *args: str, context: int = 16384) -> None:
        model = small_model(max_position_embeddings=context)
        self.journal = data_dir.parent / f"{data_dir.name}.jsonl"
        env = {"RULE_JOURNAL": str(self.journal)}
        super().__init__(
            data_dir, *args, model=model, env=env, module="tests.support.rule_model.server"
        )

    def witnessed(self) -> list[dict[str, Any]]:
        """What the engine says it was asked and drew, call by call, in the order they ended."""
        if self.journal.exists():
            with self.journal.open("rb") as journal:
                journal.seek(self._read)
                # A line that is being written has no end yet.
                new = [line for line in journal if line.endswith(b"\n")]
            self._read += sum(map(len, new))
            self._lines += tuple(map(json.loads, new))
        return list(self._lines)
