"""An engine's socket: the child's end, where calls come in, and the frames for both ends.

See `worker` for what the frames say and for the parent's end. Run as a module, this is the child:
it imports ``MODULE:FUNCTION`` and hands the channel to it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic_core import from_json, to_json

from langchain_art.errors import ArtError

log = logging.getLogger(__name__)
LENGTH = struct.Struct(">I")


def pack(call_id: int, kind: str, payload: Any) -> bytes:
    """A frame: length and JSON ``[id, kind, payload]``."""
    body = to_json([call_id, kind, payload], inf_nan_mode="constants")
    return LENGTH.pack(len(body)) + body


class Frames(asyncio.Protocol):
    """The parent's ear: each frame's JSON goes to `hear`; `gone` ends when the child's end does."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self._hear = hear
        self._buffer = bytearray()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Hear the frames that are whole now."""
        buffer = self._buffer
        buffer += data
        start, size = 0, len(buffer)
        while size - start >= LENGTH.size:
            end = start + LENGTH.size + LENGTH.unpack_from(buffer, start)[0]
            if end > size:
                break
            self._hear(bytes(buffer[start + LENGTH.size : end]))
            start = end
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """The child closed its end, or died."""
        if not self.gone.done():
            self.gone.set_result(None)


@dataclass
class Call:
    """One call as the child sees it. `cancelled` is set when the parent lost interest."""

    id: int
    method: str
    params: dict[str, Any]
    cancelled: bool = False


class Channel:
    """The child's end: calls come in on `inbox` (filled by a thread), frames go out batched."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._open: dict[int, Call] = {}
        self._out: list[bytes] = []
        self._lock = threading.Lock()
        self.inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def listen(self, accept: Callable[[Call], bool] | None = None) -> None:
        """Start the reading thread. `accept` may take a call at once (True) instead of `inbox`."""
        threading.Thread(target=self._read, args=(accept,), daemon=True, name="channel").start()

    def event(self, call: Call, payload: Any) -> None:
        """Queue an event for `flush`."""
        with self._lock:
            self._out.append(pack(call.id, "event", payload))

    def result(self, call: Call, payload: Any) -> None:
        """Queue the call's result for `flush` and forget the call."""
        self._open.pop(call.id, None)
        with self._lock:
            self._out.append(pack(call.id, "result", payload))

    def error(self, call: Call, error: BaseException) -> None:
        """Queue the call's error for `flush` and forget the call."""
        self._open.pop(call.id, None)
        known = isinstance(error, ArtError)
        payload = {
            "code": error.code if known else None,
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "param": getattr(error, "param", None),
        }
        with self._lock:
            self._out.append(pack(call.id, "error", payload))

    def flush(self) -> None:
        """Write everything queued in one system call. Ends the process if the parent is gone."""
        with self._lock:
            data, self._out = b"".join(self._out), []
            if data:
                try:
                    self._sock.sendall(data)
                except OSError:
                    _leave()

    def _read(self, accept: Callable[[Call], bool] | None) -> None:
        try:
            self._read_frames(accept)
        except BaseException:
            # Without its reader the child would wait for ever; the parent starts a new one.
            log.exception("The engine's reading thread failed.")
            os._exit(1)

    def _read_frames(self, accept: Callable[[Call], bool] | None) -> None:
        stream = self._sock.makefile("rb")
        while True:
            try:
                head = stream.read(LENGTH.size)
                size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
                body = stream.read(size)
            except OSError:
                _leave()
            if not size or len(body) < size:
                _leave()
            call_id, kind, payload = from_json(body)
            if kind == "cancel":
                if call := self._open.pop(call_id, None):
                    call.cancelled = True
                continue
            call = Call(call_id, payload["method"], payload["params"])
            self._open[call_id] = call
            if accept is None or not accept(call):
                self.inbox.put(call)


def _leave() -> NoReturn:
    # The parent is gone: nothing is left to answer to, and no clean-up of ours is needed.
    os._exit(0)


def child_main() -> None:
    """Entry point of the child: ``python -m …channel MODULE:FUNCTION FD JSON``.

    The function gets ``(channel, config)``, answers call 0 (``start``) when it is ready, and then
    serves until the process ends.
    """
    target, fd, config = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    module, _, function = target.partition(":")
    channel = Channel(socket.socket(fileno=fd))
    getattr(importlib.import_module(module), function)(channel, config)


if __name__ == "__main__":
    child_main()
