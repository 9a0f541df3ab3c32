"""The learner as the server holds it: an engine, that is a child process, of transformers and PEFT.

No torch here. `langchain_art_server.backends.peft.child` is the child's side. Adapters and rows
travel as files, requests and metrics as frames of `langchain_art_server.backends.ipc.worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from langchain_art.errors import ArtError, EngineUnavailable
from langchain_art.wire import LoraConfig
from langchain_art_server.algorithms.sequences.training_rows import Row, check_rows
from langchain_art_server.backends.base import Demonstration, LearnerStep, TokenTurn
from langchain_art_server.backends.ipc.child_process import EnginePlace, NoPlace
from langchain_art_server.backends.ipc.fork_server import MODEL_IMPORTS
from langchain_art_server.backends.ipc.step_codec import pack_step, write_rows
from langchain_art_server.backends.ipc.worker import Worker, WorkerDied, WorkerHung
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ATTEMPTS = 3  # most attempts at one step, if the child dies in it (out of memory, killed)
SETTLE_SECONDS = 20.0  # how long a cancelled step may go on
ROWS_FILE = "rows.npz"
LOGPROBS_FILE = "logprobs.npy"


class PeftLearner(Worker):
    """Trains adapters: LoRA through PEFT and AdamW on any torch device, in one child process.

    Reads of the settings `model`, `chat_template`, `device`, `dtype`, `losses` and `learner`.
    Nothing else reaches the child, API keys for example do not. It runs at `place`; None: on this
    machine.
    """

    core: ClassVar[str] = "langchain_art_server.backends.peft.distributed.rank_zero:make_core"
    """The function that makes the child's `LearnerCore`, as ``module:function``."""
    imports: ClassVar[tuple[str, ...]] = (
        "langchain_art_server.backends.peft.distributed.rank_zero",
        *MODEL_IMPORTS,
    )
    """See `Worker`."""

    def __init__(self, settings: Settings, place: EnginePlace | None = None) -> None:
        super().__init__(
            "langchain_art_server.backends.peft.child:serve",
            {"core": self.core, "options": self.options(settings)},
            self._note_vocabulary,
            hang_seconds=settings.learner.hang_seconds,
            env=self.environment(settings),
            imports=self.imports,
            python=str(settings.learner.python),
            place=place,
        )
        self._vocab_size, self._template = 0, settings.chat_template
        self.weights = self.no_images = ""  # as of `ModelInfo`, once it has started

    @staticmethod
    def options(settings: Settings) -> dict[str, Any]:
        """Keyword arguments of `core`."""
        names = ("model", "device", "dtype", "losses")
        where = {name: getattr(settings, name) for name in names}
        return where | settings.learner.model_dump(exclude={"kind", "python", "hang_seconds"})

    @staticmethod
    def environment(settings: Settings) -> dict[str, str]:
        """Environment variables of the child, in addition to the server's."""
        del settings  # `UnslothLearner` needs it
        return {}

    async def init_adapter(self, out: Path, lora: LoraConfig) -> None:
        """Write a fresh adapter, equal to the base. Raises ConfigError on unknown targets."""
        given = lora.model_dump(mode="json")

        async def init(files: AsyncExitStack, _attempt: int) -> None:
            there = await files.enter_async_context(self.place.made(out))
            params = {"out": str(there), "lora": given}
            await self.call("init_adapter", params, resend=False)

        await self._with_files("the first adapter", init)

    async def step(
        self, request: LearnerStep, on_progress: Callable[[float, str], Awaitable[None]]
    ) -> dict[str, float]:
        """See `LearnerCore.step`. If the child dies in it, the step starts again.

        Deterministic: the same request gives the same bytes on a CPU in float32.

        Raises:
            InvalidRequest: a row is malformed, or no token is trained.
            ArtError: the loss or the gradient is not finite; nothing was written.
            EngineUnavailable: the child died `MAX_ATTEMPTS` times, or made no progress for
                `hang_seconds` and was ended.
        """
        await asyncio.to_thread(check_rows, request.rows, self._vocab_size)
        rows_file = request.out / ROWS_FILE

        async def step(files: AsyncExitStack, attempt: int) -> dict[str, float]:
            place, enter = self.place, files.enter_async_context
            rows = await enter(place.folder(request.out, (ROWS_FILE,)))
            moved = replace(
                request,
                parent=await enter(place.folder(request.parent)),
                reference=request.reference and await enter(place.folder(request.reference)),
                out=await enter(place.made(request.out)),
                attempt=attempt,
            )
            return await self._step(pack_step(moved, rows / ROWS_FILE), on_progress)

        try:
            await asyncio.to_thread(write_rows, rows_file, request.rows)
            return await self._with_files(f"step {request.step}", step)
        finally:
            rows_file.unlink(missing_ok=True)

    async def settle(self) -> None:
        """Return when a step that was cancelled has stopped and uses the device no more.

        It stops at its next micro-batch; if not, its process is ended.
        """
        with contextlib.suppress(EngineUnavailable):  # it has ended already
            try:
                async with asyncio.timeout(SETTLE_SECONDS):
                    await self.call("settle", {})  # answered when the call before it has ended
            except TimeoutError:
                log.error("A cancelled step goes on; the learner is ended.")
                self.end()

    async def logprobs(self, adapter: Path | None, rows: list[Row]) -> list[list[float]]:
        """Logprobs of the learner, of each token given those before it, per row; 0.0 at index 0."""
        await asyncio.to_thread(check_rows, rows, self._vocab_size, trained=False)
        with tempfile.TemporaryDirectory(prefix="art-logprobs-") as folder:
            rows_file, out = Path(folder, ROWS_FILE), Path(folder, LOGPROBS_FILE)
            await asyncio.to_thread(write_rows, rows_file, rows)

            async def score(files: AsyncExitStack, _attempt: int) -> None:
                place, enter = self.place, files.enter_async_context
                given = await enter(place.folder(Path(folder), (ROWS_FILE,)))
                made = await enter(place.made(Path(folder)))
                there = adapter and str(await enter(place.folder(adapter)))
                names = {"rows": str(given / ROWS_FILE), "out": str(made / LOGPROBS_FILE)}
                await self.call("logprobs", names | {"adapter": there}, resend=False)

            await self._with_files("logprobs", score)
            flat: list[float] = np.load(out, allow_pickle=False).tolist()
        rest = iter(flat)
        return [[next(rest) for _ in row.token_ids] for row in rows]

    async def tokenize(self, turns: Sequence[Demonstration]) -> list[TokenTurn | str]:
        """Tokenise replies with the model's chat template, in the order given.

        A turn that continues an earlier one begins with its tokens, as far as the template renders
        it again. A turn that cannot be rendered gives the reason instead. Deterministic. Raises
        ConfigError if the model has no chat template.
        """
        asked = {"turns": [vars(turn) for turn in turns], "template": self._template}
        found = await self.call("tokenize", asked)
        return [one if isinstance(one, str) else TokenTurn(**one) for one in found]

    async def _with_files(self, what: str, do: Callable[[AsyncExitStack, int], Awaitable[T]]) -> T:
        """Do it with files where the child is, again if that dies. Raises as `step`."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            await self._arrive()
            try:
                async with AsyncExitStack() as files:
                    return await do(files, attempt)
            except (WorkerDied, NoPlace) as died:
                if attempt == MAX_ATTEMPTS or isinstance(died, WorkerHung):
                    raise
                log.warning("The learner died in %s, which starts again.", what)
        raise AssertionError("unreachable")

    async def _arrive(self) -> None:
        """Wait for a child on another machine. Raises EngineUnavailable out of patience."""
        if self.place.same_disk:
            return
        try:
            async with asyncio.timeout(self.place.patience):
                await self.up.wait()
        except TimeoutError:
            raise EngineUnavailable(f"{self.problem}.", retry_after=30) from None

    async def _note_vocabulary(self, info: dict[str, Any]) -> None:
        self._vocab_size, self.weights = info["vocab_size"], info["weights"]
        self.no_images = info["no_images"]

    async def _step(
        self, params: dict[str, Any], on_progress: Callable[[float, str], Awaitable[None]]
    ) -> dict[str, float]:
        # The worker must not resend it: `step` counts the attempts.
        stream = self.stream("step", params, resend=False)
        async with contextlib.aclosing(stream):  # closing it early cancels the step in the child
            async for kind, payload in stream:
                if kind == "result":
                    return payload
                await on_progress(payload["progress"], payload["message"])
        raise ArtError("The learner ended the step without a result.")
