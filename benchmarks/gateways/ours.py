"""``python -m benchmarks.gateways.ours``: our server over an engine that answers at once.

All that stands between a client and a real engine is as it is: HTTP, the router, the worker's
socket, the store. Only the engine in the child process does not sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateways.exchange import sampled
from langchain_art import LoraConfig
from langchain_art_server import __main__ as door
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import (
    ChatReply,
    Demonstration,
    LearnerStep,
    ModelInfo,
    TokenTurn,
)
from langchain_art_server.backends.embedded.sampler import TransformersSampler
from langchain_art_server.backends.ipc.channel import Channel
from langchain_art_server.backends.ipc.chat_codec import pack_reply
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service

INFO = ModelInfo("stub", "stub", 0, "cpu", "float32", 32768, 151_936, longest_token=128)


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the engine's process: every chat gets the same reply."""
    reply = pack_reply(ChatReply(tool_calls=[], finish_reason="stop", **sampled()))
    channel.listen()
    while True:
        call = channel.inbox.get()
        state = {"loop_lag": 0.0, "free_bytes": None}
        results = {"start": dataclasses.asdict(INFO), "chat": reply, "state": state}
        channel.result(call, results.get(call.method))
        if channel.inbox.empty():
            channel.flush()


class StubSampler(TransformersSampler):
    target = "benchmarks.gateways.ours:serve"


class StubLearner:
    """Makes an empty adapter and learns nothing."""

    restarts = 0
    problem = None
    weights = ""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (out / name).write_bytes(b"{}")

    async def step(
        self, request: LearnerStep, on_progress: Callable[[float, str], Awaitable[None]]
    ) -> dict[str, float]:
        raise RuntimeError("nothing is trained here")

    async def settle(self) -> None: ...

    async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
        raise RuntimeError("nothing is trained here")

    async def tokenize(self, turns: Sequence[Demonstration]) -> list[TokenTurn | str]:
        raise RuntimeError("nothing is trained here")


def build(settings: Settings) -> Service:
    return Service(settings, StubSampler(settings), StubLearner())


if __name__ == "__main__":
    door.build = build
    door.cli()
