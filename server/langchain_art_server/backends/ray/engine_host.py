"""The actor that holds one engine's process on a node of a Ray cluster.

Bytes go from the server to the engine by TCP, past Ray: the actor says where it listens, and passes
on what comes. If the actor ends, or the server closes the connection, the engine ends with it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.util

from langchain_art_server.backends.ipc.child_process import ChildProcess, EngineProgram

log = logging.getLogger(__name__)
#: Bytes of what a connection must begin with.
SECRET_BYTES = 32
#: Seconds that the server has to connect, and that a stranger has to say the secret.
_CONNECT_SECONDS, _SECRET_SECONDS = 60.0, 5.0
_CHUNK = 1 << 18


class EngineHost:
    """Starts an engine, and ends the one before. One at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="art-engine-")  # mode 0700
        self._process: ChildProcess | None = None

    def start(self, arguments: tuple[Any, ...]) -> tuple[str, int, bytes]:
        """Start the `EngineProgram` of these arguments.

        Returns:
            The node's address, the port on which one connection is taken within a minute, and the
            secret that it must begin with.

        Raises:
            ConfigError: its Python cannot be run.
        """
        self._end()
        address: str = ray.util.get_node_ip_address()
        listener = socket.create_server((address, 0))
        process, engine = EngineProgram(*arguments).launch()
        self._process, secret = process, secrets.token_bytes(SECRET_BYTES)
        parts = (listener, secret, process, engine)
        threading.Thread(target=_serve, args=parts, daemon=True, name="engine").start()
        return address, listener.getsockname()[1], secret

    def put(self, name: str, files: Mapping[str, bytes]) -> str:
        """Write files into a folder of this name. Returns its path."""
        folder = Path(self._folder.name, name)
        folder.mkdir(exist_ok=True)
        for file, content in files.items():
            Path(folder, file).write_bytes(content)
        return str(folder)

    def take(self, name: str) -> dict[str, bytes]:
        """What is in the files of such a folder."""
        files = Path(self._folder.name, name).iterdir()
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    def drop(self, name: str) -> None:
        """Remove such a folder."""
        shutil.rmtree(Path(self._folder.name, name), ignore_errors=True)

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)


def _serve(
    listener: socket.socket, secret: bytes, process: ChildProcess, engine: socket.socket
) -> None:
    with engine:
        try:
            with listener:  # one connection, and no second
                server = _accept(listener, secret)
            if server is not None:
                with server:
                    _pass_on(server, engine)
        finally:
            _kill(process)


def _accept(listener: socket.socket, secret: bytes) -> socket.socket | None:
    """The connection that begins with the secret; None: it has not come in time."""
    deadline = time.monotonic() + _CONNECT_SECONDS
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
                return found
        log.warning("A connection to the engine without its secret was closed.")
        found.close()
    log.error("The server did not connect to the engine within %g s.", _CONNECT_SECONDS)
    return None


def _pass_on(server: socket.socket, engine: socket.socket) -> None:
    """Copy both ways until one end closes."""
    keep_alive(server)

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=copy, args=(engine, server), daemon=True, name="replies")
    back.start()
    copy(server, engine)
    back.join()


def _kill(process: ChildProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def keep_alive(connection: socket.socket) -> None:
    """Send small frames at once, and notice within a minute that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
