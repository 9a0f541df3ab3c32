"""The embedded learner: transformers and PEFT in a process of its own. No torch on this side.

`PeftLearner` is what the server holds; `serve` is the child's loop around
`langchain_art_server.backends.peft.learner_core.PeftEngine`. Adapters and rows travel as files, requests
and metrics as frames of `worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import LoraConfig
from langchain_art_server.algorithms.sequences.training_rows import Row, check_rows
from langchain_art_server.backends.base import Demonstration, LearnerStep, TokenTurn
from langchain_art_server.backends.ipc.channel import Call, Channel
from langchain_art_server.backends.ipc.child_python_path import LentPackages
from langchain_art_server.backends.ipc.step_codec import (
    read_rows,
    read_step,
    step_words,
    write_rows,
)
from langchain_art_server.backends.ipc.worker import Worker, WorkerDied
from langchain_art_server.config import Settings

if TYPE_CHECKING:
    from langchain_art_server.backends.peft.learner_core import PeftEngine

log = logging.getLogger(__name__)
#: How often a step is begun at most when the process that takes it dies (out of memory, killed).
MAX_ATTEMPTS = 3
ROWS_FILE = "rows.npz"
LOGPROBS_FILE = "logprobs.npy"


class PeftLearner:
    """A `base.Learner` on whatever torch finds: LoRA through PEFT, AdamW, one child process.

    Args:
        settings: reads `model`, `device`, `dtype` and `learner`; nothing else reaches the
            child (no key is in its command line).
    """

    engine: ClassVar[str] = (
        "langchain_art_server.backends.peft.distributed.data_parallel:ranked_engine"
    )
    """What makes the engine in the child, as ``module:function``."""
    env: ClassVar[dict[str, str]] = {}
    """What the child's environment has beside the server's."""

    def __init__(self, settings: Settings) -> None:
        self._lent = LentPackages(settings.learner.python)
        self._worker = Worker(
            "langchain_art_server.backends.peft.learner:serve",
            {"engine": self.engine, "options": self.options(settings)},
            self._on_ready,
            env=self.env | self._lent.env,
            python=str(settings.learner.python),
        )
        self._vocab_size = 0

    @staticmethod
    def options(settings: Settings) -> dict[str, Any]:
        """What `engine` gets."""
        return {
            "model": settings.model,
            "device": settings.device,
            "dtype": settings.dtype,
            "threads": settings.learner.threads,
            "ranks": settings.learner.ranks,
            "shard": settings.learner.shard,
        }

    @property
    def restarts(self) -> int:
        """How often the child was started again after it died."""
        return self._worker.restarts

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._worker.pid

    async def start(self) -> None:
        """Load the base model. Raises ConfigError if it cannot be loaded."""
        await self._worker.start()

    async def close(self) -> None:
        """End the child."""
        await self._worker.close()

    async def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        """Write a fresh adapter (equal to the base: B = 0) into the directory `out`.

        Raises:
            ConfigError: a target is not the name of a linear layer; lists those that are.
        """
        params = {"out": str(out), "lora": lora.model_dump(mode="json")}
        await self._worker.call("init_adapter", params)

    async def step(
        self, request: LearnerStep, on_progress: Callable[[float, str], Awaitable[None]]
    ) -> dict[str, float]:
        """Learn from `request.rows`; see `PeftEngine.step` for the metrics.

        If the child dies in the middle, the step is begun again: files in `out` are overwritten.

        Raises:
            InvalidRequest: the rows make no sense, or nothing in them is trained.
            ArtError: the loss or the gradient is not finite; nothing was written.
            EngineUnavailable: the child died `MAX_ATTEMPTS` times.
        """
        await asyncio.to_thread(check_rows, request.rows, self._vocab_size)
        rows_file = request.out / ROWS_FILE
        params = step_words(request, rows_file)
        try:
            await asyncio.to_thread(write_rows, rows_file, request.rows)
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    return await self._step(params, on_progress)
                except WorkerDied:
                    if attempt == MAX_ATTEMPTS:
                        raise
                    log.warning("The learner died in step %d; beginning it again.", request.step)
            raise AssertionError("unreachable")
        finally:
            rows_file.unlink(missing_ok=True)

    async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
        """Per row, the learner's own logprob of each token given those before it.

        Args:
            adapter: directory of an adapter; None is the base model.
            rows: their `temperature` is applied; mask, logprobs and advantages are not read.

        Returns:
            Per row, one number per token, in nats; 0.0 at index 0.
        """
        await asyncio.to_thread(check_rows, rows, self._vocab_size, trained=False)
        with tempfile.TemporaryDirectory(prefix="art-logprobs-") as folder:
            rows_file, out = Path(folder, ROWS_FILE), Path(folder, LOGPROBS_FILE)
            await asyncio.to_thread(write_rows, rows_file, rows)
            params = {
                "adapter": None if adapter is None else str(adapter),
                "rows": str(rows_file),
                "out": str(out),
            }
            await self._worker.call("logprobs", params)
            flat: list[float] = np.load(out, allow_pickle=False).tolist()
        rest = iter(flat)
        return [[next(rest) for _ in row.token_ids] for row in rows]

    async def tokenize(self, turns: Sequence[Demonstration]) -> list[TokenTurn | str]:
        """See `Learner.tokenize`."""
        found = await self._worker.call("tokenize", {"turns": [vars(turn) for turn in turns]})
        return [one if isinstance(one, str) else TokenTurn(**one) for one in found]

    async def _on_ready(self, info: dict[str, Any]) -> None:
        self._vocab_size = info["vocab_size"]

    async def _step(
        self, params: dict[str, Any], on_progress: Callable[[float, str], Awaitable[None]]
    ) -> dict[str, float]:
        # Not sent again by the worker: `step` counts the attempts.
        stream = self._worker.stream("step", params, resend=False)
        async with contextlib.aclosing(stream):  # closed early, it cancels the step in the child
            async for kind, payload in stream:
                if kind == "result":
                    return payload
                await on_progress(payload["progress"], payload["message"])
        raise ArtError("The learner ended the step without a result.")


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """The child's loop: one call after the other, until the process ends.

    Args:
        channel: to the parent; the first call is ``start``.
        config: `engine`, which makes the engine, as ``module:function``, and its `options`.
    """
    channel.listen()
    methods: dict[str, Callable[[Call], Any]] = {}
    while True:
        call = channel.inbox.get()
        try:
            if call.method == "start":
                methods, payload = _start(channel, config)
            elif call.cancelled:
                raise ArtError("The call was cancelled before it began.")
            else:
                payload = methods[call.method](call)
            channel.result(call, payload)
        except Exception as error:  # whatever it is, its caller must hear of it
            log.debug("The call %s failed.", call.method, exc_info=True)
            channel.error(call, error)
        channel.flush()


def _start(
    channel: Channel, config: dict[str, Any]
) -> tuple[dict[str, Callable[[Call], Any]], dict[str, Any]]:
    # Only the child may import torch; the engine comes first, since Unsloth patches what follows.
    module, _, function = config["engine"].partition(":")
    try:
        made_by = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable} lacks what learns: {error}. Install it there, or give the setting "
            "`python` of [learner] the path of one that has it (docs/gpu.md)."
        ) from error
    engine: PeftEngine = made_by(**config["options"])
    from langchain_art_server.backends.chat.tokenize_replies import token_turns  # noqa: PLC0415

    def init_adapter(call: Call) -> None:
        engine.init_adapter(Path(call.params["out"]), LoraConfig(**call.params["lora"]))

    def step(call: Call) -> dict[str, float]:
        def progress(fraction: float, message: str) -> None:
            if call.cancelled:
                raise ArtError("The step was cancelled; nothing was published.")
            channel.event(call, {"progress": fraction, "message": message})
            channel.flush()

        return engine.step(read_step(call.params), progress)

    def logprobs(call: Call) -> None:
        p = call.params
        adapter = None if p["adapter"] is None else Path(p["adapter"])
        numbers = engine.logprobs(adapter, read_rows(Path(p["rows"])))
        with Path(p["out"]).open("wb") as file:
            np.save(file, np.concatenate(numbers), allow_pickle=False)

    def tokenize(call: Call) -> list[str | dict[str, Any]]:
        turns = [Demonstration(**turn) for turn in call.params["turns"]]
        found = token_turns(engine.name, engine.base, turns)
        return [one if isinstance(one, str) else vars(one) for one in found]

    methods = {"init_adapter": init_adapter, "step": step, "logprobs": logprobs}
    return methods | {"tokenize": tokenize}, engine.info
