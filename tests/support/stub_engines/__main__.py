"""``python -m tests.support.stub_engines MODEL``: the server over these engines."""

import contextlib
import dataclasses
import hashlib
import os
import queue
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
from langchain_art_server.backends.ipc.channel import Channel, EngineCall
from langchain_art_server.backends.ipc.chat_codec import pack_reply, unpack_request
from langchain_art_server.backends.ipc.child_process import EnginePlace
from langchain_art_server.backends.ipc.process_sampler import ProcessSampler
from langchain_art_server.backends.models.adapter_files import (
    CONFIG_FILE,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
)
from langchain_art_server.config import Settings
from langchain_art_server.gateway.service import Service
from tests.support.stub_engines import PROMPT, REPLY, mark

INFO = ModelInfo("stub", "stub", 1_000_000, "cpu", "float32", 2048, 1000, longest_token=16)
BASE = b"\0" * 32


class StubEngine:
    """The sampler's process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        least, most = map(float, os.environ["STUB_SECONDS"].split())
        self._seconds = lambda: random.uniform(least, most)
        self._weights: dict[str, bytes] = {}
        self._running: list[tuple[float, int, float, EngineCall, bytes]] = []

    def serve(self) -> None:
        self._channel.listen()
        while True:
            left = max(0.0, self._running[0][0] - time.monotonic()) if self._running else None
            with contextlib.suppress(queue.Empty):
                self._begin(self._channel.inbox.get(timeout=left))
            while self._running and self._running[0][0] <= time.monotonic():
                _, _, begun, call, weights = heappop(self._running)
                if not call.cancelled:
                    took = time.monotonic() - begun
                    self._channel.result(call, self._reply(call, weights, took))
            if self._channel.inbox.empty():
                self._channel.flush()

    def _begin(self, call: EngineCall) -> None:
        result: Any = None
        if call.method == "chat":
            weights = self._weights.get(call.params["adapter"] or "", BASE)
            now = time.monotonic()
            at = now + (0.0 if call.params["id"] == "probe" else self._seconds())
            heappush(self._running, (at, call.id, now, call, weights))
            return
        if call.method == "load_adapter":
            path = Path(call.params["path"], WEIGHTS_FILE)
            self._weights[call.params["name"]] = path.read_bytes()
        elif call.method == "unload_adapter":
            self._weights.pop(call.params["name"], None)
        elif call.method == "start":
            result = dataclasses.asdict(INFO)
        elif call.method == "state":
            result = {"loop_lag": 0.0, "free_bytes": None}
        self._channel.result(call, result)

    def _reply(self, call: EngineCall, weights: bytes, took: float) -> dict[str, Any]:
        request = unpack_request(call.params)
        asked = repr((request.messages, request.sampling.seed)).encode()
        drawn = hashlib.sha256(weights + asked).digest()
        count = min(REPLY, request.sampling.max_tokens or REPLY)
        value = mark(weights)
        reply = ChatReply(
            prompt_token_ids=list(hashlib.sha256(asked).digest()[:PROMPT]),
            token_ids=list(drawn[:count]),
            logprobs=[value] * count,
            content=f"{drawn[:count].hex()} took {took:.6f}",
            tool_calls=[],
            finish_reason="stop",
            top_logprobs=[[(0, value, "a")]] * count if request.sampling.top_logprobs else [],
            token_texts=[f"{token:02x}" for token in drawn[:count]],
        )
        return pack_reply(reply)


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the sampler's process."""
    StubEngine(channel).serve()


class StubSampler(ProcessSampler):
    target = "tests.support.stub_engines.__main__:serve"
    imports = ("tests.support.stub_engines.__main__",)

    def __init__(
        self, settings: Settings, replica: int | None = None, place: EnginePlace | None = None
    ) -> None:
        env = {"STUB_SECONDS": os.environ["STUB_SECONDS"]}  # on another machine, too
        super().__init__(settings, replica, place, env=env)


class StubLearner:
    """Its weights are the digest of the parent's and of the rows, advantages and all."""

    restarts = 0
    problem = None
    weights = no_images = ""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        self._write(out, BASE)

    async def step(
        self, request: LearnerStep, on_progress: Callable[[float, str], Awaitable[None]]
    ) -> dict[str, float]:
        await on_progress(0.5, "half of it")
        given = hashlib.sha256((request.parent / WEIGHTS_FILE).read_bytes())
        for row in request.rows:
            given.update(repr((list(row.token_ids), list(row.advantages))).encode())
        self._write(request.out, given.digest())
        moves = {"grad_norm": 1.0, "learning_rate": 1.0, "updates": 1.0}  # as far as these go
        return moves | {"tokens_trained": float(len(request.rows))}

    def _write(self, out: Path, digest: bytes) -> None:
        (out / CONFIG_FILE).write_bytes(b"{}")
        numbers = np.frombuffer(digest, np.uint8).astype(np.float32) / 256
        for name in (WEIGHTS_FILE, OPTIMIZER_FILE):
            save_file({"lora": numbers}, out / name)

    async def settle(self) -> None: ...

    async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
        return [[0.0] * len(row.token_ids) for row in rows]

    async def tokenize(self, turns: Sequence[Demonstration]) -> list[TokenTurn | str]:
        told = [hashlib.sha256(repr((one.messages, one.reply)).encode()).digest() for one in turns]
        return [TokenTurn(list(one[:PROMPT]), list(one[PROMPT:][:REPLY])) for one in told]


def build(settings: Settings) -> Service:
    if settings.ray is None:
        return Service(settings, StubSampler(settings), StubLearner())
    from langchain_art_server.backends.ray.engines import SAMPLERS, ray_sampler

    SAMPLERS["transformers"] = StubSampler
    return Service(settings, ray_sampler(settings), StubLearner())


def note_opens(log: str) -> None:
    """Write each path that this process opens, lists, makes or renames into a file."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove"):
            os.write(file, f"{os.path.realpath(os.fsdecode(args[0]))!r}\n".encode())

    sys.addaudithook(hook)


if __name__ == "__main__":
    if "STUB_OPENS" in os.environ:
        note_opens(os.environ["STUB_OPENS"])
    door.build = build
    door.cli()
