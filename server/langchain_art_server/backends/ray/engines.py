"""The engines of a server that are on a Ray cluster: its samplers and its learner.

An actor holds one process of an engine on a node (`EngineHost`). Bytes go from the server, or from
another process of the engine, to it by TCP, past Ray: the actor says where it listens, and passes
on what comes. If the actor ends, or the connection is closed, the process ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray.util

from langchain_art.errors import EngineUnavailable
from langchain_art.ray import placed_actors
from langchain_art.ray.placed_actors import ActorsUnavailable, PlacedActors
from langchain_art_server.backends.engines import SAMPLERS
from langchain_art_server.backends.ipc.child_process import (
    SECRET_BYTES,
    ChildProcess,
    EnginePlace,
    EngineProgram,
    NodeAddress,
    NoPlace,
    RemoteProcess,
    accept,
    connect,
)
from langchain_art_server.backends.replicas.sampler import ReplicatedSampler
from langchain_art_server.config import Settings

_CHUNK = 1 << 18


class EngineHost:
    """Starts an engine, and ends the one before. One at a time."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="art-engine-")  # mode 0700
        self._process: ChildProcess | None = None

    def start(self, arguments: tuple[Any, ...], seconds: float) -> NodeAddress:
        """Start the `EngineProgram` of these arguments.

        Returns where one connection is taken, within so many seconds. Raises ConfigError: its
        Python cannot be run.
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


#: What runs as a rank other than 0, which it is started beside.
RANK = "langchain_art_server.backends.peft.distributed.rank_zero:serve"
_WHOLE_GPU = 0.9  # vLLM's share of a GPU that it has alone, as is vLLM's own default
T = TypeVar("T")
#: Seconds in which a place is found again for an engine that was lost, before its calls are
#: refused; it is looked for on and on.
_FIND_SECONDS = 20.0
_CALL_SECONDS = 120.0  # of a call of the actor: to start a process, or to write an adapter's files
#: In which the server connects to the engine; and the engine, once its Python has started, to the
#: processes beside it.
_CONNECT_SECONDS, _BESIDE_SECONDS = 60.0, 600.0


class RayPlace(EnginePlace):
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
        there = await self._in_thread(self._put, path, files)
        try:
            yield there
        finally:
            with contextlib.suppress(NoPlace):  # the copy is gone with the node
                await self._in_thread(self._call, "drop", there.name)

    @contextlib.asynccontextmanager
    async def made(self, path: Path) -> AsyncGenerator[Path, None]:
        """See `EnginePlace.made`: copied from the node."""
        async with self.folder(path, ()) as there:
            yield there
            await self._in_thread(self._take, there.name, path)

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
        beside: list[NodeAddress] = []
        for number, target in enumerate(self._targets, 1):
            folder = {"folder": self._call("put", "beside", {}, actor=number)}
            given = (target, folder, *rest)
            beside.append(self._call("start", given, _BESIDE_SECONDS, actor=number))
        self.beside = beside
        engine: NodeAddress = self._call("start", program.arguments, _CONNECT_SECONDS)
        try:
            connection = connect(engine)
        except EngineUnavailable as error:
            raise NoPlace(f"{self._what}: {error}.", retry_after=5) from error
        return RemoteProcess(connection.dup()), connection

    def _put(self, path: Path, files: Sequence[str] | None) -> Path:
        if files is None:
            files = [file.name for file in path.iterdir() if file.is_file()]
        contents = {file: Path(path, file).read_bytes() for file in files}
        return Path(self._call("put", uuid.uuid4().hex, contents))

    def _take(self, name: str, path: Path) -> None:
        for file, content in self._call("take", name).items():
            Path(path, file).write_bytes(content)

    def _call(self, method: str, *arguments: object, actor: int = 0) -> Any:
        assert self._placed is not None
        try:
            return self._placed.call(method, *arguments, seconds=_CALL_SECONDS, actor=actor)
        except ActorsUnavailable as error:
            raise NoPlace(str(error), retry_after=5) from error


def ray_sampler(settings: Settings) -> ReplicatedSampler:
    """The sampler, of ``sampler.replicas`` engines. Raises ConfigError: no cluster is joined."""
    assert settings.ray is not None
    placed_actors.connect(settings.ray.address)
    chosen, needs = settings.sampler, replica_needs(settings)
    own = {"replicas": 1}
    if chosen.kind == "vllm" and settings.device != "cpu" and chosen.gpu_memory is None:
        own |= {"gpu_memory": _WHOLE_GPU}
    # One that is alone on its node, as far as it can see.
    alone = settings.model_copy(update={"sampler": chosen.model_copy(update=own)})
    kind, patience = SAMPLERS[chosen.kind], settings.ray.start_seconds
    places = [RayPlace(f"Replica {n}", needs, patience) for n in range(chosen.replicas)]
    return ReplicatedSampler([kind(alone, n, place) for n, place in enumerate(places)])


def learner_place(settings: Settings) -> RayPlace:
    """Place of the learner, a rank on each actor. The cluster must be joined."""
    assert settings.ray is not None
    chosen = settings.learner
    others = [RANK] * (chosen.ranks - 1) if chosen.kind == "peft" else []
    if (needs := settings.ray.learner) is None:
        needs = {"CPU": chosen.threads or 1} | ({} if settings.device == "cpu" else {"GPU": 1})
    return RayPlace("The learner", needs, settings.ray.start_seconds, others)


def replica_needs(settings: Settings) -> dict[str, float]:
    """Resources, in Ray's terms, that a replica takes of one node."""
    assert settings.ray is not None
    if settings.ray.replica is not None:
        return settings.ray.replica
    chosen = settings.sampler
    needs: dict[str, float] = {"CPU": chosen.threads or 1}
    if chosen.takes_gpu and settings.device != "cpu":
        needs["GPU"] = SAMPLERS[chosen.kind].gpus(settings)
    return needs
