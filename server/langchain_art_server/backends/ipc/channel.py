"""The child's end of an engine's socket, and the frames for both ends.

See `worker` for the protocol and the parent's end. Run as a module, this is the child: it imports
``MODULE:FUNCTION`` and calls it with the channel.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from pydantic_core import from_json, to_json

from langchain_art.errors import REFUSALS, ArtError, ConfigError, EngineUnavailable
from langchain_art_server.telemetry.log_context import log_as_json

log = logging.getLogger(__name__)
LENGTH = struct.Struct(">I")
PING = 0  # the id of pings and their answers; calls count from 1


def pack(call_id: int, kind: str, payload: Any) -> bytes:
    """Encode a frame: its length and JSON ``[id, kind, payload]``."""
    body = to_json([call_id, kind, payload], inf_nan_mode="constants")
    return LENGTH.pack(len(body)) + body


def frames(received: bytearray) -> Iterator[Any]:
    """Take the whole frames from what was received. Many calls' replies arrive at once."""
    start = 0
    while len(received) >= (body := start + LENGTH.size):
        end = body + LENGTH.unpack_from(received, start)[0]
        if len(received) < end:
            break
        yield from_json(received[body:end])
        start = end
    del received[:start]


def revive(payload: dict[str, Any]) -> ArtError:
    """The error that `Channel.error` wrote."""
    code, message = payload.get("code"), payload["message"]
    if code == ConfigError.code:
        return ConfigError(message)
    kind = REFUSALS.get(code or "")
    if kind is None:
        return ArtError(message)
    return kind(message, param=payload.get("param"), retry_after=2 if kind.status == 503 else None)


@dataclass
class EngineCall:
    """A call in the child. `cancelled` is set when the parent cancels it; `size` is in bytes."""

    id: int
    method: str
    params: dict[str, Any]
    cancelled: bool = False
    size: int = 0


class Channel:
    """The child's end: a thread puts calls into `inbox`; frames are sent in batches by `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock  # for an engine that has another protocol, and does not `listen`
        self._open: dict[int, EngineCall] = {}
        self._out: list[bytes] = []
        self._lock = threading.Lock()
        self._turns = 0
        # No `SimpleQueue`: on Python 3.11 and 3.12 its timed `get` waits without end if its thread
        # was held up, by the system or a signal, until the time was over.
        self.inbox: queue.Queue[EngineCall] = queue.Queue()

    def listen(self, put: Callable[[EngineCall], object] | None = None) -> None:
        """Start the reading thread, which gives calls to `put`; None: to `inbox`."""
        put = put or self.inbox.put
        threading.Thread(target=self._read, args=(put,), daemon=True, name="channel").start()

    def event(self, call: EngineCall, payload: Any) -> None:
        """Queue an event for `flush`."""
        with self._lock:
            self._out.append(pack(call.id, "event", payload))

    def result(self, call: EngineCall, payload: Any) -> None:
        """Queue the call's result for `flush` and forget the call."""
        self._end(call, "result", payload)

    def error(self, call: EngineCall, error: BaseException) -> None:
        """Queue the call's error for `flush` and forget the call."""
        known = isinstance(error, ArtError)
        # No space, say: what may pass is no fault of the call.
        code = EngineUnavailable.code if isinstance(error, OSError) else None
        payload = {
            "code": error.code if known else code,
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "param": getattr(error, "param", None),
        }
        self._end(call, "error", payload)

    def _end(self, call: EngineCall, kind: str, payload: Any) -> None:
        self._open.pop(call.id, None)
        with self._lock:
            self._out.append(pack(call.id, kind, payload))

    def flush(self) -> None:
        """Write everything queued in one system call. Ends the process if the parent is gone.

        The engine's loop does this in every turn; pings are answered with the number of turns.
        """
        self._turns += 1
        self._write()

    def _write(self) -> None:
        with self._lock:
            data, self._out = b"".join(self._out), []
            if data:
                try:
                    self.socket.sendall(data)
                except OSError:
                    os._exit(0)

    def _read(self, put: Callable[[EngineCall], object]) -> None:
        try:
            self._read_frames(put)
        except BaseException:
            # Without its reader the child would wait forever; the parent starts a new one.
            log.exception("The engine's reading thread failed.")
            os._exit(1)

    def _read_frames(self, put: Callable[[EngineCall], object]) -> None:
        stream = self.socket.makefile("rb")
        while True:
            try:
                (size,) = LENGTH.unpack(stream.read(LENGTH.size))
                body = stream.read(size)
            except (OSError, struct.error):
                os._exit(0)  # the parent is gone, and there is nothing to clean up
            if len(body) < size:
                os._exit(0)
            call_id, kind, payload = from_json(body)
            if kind == "ping":  # answered by this thread, while the loop may be in a long step
                with self._lock:
                    self._out.append(pack(PING, "pong", self._turns))
                self._write()
                continue
            if kind == "cancel":
                if call := self._open.pop(call_id, None):
                    call.cancelled = True
                continue
            call = EngineCall(call_id, payload["method"], payload["params"], size=size)
            self._open[call_id] = call
            put(call)


def import_function(name: str) -> Callable[..., Any]:
    """The function that ``MODULE:FUNCTION`` names. Raises ImportError.

    What an import makes stays: the collector of cycles does not run meanwhile, which is a fifth of
    the time that torch, transformers and PEFT take, and passes over it from then on.
    """
    module, _, function = name.partition(":")
    gc.disable()
    try:
        return getattr(importlib.import_module(module), function)
    finally:
        gc.freeze()
        gc.enable()


def run_engine(target: str, sock: socket.socket, config: Any) -> None:
    """Be the engine that ``MODULE:FUNCTION`` names.

    The function gets ``(channel, config)``, answers call 0 (``start``) when it is ready, and then
    serves until the process ends.
    """
    if isinstance(config, dict) and cast("dict[str, Any]", config).get("log_format") == "json":
        log_as_json()
    import_function(target)(Channel(sock), config)


if __name__ == "__main__":  # python -m …channel MODULE:FUNCTION FD JSON
    run_engine(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3]))
