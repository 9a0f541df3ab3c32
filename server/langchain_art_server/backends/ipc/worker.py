"""An engine's child process: calls over a private socket pair; restarted when it dies.

An engine (the sampler's or the learner's) runs in a process of its own, so that the gateway's event
loop never waits for it. When the process dies it is started again, and calls without an answer that
may be repeated (a chat call may not) are sent again. There is no port and no pickle: a frame is a
4-byte big-endian length and a JSON array ``[id, kind, payload]``. When one end dies, the other
reads end-of-file.

    parent -> child   [id, "call", {"method": …, "params": …}]    [id, "cancel", null]
    child  -> parent  [id, "event", …]*   then   [id, "result", …]   or   [id, "error", {…}]

A child that was stopped, or that hangs, is ended and started again: `heartbeat` has the rules.
Between them go ``[0, "ping", null]`` and ``[0, "pong", turns of the child's loop]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable
from langchain_art_server.backends.ipc.channel import PING, frames, pack, revive
from langchain_art_server.backends.ipc.child_process import (
    ChildProcess,
    EnginePlace,
    EngineProgram,
    NoPlace,
)
from langchain_art_server.backends.ipc.heartbeat import TICK_SECONDS, Heartbeat

log = logging.getLogger(__name__)
#: Starts in a row that may fail before calls are refused instead of waiting; it is tried on.
MAX_FAILED_STARTS = 5
MAX_PAUSE = 30.0  # longest pause between them, in seconds


class WorkerDied(EngineUnavailable):
    """The engine's process ended while it had this call. Retryable."""


class WorkerHung(WorkerDied):
    """The engine did nothing for this call for too long, and its process was ended. Retryable."""


@dataclass(eq=False)
class PendingCall:
    """A call without an answer.

    `frame` is what the child is sent: when it is ready, or, of an `early` call, before that. With
    `resend` it is sent again if the child dies, until its first event. `receiver` gets the events
    and then the result or error; `deaths` counts the children that died while they had it.
    """

    frame: bytes
    resend: bool
    early: bool
    receiver: Callable[[str, Any], None]
    sent: bool = False
    ended: bool = False
    deaths: int = 0

    def receive(self, kind: str, payload: Any) -> None:
        """Pass on an ``event``, or what ends the call: its ``result`` or an ``error``."""
        if kind == "event":
            self.resend = False  # or its caller would get the event twice
        else:
            self.ended = True
        self.receiver(kind, payload)


class EngineSocket(asyncio.Protocol):
    """The parent's end: gives its frames to `take`, and calls `lost` when the child closes or dies.

    No stream of asyncio's: to wake a task for each frame would cost each call a twentieth more.
    """

    transport: asyncio.Transport

    def __init__(self, take: Callable[[int, str, Any], None], lost: Callable[[], None]) -> None:
        self._take, self._lost, self._received = take, lost, bytearray()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._received += data
        for call_id, kind, payload in frames(self._received):
            self._take(call_id, kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """There will be no more."""
        self._lost()
        self.gone.set_result(None)


class Worker:
    """The parent's side of one engine process.

    Args:
        target: ``module:function`` that serves in the child.
        config: JSON-able settings for it.
        on_ready: awaited with the result of ``start``, after every (re)start and before waiting
            calls are sent; restores the engine's state (loaded adapters).
        env: added to the child's environment.
        imports: modules that the child needs: it is forked, where that can be, from a process that
            has imported them (`fork_server`).
        hang_seconds: the child is ended if it has calls and its loop makes no turn for so long.
        python: that the child runs. In another environment than the server's, the child imports
            the server's own copy of the two packages: both ends are of one version.
        place: where the child runs; None: on this machine.
    """

    def __init__(
        self,
        target: str,
        config: dict[str, Any],
        on_ready: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        *,
        hang_seconds: float = 300.0,
        env: dict[str, str] | None = None,
        imports: Sequence[str] = (),
        python: str = sys.executable,
        place: EnginePlace | None = None,
    ) -> None:
        self.place = place or EnginePlace()
        self._program = EngineProgram(target, config, env or {}, imports, python)
        self._on_ready = on_ready
        self._pending: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        self._socket: EngineSocket | None = None
        self._unsent: list[bytes] = []
        self._process: ChildProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._hang_seconds, self._heartbeat = hang_seconds, Heartbeat(hang_seconds)
        self._closing = False
        self._broken: ArtError | None = None
        self.up = asyncio.Event()  # set while the child answers calls
        #: Whether a child that ended is started again at once, or when this is set.
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._process.pid if self._process else None

    @property
    def problem(self) -> str | None:
        """Reason why calls are not answered now, for anyone to read; None: they are."""
        if self.up.is_set():
            return self._heartbeat.problem
        if (problem := self.place.problem) is not None:
            return problem
        if self._broken and not isinstance(self._broken, NoPlace):
            return "its process cannot be started, which is tried again; the log says why"
        return "its process is being started"

    async def start(self) -> None:
        """Start the child and wait until it is ready. Raises the error of its ``start``."""
        self._watcher = asyncio.create_task(self._watch())
        try:
            await self._spawn()
        except BaseException:
            self._watcher.cancel()
            raise
        self._keeper = asyncio.create_task(self._keep())

    def end(self) -> None:
        """Kill the child; it is started again."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the child. Calls without an answer fail with EngineUnavailable."""
        self._closing = True
        for task in filter(None, (self._watcher, self._keeper)):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._reap()
        await self.place.close()
        self._fail_all("The engine is shut down.")

    async def call(
        self, method: str, params: dict[str, Any], *, resend: bool = True, early: bool = False
    ) -> Any:
        """Call and wait for the result.

        With `resend` it is sent again if the child dies; after two deaths it fails. An `early`
        call, for `on_ready`, is sent before the engine is ready, and once only.

        Raises:
            ArtError: what the engine raised.
            WorkerDied: the child died, and the call is not sent again.
            WorkerHung: the child did nothing for its calls and was ended.
            EngineUnavailable: the engine is shut down, or cannot be started.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def receive(kind: str, payload: Any) -> None:
            if not answer.done() and kind != "event":
                answer.set_exception(payload) if kind == "error" else answer.set_result(payload)

        call_id = self._begin(method, params, resend and not early, early, receive)
        try:
            return await answer
        finally:
            self._end(call_id)

    async def stream(
        self, method: str, params: dict[str, Any], *, resend: bool = True
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield ``("event", …)`` and at last ``("result", …)``. Closing it early cancels the call.

        After its first event a call is not sent again: if the child dies, it raises `WorkerDied`.
        """
        replies: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

        def receive(*reply: Any) -> None:
            replies.put_nowait(reply)

        call_id = self._begin(method, params, resend, False, receive)
        try:
            kind = "event"
            while kind != "result":
                kind, payload = await replies.get()
                if kind == "error":
                    raise payload
                yield kind, payload
        finally:
            self._end(call_id)

    def _begin(
        self,
        method: str,
        params: dict[str, Any],
        resend: bool,
        early: bool,
        receiver: Callable[[str, Any], None],
    ) -> int:
        if self._broken and not early:
            raise EngineUnavailable(
                f"The engine cannot be started: {self._broken}", retry_after=30
            ) from self._broken
        if self._closing:
            raise EngineUnavailable("The engine is shut down.")
        call_id = next(self._ids)
        frame = pack(call_id, "call", {"method": method, "params": params})
        pending = self._pending[call_id] = PendingCall(frame, resend, early, receiver)
        if self.up.is_set() or early:
            self._send(pending)
        return call_id

    def _end(self, call_id: int) -> None:
        pending = self._pending.pop(call_id, None)
        if pending and pending.sent and not pending.ended:
            self._write(pack(call_id, "cancel", None))

    def _send(self, pending: PendingCall) -> None:
        if self._socket and not pending.sent:
            pending.sent = True
            self._write(pending.frame)

    def _write(self, frame: bytes) -> None:
        """Queue a frame: those of one turn of the event loop are written by one system call."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._socket:
            self._socket.transport.write(data)

    async def _spawn(self) -> None:
        """Start the child and wait until it is ready. If that fails, the child is ended."""
        try:
            await self._launch()
            info = await self.call("start", {"beside": list(self.place.beside)}, early=True)
            if self._on_ready:
                await self._on_ready(info)
        except BaseException:
            await self._reap()
            raise
        if self._gone.done():
            raise EngineUnavailable("The engine's process ended while it was started.")
        self.up.set()
        for pending in list(self._pending.values()):
            self._send(pending)

    async def _launch(self) -> None:
        self._process, ours = await self.place.launch(self._program)
        self._heartbeat = Heartbeat(self._hang_seconds)
        loop = asyncio.get_running_loop()
        _, self._socket = await loop.create_connection(
            lambda: EngineSocket(self._take, self._lost), sock=ours
        )
        self._gone = self._socket.gone

    def _take(self, call_id: int, kind: str, payload: Any) -> None:
        if pending := self._pending.get(call_id):
            pending.receive(kind, revive(payload) if kind == "error" else payload)
        elif call_id == PING:
            self._heartbeat.answered(payload)

    def _lost(self) -> None:
        self.up.clear()
        code = self._process.poll() if self._process else None
        status = "" if code is None else f" (exit status {code})"
        # `on_ready` waits for these, and they are not sent again.
        for pending in self._pending.values():
            if pending.early and not pending.ended:
                message = f"The engine's process ended{status}."
                pending.receive("error", WorkerDied(message, retry_after=2))

    async def _watch(self) -> None:
        """Ping the child, and end it if it is silent or hangs; then it is started again."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._process is None:
                continue
            answers, busy = self._heartbeat.answers, any(p.sent for p in self._pending.values())
            if why := self._heartbeat.tick(ready=self.up.is_set(), busy=busy):
                log.error("The engine %s %s; it is ended.", self._program.target, why)
                self.end()
            elif answers:
                self._write(pack(PING, "ping", None))

    async def _keep(self) -> None:
        """Start the child again whenever it ends. Calls are refused while that keeps failing."""
        while not self._closing:
            await asyncio.wait([self._gone])
            await self._reap()
            self._drop_lost_calls()
            self.restarts += 1
            log.warning("The engine %s ended; it is started again.", self._program.target)
            for failures in itertools.count(1):
                await self.may_start.wait()
                try:
                    await self._spawn()
                    self._broken = None
                    break
                except Exception as error:  # noqa: BLE001  any failed start is tried again
                    log.error("The engine could not be started (%d in a row): %s", failures, error)
                    no_place = isinstance(error, NoPlace)
                    if no_place or failures >= MAX_FAILED_STARTS:
                        self._broken = error if no_place else ConfigError(str(error))
                        self._fail_all(f"The engine cannot be started: {error}")
                    pause = 0.5 if no_place else 0.5 * 2 ** min(failures, 10)
                    await asyncio.sleep(min(MAX_PAUSE, pause))

    def _drop_lost_calls(self) -> None:
        for call_id, pending in list(self._pending.items()):
            if not pending.sent:
                continue
            pending.deaths += 1
            pending.sent = False
            if pending.resend and pending.deaths <= 2 and not self._heartbeat.hangs:
                continue
            del self._pending[call_id]
            kind, what = WorkerDied, "The engine's process ended during this call"
            if self._heartbeat.hangs:
                kind, what = WorkerHung, f"The engine did nothing for {self._hang_seconds:g} s"
            message = f"{what} and is being started again. Nothing was recorded; send it again."
            pending.receive("error", kind(message, retry_after=2))

    def _fail_all(self, message: str) -> None:
        for pending in self._pending.values():
            pending.receive("error", EngineUnavailable(message, retry_after=2))
        self._pending.clear()

    async def _reap(self) -> None:
        self.up.clear()
        if self._socket:
            self._socket.transport.abort()
            await asyncio.wait([self._gone])
            self._socket = None
        if process := self._process:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.to_thread(process.wait)
            self._process = None
