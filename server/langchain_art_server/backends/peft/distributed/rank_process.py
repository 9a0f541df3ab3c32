"""The process of a rank other than 0: does what rank 0 does, at the same time. Child side only.

A message of rank 0 is a line of JSON, ``[method, params, files]``, and then the bytes of the files,
which a rank on another machine lacks. A beat is one byte at each tick of a heartbeat.
Run as a module, it is a rank on rank 0's machine; `serve` is one on another machine.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import torch

from langchain_art.errors import ArtError
from langchain_art_server.backends.ipc.channel import Channel
from langchain_art_server.backends.ipc.heartbeat import TICK_SECONDS
from langchain_art_server.backends.ipc.step_codec import read_rows, unpack_step
from langchain_art_server.backends.models.device import free_cache
from langchain_art_server.backends.peft.distributed.data_parallel import DataParallelCore
from langchain_art_server.backends.peft.distributed.process_group import Ranks
from langchain_art_server.backends.peft.learner_core import process_core

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
                messages.put(message)
        os._exit(0)

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
            if method == "step":
                core.step(unpack_step(params), lambda _fraction, _message: None)
            else:
                adapter = params["adapter"] and Path(params["adapter"])
                core.logprobs(adapter, read_rows(Path(params["rows"])))
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


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])), None)
