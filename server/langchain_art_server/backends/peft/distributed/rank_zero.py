"""Rank 0 of the learner: has the others do each step with it, and answers the parent; the others.

They are processes of this machine, which rank 0 starts (this module, run), or of the machines of a
cluster (`serve`), to which it is connected. Those get the adapter's and the rows' files with each
step: a message is a line of JSON, ``[method, params, files]``, and then the bytes of the files. A
beat is one byte at each tick of a heartbeat. Child side only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.ipc.channel import Channel
from langchain_art_server.backends.ipc.heartbeat import TICK_SECONDS, Heartbeat
from langchain_art_server.backends.ipc.step_codec import (
    pack_step,
    read_rows,
    unpack_step,
    write_rows,
)
from langchain_art_server.backends.models.device import free_cache, set_threads, torch_device
from langchain_art_server.backends.peft.distributed.data_parallel import DataParallelCore
from langchain_art_server.backends.peft.distributed.process_group import (
    Ranks,
    leave,
    listening_store,
    shared_folders,
)
from langchain_art_server.backends.peft.learner_core import LearnerCore, process_core
from langchain_art_server.backends.peft.logprob_scoring import Progress

log = logging.getLogger(__name__)
_CHUNK = 1 << 20


def serve(channel: Channel, config: dict[str, str]) -> None:
    """Be a rank whose files come with the messages, into ``config["folder"]``."""
    run(channel.socket, Path(config["folder"]))


def run(connection: socket.socket, folder: Path | None) -> None:
    """Do what rank 0 says, until it is gone. The first message is ``start``.

    `folder` is for files that come with messages; None: rank 0 is on the same machine.
    """
    messages: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()

    def read() -> None:
        with connection.makefile("rb") as stream:
            while message := receive(stream, folder):
                shared_folders.extend(message[1].get("shared", ()))
                messages.put(message)
        leave(0)

    threading.Thread(target=read, daemon=True, name="rank-0").start()
    beat(connection)
    _, start = messages.get()
    options: dict[str, Any] = start["core"]
    ranks = Ranks(start["rank"], start["size"], start["meeting"], torch.device(options["device"]))
    try:
        core = process_core(lambda: DataParallelCore(**options, ranks=ranks), start["threads"])
    except ArtError:
        messages.get()  # rank 0 reports why, and then ends, and this process with it
        return
    while True:
        method, params = messages.get()
        try:
            is_step = method == "step"
            with ranks.together():  # one that cannot read is waited for by none
                asked = unpack_step(params) if is_step else read_rows(Path(params["rows"]))
            if isinstance(asked, LearnerStep):
                core.step(asked, lambda _fraction, _message: None)
            else:
                core.logprobs(params["adapter"] and Path(params["adapter"]), asked)
        except ArtError as error:
            log.debug("Rank %d: %s", ranks.rank, error)  # rank 0 reports the same
        free_cache()


def beat(connection: socket.socket) -> None:
    """Show rank 0, on and on, that this process is not stopped."""

    def write() -> None:
        while True:
            try:
                connection.sendall(b".")
            except OSError:
                return  # rank 0 is gone, which the reading thread sees
            time.sleep(TICK_SECONDS / 2)

    threading.Thread(target=write, daemon=True, name="beat").start()


def receive(stream: BinaryIO, folder: Path | None) -> tuple[str, dict[str, Any]] | None:
    """The next message of `OtherRank.send`; None: rank 0 is gone.

    Its files are put into `folder`, in place of those that came before; `params` has their paths.
    """
    try:
        line = stream.readline()
        if not line.endswith(b"\n"):
            return None
        method, params, sizes = json.loads(line)
        if folder is not None:
            shutil.rmtree(folder)
            folder.mkdir()
            for key, name, size in sizes:
                (folder / key).mkdir(exist_ok=True)
                if not _copy(stream, folder / key / name, size):
                    return None
                sent = Path(params[key]).name
                params[key] = str(folder / key / name if name == sent else folder / key)
    except OSError:
        return None
    return method, params


def _copy(stream: BinaryIO, path: Path, size: int) -> bool:
    with path.open("wb") as file:
        while size > 0:
            data = stream.read(min(size, _CHUNK))
            if not data:
                return False
            file.write(data)
            size -= len(data)
    return True


class OtherRank:
    """Rank 0's end of another rank, number `rank`, from 1, with a connection to its process.

    Without a `process`, that is on another machine, which has not this one's files, and ends it
    when the connection ends.
    """

    def __init__(
        self, rank: int, connection: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.rank, self._connection, self._process = rank, connection, process

    @classmethod
    def started(cls, rank: int) -> OtherRank:
        """Start one on this machine."""
        ours, theirs = socket.socketpair()
        module = "langchain_art_server.backends.peft.distributed.rank_zero"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
            )
        return cls(rank, ours, process)

    def send(self, method: str, params: Mapping[str, Any], paths: Sequence[str] = ()) -> None:
        """Have it do a method of `run`. Ends this process if the other one has ended.

        `paths` are keys of the JSON-able `params` whose values are files or folders that it reads,
        or null.
        """
        files: list[tuple[str, Path]] = []
        for key in paths if self._process is None else ():
            path = Path(params[key] or os.devnull)
            files += [(key, path)] if path.is_file() else []
            # One that is not there is refused by this rank, which all ranks then learn.
            files += [(key, one) for one in sorted(path.iterdir())] if path.is_dir() else []
        sizes = [(key, path.name, path.stat().st_size) for key, path in files]
        try:
            self._connection.sendall(json.dumps([method, dict(params), sizes]).encode() + b"\n")
            for _, path in files:
                with path.open("rb") as file:
                    self._connection.sendfile(file)
        except OSError:
            leave()

    def watch(self, is_ready: Callable[[], bool]) -> None:
        """End this process when that one ends, or is silent: else it would wait for it forever.

        `is_ready` says whether all ranks have loaded the model.
        """
        threading.Thread(target=self._watch, args=(is_ready,), daemon=True).start()

    def _watch(self, is_ready: Callable[[], bool]) -> NoReturn:
        heartbeat = Heartbeat(math.inf)
        while True:
            if select.select([self._connection], [], [], TICK_SECONDS)[0]:
                with contextlib.suppress(OSError):
                    if self._connection.recv(4096):
                        heartbeat.answered(0)
                        continue
                break
            if why := heartbeat.tick(ready=is_ready(), busy=False):
                log.error("Rank %d of the learner %s; all ranks are started again.", self.rank, why)
                if self._process is not None:
                    self._process.kill()
                break
        status = "" if self._process is None else f" (exit status {self._process.wait()})"
        log.error("Rank %d of the learner ended%s.", self.rank, status)
        leave()


class RankZero(DataParallelCore):
    """Args as for `make_core`, `base` being those of `LearnerCore`.

    On one machine, rank k takes the k-th GPU from `device` on; in a cluster, each the one that its
    process sees.

    Raises ConfigError: there are not that many GPUs, or a rank cannot load the model.
    """

    def __init__(
        self, threads: int, ranks: int, shard: bool, beside: Sequence[socket.socket], **base: Any
    ) -> None:
        first = torch_device(base["device"])
        self._shared: str | None = None
        if beside:
            devices = ["cpu" if first.type == "cpu" else f"{first.type}:{first.index or 0}"] * ranks
            self._others = [OtherRank(rank, one) for rank, one in enumerate(beside, 1)]
            store, meeting = listening_store(beside[0].getsockname()[0], ranks)
        else:
            devices = rank_devices(first, ranks)
            self._shared = tempfile.mkdtemp(prefix="art-ranks-")  # mode 0700
            shared_folders.append(self._shared)
            self._others = [OtherRank.started(rank) for rank in range(1, ranks)]
            store, meeting = None, f"file://{self._shared}/meeting"
        self._ready = threading.Event()
        for other in self._others:
            other.watch(self._ready.is_set)
            core = base | {"device": devices[other.rank], "shard": shard}
            group = {"rank": other.rank, "size": ranks, "meeting": meeting}
            more = {"threads": threads, "core": core, "shared": shared_folders}
            other.send("start", group | more)
        try:
            own = Ranks(0, ranks, meeting, torch.device(devices[0]), store)
            mine: dict[str, Any] = base | {"device": devices[0]}
            super().__init__(**mine, ranks=own, shard=shard)
            self._ready.set()
        except ArtError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error

    def step(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """See `DataParallelCore.step`."""
        pack = partial(pack_step, request)
        with self._told("step", request.rows, pack, "parent", "reference"):
            return super().step(request, progress)

    def logprobs(
        self, adapter: Path | None, rows: Sequence[Row], progress: Progress | None = None
    ) -> list[np.ndarray]:
        """See `LearnerCore.logprobs`; with a sharded base, every rank computes all rows."""
        if not self._shard:
            return super().logprobs(adapter, rows, progress)
        given = {"adapter": adapter and str(adapter)}
        with self._told("logprobs", rows, lambda file: given | {"rows": str(file)}, "adapter"):
            return super().logprobs(adapter, rows, progress)

    @contextlib.contextmanager
    def _told(
        self,
        method: str,
        rows: Sequence[Row],
        params: Callable[[Path], dict[str, Any]],
        *paths: str,
    ) -> Generator[None]:
        """Have the others do a method, while this rank does; after it all have read the rows."""
        with contextlib.ExitStack() as files:
            made = tempfile.TemporaryDirectory(prefix="art-ranks-", dir=self._shared)
            file = Path(files.enter_context(made), "rows.npz")
            write_rows(file, rows)
            for other in self._others:
                other.send(method, params(file), (*paths, "rows"))
            if self._shared is None:
                files.close()  # they have been sent it
            with self._ranks.together():
                pass  # all have read it
            yield


def rank_devices(first: torch.device, ranks: int) -> list[str]:
    """The device of each rank. Raises ConfigError if there are not as many."""
    if first.type == "cpu":
        return ["cpu"] * ranks
    start, there = first.index or 0, torch.cuda.device_count() if first.type == "cuda" else 1
    if start + ranks > there:
        raise ConfigError(
            f"got learner.ranks={ranks} from the device {first} on, expected at most "
            f"{there - start}: each rank needs a device of its own"
        )
    return [f"{first.type}:{start + rank}" for rank in range(ranks)]


def make_core(
    threads: int | None, ranks: int, shard: bool, beside: Sequence[socket.socket] = (), **base: Any
) -> LearnerCore:
    """The core of a process that does nothing else, on one rank or several (`RankZero`).

    Args:
        threads: of each rank; None: all ranks together take half of the processors.
        ranks: how many.
        shard: as for `DataParallelCore`.
        beside: connections to the processes of the other ranks (`serve`), on other
            machines; none: they are started on this one.
        base: as for `LearnerCore`, with the device of the first rank.
    """
    if ranks == 1:
        return process_core(lambda: LearnerCore(**base), threads)
    set_threads(threads)
    own = threads or max(1, torch.get_num_threads() // ranks)
    return process_core(lambda: RankZero(own, ranks, shard, beside, **base), own)


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])), None)
