"""The engines of a server that are on a Ray cluster: its samplers and its learner."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from langchain_art.errors import EngineUnavailable
from langchain_art.ray import placed_actors
from langchain_art.ray.placed_actors import ActorsUnavailable, PlacedActors
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.ipc.child_process import (
    ChildProcess,
    EnginePlace,
    EngineProgram,
    NodeAddress,
    NoPlace,
    RemoteProcess,
    connect,
)
from langchain_art_server.backends.ipc.process_sampler import ProcessSampler
from langchain_art_server.backends.ray.engine_host import EngineHost
from langchain_art_server.backends.vllm.sampler import VllmSampler, gpus_of_replica
from langchain_art_server.config import Settings

#: What runs as a rank other than 0, which it is started beside.
RANK = "langchain_art_server.backends.peft.distributed.rank_process:serve"
#: vLLM's share of a GPU that it has alone, as is vLLM's own default.
_WHOLE_GPU = 0.9
T = TypeVar("T")
#: Seconds in which a place is found again for an engine that was lost, before its calls are
#: refused; it is looked for on and on.
_FIND_SECONDS = 20.0
#: Of a call of the actor: to start a process, or to write an adapter's files.
_CALL_SECONDS = 120.0
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


def ray_samplers(settings: Settings) -> list[ProcessSampler]:
    """One for each of ``sampler.replicas``; joins the cluster.

    Raises:
        ConfigError: the cluster cannot be joined.
    """
    assert settings.ray is not None
    placed_actors.connect(settings.ray.address)
    chosen, needs = settings.sampler, replica_needs(settings)
    own = {"replicas": 1}
    if chosen.kind == "vllm" and settings.device != "cpu" and chosen.gpu_memory is None:
        own |= {"gpu_memory": _WHOLE_GPU}
    # One that is alone on its node, as far as it can see.
    alone = settings.model_copy(update={"sampler": chosen.model_copy(update=own)})
    found: list[ProcessSampler] = []
    for number in range(chosen.replicas):
        place = RayPlace(f"Replica {number}", needs, settings.ray.start_seconds)
        if chosen.kind == "vllm":
            found.append(VllmSampler(alone, number, place))
        else:
            found.append(TransformersSampler(alone, place=place))
    return found


def learner_place(settings: Settings) -> RayPlace:
    """Place of the learner, a rank on each actor. The cluster must be joined."""
    assert settings.ray is not None
    chosen = settings.learner
    others = [RANK] * (chosen.ranks - 1) if chosen.kind == "peft" else []
    needs = learner_needs(settings)
    return RayPlace("The learner", needs, settings.ray.start_seconds, others)


def learner_needs(settings: Settings) -> dict[str, float]:
    """Resources, in Ray's terms, that each rank of the learner takes of one node."""
    assert settings.ray is not None
    if settings.ray.learner is not None:
        return settings.ray.learner
    needs: dict[str, float] = {"CPU": settings.learner.threads or 1}
    if settings.device != "cpu":
        needs["GPU"] = 1
    return needs


def replica_needs(settings: Settings) -> dict[str, float]:
    """Resources, in Ray's terms, that a replica takes of one node."""
    assert settings.ray is not None
    if settings.ray.replica is not None:
        return settings.ray.replica
    chosen = settings.sampler
    needs: dict[str, float] = {"CPU": chosen.threads or 1}
    if chosen.kind == "vllm" and settings.device != "cpu":
        needs["GPU"] = gpus_of_replica(chosen.args)
    return needs
