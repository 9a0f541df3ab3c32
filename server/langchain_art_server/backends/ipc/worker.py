"""An engine's child process: calls over a private socket pair; restarted when it dies.

An engine (the sampler's or the learner's) runs in a process of its own, so that the gateway's event
loop never waits for it. When the process dies it is started again, and calls without an answer are
sent again. There is no port and no pickle: a frame is a 4-byte big-endian length and a JSON array
``[id, kind, payload]``. When one end dies, the other reads end-of-file.

    parent -> child   [id, "call", {"method": …, "params": …}]    [id, "cancel", null]
    child  -> parent  [id, "event", …]*   then   [id, "result", …]   or   [id, "error", {…}]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from langchain_art.errors import REFUSALS, ArtError, ConfigError, EngineUnavailable
from langchain_art_server.backends.ipc.channel import FrameReader, pack

log = logging.getLogger(__name__)
#: Starts in a row that may fail before calls are refused instead of waiting.
MAX_FAILED_STARTS = 5


class WorkerDied(EngineUnavailable):
    """The engine's process ended while it had this call. Retryable."""


@dataclass(eq=False)
class _Pending:
    frame: bytes
    listener: Callable[[tuple[str, Any]], None]
    resend: bool = True
    early: bool = False
    sent: bool = False
    ended: bool = False
    deaths: int = 0

    def receive(self, kind: str, payload: Any) -> None:
        if kind == "event":
            self.resend = False  # or its caller would get the event twice
        else:
            self.ended = True
        self.listener((kind, payload))


class Worker:
    """The parent's side of one engine process.

    Args:
        target: ``module:function`` that serves in the child.
        config: JSON-able settings for it.
        on_ready: awaited with the result of ``start``, after every (re)start and before waiting
            calls are sent; restores the engine's state (loaded adapters).
        env: added to the child's environment.
        python: that the child runs.
    """

    def __init__(
        self,
        target: str,
        config: dict[str, Any],
        on_ready: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        *,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._argv = [python, "-m", "langchain_art_server.backends.ipc.channel", target]
        self._config, self._on_ready, self._env = config, on_ready, env or {}
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        self._broken: ArtError | None = None
        self.ready = asyncio.Event()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the child and wait until it is ready. Raises the error of its ``start``."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End the child. Calls without an answer fail with EngineUnavailable."""
        self._closing = True
        if self._keeper:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await self._reap()
        self._fail_all(EngineUnavailable("The engine is shut down."))

    async def call(self, method: str, params: dict[str, Any], *, early: bool = False) -> Any:
        """Call and wait for the result. Sent again if the child dies; after two deaths it fails.

        Args:
            method: of the engine.
            params: JSON-able.
            early: for `on_ready`: do not wait until the engine is ready, and send it once only.

        Raises:
            ArtError: what the engine raised.
            WorkerDied: the child died, and the call is not sent again.
            EngineUnavailable: the engine is shut down, or cannot be started.
        """
        answer: asyncio.Future[tuple[str, Any]] = asyncio.get_running_loop().create_future()

        def receive(reply: tuple[str, Any]) -> None:
            if reply[0] != "event" and not answer.done():
                answer.set_result(reply)

        with self._calling(method, params, receive, resend=not early, early=early):
            kind, payload = await answer
        if kind == "error":
            raise _revive(payload)
        return payload

    async def stream(
        self, method: str, params: dict[str, Any], *, resend: bool = True
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield ``("event", …)`` and at last ``("result", …)``. Closing it early cancels the call.

        After its first event a call is not sent again: if the child dies, it raises `WorkerDied`.
        """
        replies: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        with self._calling(method, params, replies.put_nowait, resend=resend):
            while True:
                kind, payload = await replies.get()
                if kind == "error":
                    raise _revive(payload)
                yield kind, payload
                if kind == "result":
                    return

    @contextlib.contextmanager
    def _calling(
        self,
        method: str,
        params: dict[str, Any],
        listener: Callable[[tuple[str, Any]], None],
        *,
        resend: bool,
        early: bool = False,
    ) -> Generator[None]:
        """Register and send a call; cancel it if the block ends before it does."""
        if self._broken:
            raise EngineUnavailable(
                f"The engine cannot be started: {self._broken}", retry_after=30
            ) from self._broken
        if self._closing:
            raise EngineUnavailable("The engine is shut down.")
        call_id = next(self._ids)
        frame = pack(call_id, "call", {"method": method, "params": params})
        pending = _Pending(frame, listener, resend=resend, early=early)
        self._pending[call_id] = pending
        try:
            if self.ready.is_set() or early:
                self._send(pending)
            yield
        finally:
            self._pending.pop(call_id, None)
            if pending.sent and not pending.ended and self._transport:
                self._write(pack(call_id, "cancel", None))

    def _send(self, pending: _Pending) -> None:
        if self._transport and not pending.sent:
            pending.sent = True
            self._write(pending.frame)

    def _write(self, frame: bytes) -> None:
        """Queue a frame: those of one turn of the event loop are written by one system call."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport:
            self._transport.write(data)

    async def _spawn(self) -> None:
        """Start the child and wait until it is ready. If that fails, the child is ended."""
        try:
            self._gone = await self._launch()
            hello: asyncio.Future[tuple[str, Any]] = asyncio.get_running_loop().create_future()
            frame = pack(0, "call", {"method": "start", "params": {}})
            self._pending[0] = _Pending(frame, hello.set_result, early=True)
            self._send(self._pending[0])
            kind, payload = await hello
            self._pending.pop(0, None)
            if kind != "result":
                raise _revive(payload)
            if self._on_ready:
                await self._on_ready(payload)
        except BaseException:
            self._pending.pop(0, None)
            await self._reap()
            raise
        if self._gone.done():
            raise EngineUnavailable("The engine's process ended while it was started.")
        self.ready.set()
        for pending in list(self._pending.values()):
            self._send(pending)

    async def _launch(self) -> asyncio.Future[None]:
        ours, theirs = socket.socketpair()
        with theirs:
            # Not in a thread, where a cancelled start would lose the process; vfork is quick.
            try:
                self._process = subprocess.Popen(
                    [*self._argv, str(theirs.fileno()), json.dumps(self._config)],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=os.environ | self._env,
                    # Ctrl-C reaches the parent only, which ends the child.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"The engine's Python cannot be run: {error}. See that the setting `python` is "
                    "the path of one, such as /opt/learner/bin/python."
                ) from error
        loop = asyncio.get_running_loop()
        reader = FrameReader(self._receive)
        self._transport, _ = await loop.create_connection(lambda: reader, sock=ours)
        reader.gone.add_done_callback(self._lost)
        return reader.gone

    def _receive(self, frame: bytes) -> None:
        call_id, kind, payload = from_json(frame)
        if pending := self._pending.get(call_id):
            pending.receive(kind, payload)

    def _lost(self, _gone: asyncio.Future[None]) -> None:
        self.ready.clear()
        code = self._process.poll() if self._process else None
        status = "" if code is None else f" (exit status {code})"
        gone = {"code": "worker_died", "message": f"The engine's process ended{status}."}
        # `on_ready` waits for these, and they are not sent again.
        for pending in list(self._pending.values()):
            if pending.early and not pending.ended:
                pending.receive("error", gone)

    async def _keep(self) -> None:
        """Start the child again whenever it ends; give up after MAX_FAILED_STARTS in a row."""
        while not self._closing:
            await asyncio.wait([self._gone])
            await self._reap()
            self._drop_lost_calls()
            self.restarts += 1
            log.warning("The engine %s ended; starting it again.", self._argv[-1])
            for failures in itertools.count(1):
                try:
                    await self._spawn()
                    break
                except Exception as error:  # noqa: BLE001  any failed start is tried again
                    log.error("The engine could not be started (%d in a row): %s", failures, error)
                    if failures >= MAX_FAILED_STARTS:
                        self._broken = ConfigError(str(error))
                        self._fail_all(EngineUnavailable(f"The engine cannot be started: {error}"))
                        return
                    await asyncio.sleep(min(30.0, 0.5 * 2**failures))

    def _drop_lost_calls(self) -> None:
        """Fail the calls that are not sent again."""
        for call_id, pending in list(self._pending.items()):
            if not pending.sent:
                continue
            pending.deaths += 1
            pending.sent = False
            if pending.resend and pending.deaths <= 2:
                continue
            del self._pending[call_id]
            message = (
                "The engine's process ended during this call and is being started again. "
                "Nothing was recorded; send the call again."
            )
            pending.receive("error", {"code": "worker_died", "message": message})

    def _fail_all(self, error: EngineUnavailable) -> None:
        for pending in self._pending.values():
            pending.receive("error", {"code": error.code, "message": str(error)})
        self._pending.clear()

    async def _reap(self) -> None:
        self.ready.clear()
        if self._transport:
            self._transport.close()
            await asyncio.wait([self._gone])
            self._transport = None
        if process := self._process:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.to_thread(process.wait)
            self._process = None


def _revive(payload: dict[str, Any]) -> ArtError:
    code, message = payload.get("code"), payload["message"]
    if code == "worker_died":
        return WorkerDied(message, retry_after=2)
    if code == ConfigError.code:
        return ConfigError(message)
    kind = REFUSALS.get(code or "")
    if kind is None:
        return ArtError(message)
    return kind(message, param=payload.get("param"), retry_after=2 if kind.status == 503 else None)
