"""The actor that holds one process of an engine on a node of a Ray cluster.

Bytes go from the server, or from another process of the engine, to this one by TCP, past Ray: the
actor says where it listens, and passes on what comes. If the actor ends, or the connection is
closed, the process ends with it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.util

from langchain_art_server.backends.ipc.child_process import (
    SECRET_BYTES,
    ChildProcess,
    EngineProgram,
    NodeAddress,
    accept,
)

_CHUNK = 1 << 18


class EngineHost:
    """Starts an engine, and ends the one before. One at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="art-engine-")  # mode 0700
        self._process: ChildProcess | None = None

    def start(self, arguments: tuple[Any, ...], seconds: float) -> NodeAddress:
        """Start the `EngineProgram` of these arguments.

        Returns:
            Where one connection is taken, within so many seconds.

        Raises:
            ConfigError: its Python cannot be run.
        """
        self._end()
        address: str = ray.util.get_node_ip_address()
        listener = socket.create_server((address, 0))
        process, engine = EngineProgram(*arguments).launch()
        self._process, secret = process, secrets.token_bytes(SECRET_BYTES)
        parts = (listener, secret, seconds, process, engine)
        threading.Thread(target=_serve, args=parts, daemon=True, name="engine").start()
        return NodeAddress(address, listener.getsockname()[1], secret.hex())

    def put(self, name: str, files: Mapping[str, bytes]) -> str:
        """Write files into a folder of this name. Returns its path."""
        folder = Path(self._folder.name, name)
        folder.mkdir(exist_ok=True)
        for file, content in files.items():
            Path(folder, file).write_bytes(content)
        return str(folder)

    def take(self, name: str) -> dict[str, bytes]:
        """Contents of the files of such a folder."""
        files = Path(self._folder.name, name).iterdir()
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    def drop(self, name: str) -> None:
        """Remove such a folder."""
        shutil.rmtree(Path(self._folder.name, name), ignore_errors=True)

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)


def _serve(
    listener: socket.socket,
    secret: bytes,
    seconds: float,
    process: ChildProcess,
    engine: socket.socket,
) -> None:
    with engine:
        try:
            with listener:  # one connection, and no second
                server = accept(listener, secret, seconds)
            if server is not None:
                with server:
                    _pass_on(server, engine)
        finally:
            _kill(process)


def _pass_on(server: socket.socket, engine: socket.socket) -> None:
    """Copy both ways until one end closes."""

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
