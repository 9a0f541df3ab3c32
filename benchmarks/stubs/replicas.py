"""``REPLICAS=N python -m benchmarks.stubs.replicas``: our server over N engines that only wait.

Each is a process of its own that answers `SLOTS` calls at once, after `SERVICE_SECONDS` each; more
wait for a slot. The gateway, the router, the workers' sockets and the store are as they are.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections import deque
from typing import Any

from benchmarks.gateways.exchange import sampled
from benchmarks.gateways.ours import INFO, StubLearner, StubSampler
from langchain_art_server import __main__ as door
from langchain_art_server.backends.base import ChatReply
from langchain_art_server.backends.ipc.channel import Channel, EngineCall
from langchain_art_server.backends.ipc.chat_codec import pack_reply
from langchain_art_server.backends.replicas.sampler import ReplicatedSampler
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service

SLOTS, SERVICE_SECONDS = 8, 0.8


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of an engine's process."""
    reply = pack_reply(ChatReply(tool_calls=[], finish_reason="stop", **sampled()))
    running: deque[tuple[float, EngineCall]] = deque()
    waiting: deque[EngineCall] = deque()
    channel.listen()
    while True:
        left = max(0.0, running[0][0] - time.monotonic()) if running else None
        try:
            call = channel.inbox.get(timeout=left)
            if call.method == "chat":
                waiting.append(call)
            else:
                start = dataclasses.asdict(INFO) if call.method == "start" else None
                channel.result(call, start)
        except queue.Empty:
            pass
        now = time.monotonic()
        while running and running[0][0] <= now:
            channel.result(running.popleft()[1], reply)
        while waiting and len(running) < SLOTS:
            running.append((now + SERVICE_SECONDS, waiting.popleft()))
        channel.flush()


class WaitingSampler(StubSampler):
    target = "benchmarks.stubs.replicas:serve"


def build(settings: Settings) -> Service:
    engines = [WaitingSampler(settings) for _ in range(int(os.environ["REPLICAS"]))]
    return Service(settings, ReplicatedSampler(engines), StubLearner())


if __name__ == "__main__":
    door.build = build
    door.cli()
