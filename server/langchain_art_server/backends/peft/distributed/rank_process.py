"""The process of a rank other than 0: does what rank 0 does, at the same time. Child side only.

Run as a module, it is a rank on rank 0's machine; `serve` is one on another machine.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from langchain_art.errors import ArtError
from langchain_art_server.backends.ipc.channel import Channel
from langchain_art_server.backends.ipc.codec import read_rows, unpack_step
from langchain_art_server.backends.models.device import free_cache
from langchain_art_server.backends.peft.core_process import process_core
from langchain_art_server.backends.peft.distributed.data_parallel import DataParallelCore
from langchain_art_server.backends.peft.distributed.other_rank import beat, receive
from langchain_art_server.backends.peft.distributed.process_group import Ranks

log = logging.getLogger(__name__)


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


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])), None)
