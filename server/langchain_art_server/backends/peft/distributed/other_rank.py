"""Link between rank 0 and another rank: messages to it, and its beats. Child side only.

A message is a line of JSON, ``[method, params, files]``, and then the bytes of the files, which a
rank on another machine lacks. A beat is one byte at each tick of a heartbeat.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from langchain_art_server.backends.ipc.heartbeat import TICK_SECONDS, Heartbeat
from langchain_art_server.backends.peft.distributed.process_group import LOST

log = logging.getLogger(__name__)
_CHUNK = 1 << 20


class OtherRank:
    """Rank 0's end of another rank, number `rank`, from 1.

    Args:
        connection: to its process.
        process: it, if it is on this machine; None: it is on another one, which has not this one's
            files, and ends it when the connection ends.
    """

    def __init__(
        self, rank: int, connection: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.rank, self._connection, self._process = rank, connection, process

    @classmethod
    def started(cls, rank: int) -> OtherRank:
        """Start one on this machine."""
        ours, theirs = socket.socketpair()
        module = "langchain_art_server.backends.peft.distributed.rank_process"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
            )
        return cls(rank, ours, process)

    def send(self, method: str, params: Mapping[str, Any], paths: Sequence[str] = ()) -> None:
        """Have it do something. Ends this process if the other one has ended.

        Args:
            method: of `rank_process`.
            params: JSON-able.
            paths: keys of `params` whose values are files or folders that it reads, or null.
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
            os._exit(LOST)

    def watch(self, is_ready: Callable[[], bool]) -> None:
        """End this process when that one ends, or is silent: else it would wait for it forever.

        `is_ready` says whether all ranks have loaded the model.
        """
        threading.Thread(target=self._watch, args=(is_ready,), daemon=True).start()

    def _watch(self, is_ready: Callable[[], bool]) -> NoReturn:
        heartbeat = Heartbeat(math.inf)
        while True:
            if select.select([self._connection], [], [], TICK_SECONDS)[0]:
                if not self._beats():
                    break
                heartbeat.answered(0)
            elif why := heartbeat.tick(ready=is_ready(), busy=False):
                log.error("Rank %d of the learner %s; all ranks are started again.", self.rank, why)
                if self._process is not None:
                    self._process.kill()
                break
        status = "" if self._process is None else f" (exit status {self._process.wait()})"
        log.error("Rank %d of the learner ended%s.", self.rank, status)
        os._exit(LOST)

    def _beats(self) -> bool:
        try:
            return bool(self._connection.recv(4096))
        except OSError:
            return False


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
