"""A node of a Ray cluster as the place of an engine: the server's side of `engine_host`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from langchain_art.errors import EngineUnavailable
from langchain_art.ray.placed_actors import ActorsUnavailable, PlacedActors
from langchain_art_server.backends.ipc.child_process import ChildProcess, EngineProgram, NoPlace
from langchain_art_server.backends.ipc.node_socket import NodeAddress, connect
from langchain_art_server.backends.ray.engine_host import EngineHost

T = TypeVar("T")
#: Seconds in which a place is found again for an engine that was lost, before its calls are
#: refused; it is looked for on and on.
_FIND_SECONDS = 20.0
#: Of a call of the actor: to start a process, or to write an adapter's files.
_CALL_SECONDS = 120.0
#: In which the server connects to the engine; and the engine, once its Python has started, to the
#: processes beside it.
_CONNECT_SECONDS, _BESIDE_SECONDS = 60.0, 600.0


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


class RayPlace:
    """A `EnginePlace` on a Ray cluster, for one engine.

    Args:
        what: what the engine is, for messages: ``Replica 1``.
        needs: what it takes of one node, in Ray's resources.
        start_seconds: how long the first start waits for room, and later work that has a patience.
        beside: what runs beside the engine, each in a process of its own with an actor that takes
            as much, on the same node where there is room: ``module:function`` as `Worker.target`.
            All are started again when the engine is.
    """

    same_disk = False

    def __init__(
        self,
        what: str,
        needs: Mapping[str, float],
        start_seconds: float,
        beside: Sequence[str] = (),
    ) -> None:
        self._what, self._needs, self._seconds = what, needs, start_seconds
        self.patience, self._targets = start_seconds, beside
        #: See `EnginePlace.beside`.
        self.beside: Sequence[NodeAddress] = ()
        self._placed: PlacedActors | None = None
        # Not asyncio's threads, which a few places without room would keep from everybody.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")

    @property
    def problem(self) -> str | None:
        """See `EnginePlace.problem`."""
        return self._placed.problem if self._placed else None

    async def launch(self, program: EngineProgram) -> tuple[ChildProcess, socket.socket]:
        """See `EnginePlace.launch`. Waits for room."""
        return await self._in_thread(self._launch, program)

    @contextlib.asynccontextmanager
    async def folder(
        self, path: Path, files: Sequence[str] | None = None
    ) -> AsyncGenerator[Path, None]:
        """See `EnginePlace.folder`: a copy on the node, removed at the end."""
        async with self._copy(uuid.uuid4().hex, path, files) as there:
            yield there

    @contextlib.asynccontextmanager
    async def made(self, path: Path) -> AsyncGenerator[Path, None]:
        """See `EnginePlace.made`: copied from the node."""
        name = uuid.uuid4().hex
        async with self._copy(name, path, ()) as there:
            yield there
            await self._in_thread(self._take, name, path)

    @contextlib.asynccontextmanager
    async def _copy(
        self, name: str, path: Path, files: Sequence[str] | None
    ) -> AsyncGenerator[Path, None]:
        there = await self._in_thread(self._put, name, path, files)
        try:
            yield there
        finally:
            with contextlib.suppress(NoPlace):  # the copy is gone with the node
                await self._in_thread(self._call, "drop", name)

    async def close(self) -> None:
        """See `EnginePlace.close`."""
        if self._placed is not None:
            await asyncio.to_thread(self._placed.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, do: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do, *arguments)

    def _launch(self, program: EngineProgram) -> tuple[ChildProcess, socket.socket]:
        if self._placed is None:
            actors = 1 + len(self._targets)
            self._placed = PlacedActors(self._what, EngineHost, self._needs, actors=actors)
        try:
            self._placed.wait(self._seconds)
            self._seconds = _FIND_SECONDS
        except ActorsUnavailable as error:
            raise NoPlace(str(error), retry_after=5) from error
        _, _, *rest = program.arguments
        self.beside = [
            self._start_beside(number, target, rest)
            for number, target in enumerate(self._targets, 1)
        ]
        engine: NodeAddress = self._call("start", program.arguments, _CONNECT_SECONDS)
        try:
            connection = connect(engine)
        except EngineUnavailable as error:
            raise NoPlace(f"{self._what}: {error}.", retry_after=5) from error
        return RemoteProcess(connection.dup()), connection

    def _start_beside(self, number: int, target: str, rest: list[Any]) -> NodeAddress:
        folder = {"folder": self._call("put", "beside", {}, actor=number)}
        return self._call("start", (target, folder, *rest), _BESIDE_SECONDS, actor=number)

    def _put(self, name: str, path: Path, files: Sequence[str] | None) -> Path:
        if files is None:
            files = [file.name for file in path.iterdir() if file.is_file()]
        contents = {file: Path(path, file).read_bytes() for file in files}
        return Path(self._call("put", name, contents))

    def _take(self, name: str, path: Path) -> None:
        for file, content in self._call("take", name).items():
            Path(path, file).write_bytes(content)

    def _call(self, method: str, *arguments: object, actor: int = 0) -> Any:
        assert self._placed is not None
        try:
            return self._placed.call(method, *arguments, seconds=_CALL_SECONDS, actor=actor)
        except ActorsUnavailable as error:
            raise NoPlace(str(error), retry_after=5) from error
