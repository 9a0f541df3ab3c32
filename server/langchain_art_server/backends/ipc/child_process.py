"""Start of an engine's process by the parent, here or on another machine, with a socket to it.

A connection to another machine is made behind a secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import langchain_art
import langchain_art_server
from langchain_art.errors import ConfigError, EngineUnavailable
from langchain_art_server.backends.ipc.fork_server import ForkedProcess, ForkServer, can_fork

log = logging.getLogger(__name__)
SECRET_BYTES = 32  # bytes of what a connection must begin with
#: Seconds for a connection to be made, and for a stranger to say the secret.
_CONNECT_SECONDS, _SECRET_SECONDS = 10.0, 5.0


class NodeAddress(NamedTuple):
    """Address of a process that listens for one connection, which begins with `secret` in hex."""

    host: str
    port: int
    secret: str


def connect(address: NodeAddress) -> socket.socket:
    """Raises EngineUnavailable if no process answers there."""
    try:
        connection = socket.create_connection(address[:2], timeout=_CONNECT_SECONDS)
        connection.sendall(bytes.fromhex(address.secret))
    except OSError as error:
        raise EngineUnavailable(
            f"the port {address.port} of a node does not answer ({error}); the server and the "
            "nodes must reach all ports of the nodes",
            retry_after=5,
        ) from error
    connection.settimeout(None)
    _keep_alive(connection)
    return connection


def accept(listener: socket.socket, secret: bytes, seconds: float) -> socket.socket | None:
    """The connection that begins with the secret; None: it has not come in time."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            found, _ = listener.accept()
        except TimeoutError:
            break
        found.settimeout(_SECRET_SECONDS)
        with contextlib.suppress(OSError):
            said = found.recv(SECRET_BYTES, socket.MSG_WAITALL)
            if hmac.compare_digest(said, secret):
                found.settimeout(None)
                _keep_alive(found)
                return found
        log.warning("A connection to the engine without its secret was closed.")
        found.close()
    log.error("Nobody connected to the engine within %g s.", seconds)
    return None


def _keep_alive(connection: socket.socket) -> None:
    """Send small frames at once, and notice within a minute that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class RemoteProcess:
    """An engine's process on another machine, which ends when its connection does."""

    pid = None

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._status = connection, None

    def poll(self) -> int | None:
        """The exit status, once it was killed; else it is not known here."""
        return self._status

    def kill(self) -> None:
        """Close the connection: the actor ends the process."""
        with contextlib.suppress(OSError), self._connection:
            self._connection.shutdown(socket.SHUT_RDWR)
        self._status = -signal.SIGKILL

    def wait(self) -> int:
        """Return at once: the machine may be gone. The actor ends it before it starts another."""
        return self._status or 0


ChildProcess = subprocess.Popen[bytes] | ForkedProcess | RemoteProcess


class EngineProgram:
    """Program of a child process. For the arguments see `Worker`."""

    _forks: ForkServer | None = None  # of all engines of this process, once one was forked

    def __init__(
        self,
        target: str,
        config: Mapping[str, Any],
        env: Mapping[str, str],
        imports: Sequence[str],
        python: str,
    ) -> None:
        self.target = target
        #: With which another machine makes the same (`ray.engines`).
        self.arguments = (target, config, env, imports, python)
        self._config, self._env, self._python = config, dict(env), python
        self._imports = imports if can_fork() else ()
        if Path(python) != Path(sys.executable):
            self._imports = ()
            # Links to the two packages, and nothing else of the server's environment.
            self._packages = tempfile.TemporaryDirectory(prefix="art-packages-")
            for package in (langchain_art, langchain_art_server):
                home = Path(package.__path__[0]).resolve()
                Path(self._packages.name, home.name).symlink_to(home, target_is_directory=True)
            paths = (self._packages.name, os.environ.get("PYTHONPATH"))
            self._env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def launch(self) -> tuple[ChildProcess, socket.socket]:
        """A new child and our end of its socket. Raises ConfigError: its Python cannot be run."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return self._forked(theirs) if self._imports else self._started(theirs), ours
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"The engine's Python cannot be run: {error}. See that the setting `python` is "
                    "the path of one, such as /opt/learner/bin/python."
                ) from error

    def _forked(self, theirs: socket.socket) -> ChildProcess:
        kind = EngineProgram
        if kind._forks is None or not kind._forks.alive:
            kind._forks = ForkServer()
        return kind._forks.fork((self.target, self._config, self._env, self._imports), theirs)

    def _started(self, theirs: socket.socket) -> ChildProcess:
        channel = "langchain_art_server.backends.ipc.channel"
        argv = [self._python, "-m", channel, self.target, str(theirs.fileno())]
        # Not in a thread, where a cancelled start would lose the process; vfork is quick.
        return subprocess.Popen(
            [*argv, json.dumps(self._config)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ | self._env,
            # Ctrl-C reaches the parent only, which ends the child.
            start_new_session=True,
        )


class NoPlace(EngineUnavailable):
    """No machine has room for the engine now. Retryable; says what is missing."""


class EnginePlace:
    """Place where an engine's process runs: this machine, if a subclass does not say otherwise."""

    same_disk: bool = True  # it reads the folders that this process names, after each start
    patience: float = 0.0  # seconds for which work may wait until there is a place again
    beside: Sequence[NodeAddress] = ()
    """Where the engine finds the processes that were started beside it."""

    @property
    def problem(self) -> str | None:
        """Reason for which there is no place now, in words for anyone; None: none is known."""
        return None

    async def launch(self, program: EngineProgram) -> tuple[ChildProcess, socket.socket]:
        """`EngineProgram.launch` there. Raises NoPlace, too: there is none for it."""
        return program.launch()

    @asynccontextmanager
    async def folder(
        self, path: Path, files: Sequence[str] | None = None
    ) -> AsyncGenerator[Path, None]:
        """A folder's `files` (None: all) where the engine is, until it has them. Raises NoPlace."""
        yield path

    @asynccontextmanager
    async def made(self, path: Path) -> AsyncGenerator[Path, None]:
        """A folder where the engine writes, whose files are in `path` at the end. Raises NoPlace.

        Not if an exception ends it.
        """
        yield path

    async def close(self) -> None:
        """Give the place back; the engine has ended."""
