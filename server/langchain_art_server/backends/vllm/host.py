"""The process that holds vLLM: renders prompts, reads replies, keeps adapters. It ends with vLLM.

Imported only there: the parent (`vllm_sampler`) needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable, UnknownModel
from langchain_art_server.backends.base import ChatRequest, Sampling
from langchain_art_server.backends.chat.chat_template import ChatFormat
from langchain_art_server.backends.chat.guided_decoding import Grammars
from langchain_art_server.backends.chat.output_processor import (
    Piece,
    Speech,
    hidden_ids,
    read_request,
    room,
    why_excluded,
)
from langchain_art_server.backends.chat.tool_parser import FORMATS
from langchain_art_server.backends.ipc.chat_codec import pack_reply
from langchain_art_server.backends.ipc.worker import Call, Channel
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.vllm.adapter_copies import Loaded, Shelf
from langchain_art_server.backends.vllm.client import BASE, Drawn, VllmFailed, completion_body
from langchain_art_server.backends.vllm.process import VllmProcess
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
#: vLLM raises lower temperatures to this one.
_COLDEST = 1e-2
#: How long vLLM may take to end after an error of its own; longer, and the error stands alone.
_DYING_SECONDS = 10.0
#: How often calls that nobody waits for any more are looked for.
_SWEEP_SECONDS = 0.05
#: vLLM's name of an adapter that changes nothing, for calls of the base model on a CPU. There, in
#: one batch with calls of adapters, a call without one gets the weights of the last slot, once
#: that has been filled (vLLM 0.32: its number is -1, which torch reads as the last).
_NOTHING = "base@0/0"
#: Tokens of the prompt that is asked of each adapter when it is loaded.
_PROBE_TOKENS = 16


def serve(
    channel: Channel, config: dict[str, Any], host_type: type[VllmHost] | None = None
) -> None:
    """Entry point of the child. `config` is `Settings` as JSON. Ends with the process."""
    settings = Settings.model_validate(config)
    asyncio.run(_serve(channel, settings, host_type or VllmHost))


async def _serve(channel: Channel, settings: Settings, host_type: type[VllmHost]) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Call] = asyncio.Queue()

    def accept(call: Call) -> bool:
        loop.call_soon_threadsafe(inbox.put_nowait, call)
        return True

    channel.listen(accept)
    begin = await inbox.get()
    try:
        host = host_type(settings, channel)
        await host.start()
    except ArtError as error:
        channel.error(begin, error)
        channel.flush()
        return
    channel.result(begin, dataclasses.asdict(host.info))
    channel.flush()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.end_with_vllm())
        tasks.create_task(host.sweep())
        while True:
            host.take(await inbox.get())


class VllmHost:
    """Everything this process holds: vLLM, the chat format, adapters and open calls."""

    process_type: ClassVar[type[VllmProcess]] = VllmProcess

    def __init__(self, settings: Settings, channel: Channel) -> None:
        assert settings.sampler.kind == "vllm"
        outline = load_outline(settings)
        self.info = outline.info
        form = settings.sampler.tool_format
        self._format = ChatFormat(outline.tokenizer, outline.eos, FORMATS[form] if form else None)
        self._eos = outline.eos
        self._hidden = hidden_ids(self._format)
        self._grammars = Grammars(outline.tokenizer, self.info.vocab_size, sorted(outline.eos))
        self._shelf = Shelf(
            outline.model, settings.sampler.max_rank or settings.lora.rank, self.info.dtype
        )
        self.process = self.process_type(
            settings, self.info, self._shelf.folder, self._shelf.targets, self._shelf.max_rank
        )
        self._vllm = self.process.client
        self._channel = channel
        self._adapters: dict[str, Loaded] = {}
        self._loading = asyncio.Lock()
        self._running: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        self._base = BASE
        self._base_says: list[tuple[int, float]] = []
        self._said = False
        self._methods: dict[str, Callable[[Call], Awaitable[Any]]] = {
            "chat": self._chat,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "sleep": lambda call: self._vllm.sleep(),
            "wake": lambda call: self._vllm.wake(),
        }

    async def start(self) -> None:
        """Start vLLM and wait for its first answer. Raises ConfigError."""
        try:
            await self.process.start()
            await self.process.ready()
            if self.info.device == "cpu":
                await self._vllm.load(_NOTHING, self._shelf.nothing())
                self._base = _NOTHING
            self._base_says = await self._first_token(self._base)
        except VllmFailed as failure:
            assert self.process.ended is not None
            await asyncio.wait([self.process.ended], timeout=_DYING_SECONDS)  # for its last words
            self._leave_nothing()
            raise ConfigError(
                f"vLLM started and could not say a first token: {failure}. Its output is in "
                f"{self.process.log}; it said:\n{self.process.last_words()}"
            ) from failure
        except BaseException:
            self._leave_nothing()
            raise

    def _leave_nothing(self) -> None:
        """Remove the copies of adapters, where the guard did not: it may have been killed."""
        shutil.rmtree(self._shelf.folder, ignore_errors=True)

    async def end_with_vllm(self) -> None:
        """Wait for vLLM's end and follow it: the parent starts both anew."""
        await self.process.watch(lambda: bool(self._running))
        log.error("vLLM has ended. It said:\n%s", self.process.last_words())
        self._leave_nothing()
        self._channel.flush()
        os._exit(1)

    async def sweep(self) -> None:
        """Cancel the calls that the parent lost interest in."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for call, task in self._running.values():
                if call.cancelled:
                    task.cancel()

    def take(self, call: Call) -> None:
        """Begin a call."""
        self._running[call.id] = call, asyncio.create_task(self._answer(call))

    async def _answer(self, call: Call) -> None:
        try:
            self._say(self._channel.result, call, await self._methods[call.method](call))
        except VllmFailed as failure:
            error = await self._after(failure)
            self._say(self._channel.error, call, error)
        except Exception as error:  # one bad call must not end the others
            if not isinstance(error, ArtError):
                log.exception("The call %s failed.", call.method)
            self._say(self._channel.error, call, error)
        finally:
            del self._running[call.id]

    async def _after(self, failure: VllmFailed) -> EngineUnavailable:
        """The error to answer, unless vLLM is dying: then this process ends, unheard.

        The parent sends a call without an answer again, which is better than an error.
        """
        assert self.process.ended is not None
        await asyncio.wait([self.process.ended], timeout=_DYING_SECONDS)
        if self.process.ended.done():
            await asyncio.Event().wait()
        return EngineUnavailable(f"vLLM failed: {failure}. Send the call again.", retry_after=2)

    def _say(self, say: Callable[[Call, Any], None], call: Call, what: Any) -> None:
        """Queue a frame; those of one turn of the loop leave together."""
        say(call, what)
        if not self._said:
            self._said = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._said = False
        self._channel.flush()

    # --- calls ----------------------------------------------------------------------------------

    async def _chat(self, call: Call) -> dict[str, Any]:
        request = read_request(call.params, _COLDEST)
        if request.adapter is None:
            return await self._sample(call, request, self._base)
        adapter = self._adapters.get(request.adapter)
        if adapter is None:
            raise UnknownModel(
                f"got the adapter {request.adapter!r}, expected one of {sorted(self._adapters)} or "
                f"the base model {self.info.name!r}."
            )
        adapter.users += 1
        try:
            return await self._sample(call, request, adapter.inner)
        finally:
            adapter.users -= 1
            await self._let_go(adapter)

    async def _sample(self, call: Call, request: ChatRequest, model: str) -> dict[str, Any]:
        prompt = self._format.prompt(request.messages, request.tools)
        limit = room(len(prompt.ids), request.sampling.max_tokens, self.info.max_model_len)
        grammar = self._grammars.source(request, self._format.tools)
        if grammar is not None:
            self._grammars.constraint(request, self._format.tools)  # refuses what no engine can
        body = completion_body(
            model,
            prompt.ids,
            request.sampling,
            max_tokens=limit,
            eos=sorted(self._eos),
            grammar=grammar,
            stream=request.stream,
        )
        speech = Speech(request, self._format, self._hidden, self._eos)
        drawn = await self._draw(call, request, body, speech)
        if drawn.prompt_ids != prompt.ids:
            raise EngineUnavailable("vLLM was shown another prompt than it was sent.")
        self._send(call, request, speech.end(drawn.token_ids))
        excluded_because = why_excluded(request, constrained=grammar is not None)
        finish: Literal["stop", "length"] = "length" if drawn.finish == "length" else "stop"
        reply = speech.reply(
            prompt.ids, drawn.token_ids, drawn.logprobs, drawn.top, finish, excluded_because
        )
        message = {"role": "assistant", "content": reply.content, "tool_calls": reply.tool_calls}
        self._format.remember(prompt, drawn.token_ids, request.messages, request.tools, message)
        return pack_reply(reply)

    async def _draw(
        self, call: Call, request: ChatRequest, body: dict[str, Any], speech: Speech
    ) -> Drawn:
        """All pieces as one, ended by the first stop string as this server reads text."""
        whole = Drawn([], [])
        most = request.sampling.top_logprobs
        pieces = self._vllm.draw(body)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                whole = dataclasses.replace(
                    whole, prompt_ids=whole.prompt_ids or piece.prompt_ids, finish=piece.finish
                )
                for at, (token, value) in enumerate(
                    zip(piece.token_ids, piece.logprobs, strict=True)
                ):
                    whole.token_ids.append(token)
                    whole.logprobs.append(value)
                    if most:
                        whole.top.append(piece.top[at][:most])
                    if token in self._eos or not request.sampling.stop:
                        continue
                    self._send(call, request, speech.hear(whole.token_ids))
                    if speech.stopped:
                        return dataclasses.replace(whole, finish="stop")
                if request.stream and piece.finish is None:
                    self._send(call, request, speech.hear(whole.token_ids))
        if whole.finish is None:
            raise VllmFailed("the completion has no end")
        if not all(map(math.isfinite, whole.logprobs)):
            raise VllmFailed("the completion's logprobs are not finite")
        return whole

    def _send(self, call: Call, request: ChatRequest, piece: Piece) -> None:
        content, calls = piece
        if request.stream and (content or calls):
            self._say(self._channel.event, call, {"content": content, "tool_calls": calls})

    # --- adapters -------------------------------------------------------------------------------

    async def _load_adapter(self, call: Call) -> None:
        name, path = call.params["name"], Path(call.params["path"])
        async with self._loading:
            old = self._adapters.get(name)
            if old is not None and old.path != path:
                raise ConfigError(
                    f"got {path} for the adapter {name!r}, which is loaded from {old.path}. A name "
                    "is used once; publish a new version under a new name."
                )
            if old is None:
                self._adapters[name] = await self._load(name, path, call.params["probe"])

    async def _load(self, name: str, path: Path, probe: bool) -> Loaded:
        loaded = await asyncio.to_thread(self._shelf.put, name, path)
        try:
            await self._vllm.load(loaded.inner, loaded.folder)
        except (ConfigError, VllmFailed):
            self._shelf.drop(loaded)
            raise
        try:
            if probe:
                await self._probe(loaded)
        except (ConfigError, VllmFailed):
            await self._forget(loaded)
            raise
        return loaded

    async def _probe(self, loaded: Loaded) -> None:
        """Ask one token of a new adapter: it must be computed, be a number, and not be the base's.

        Raises:
            ConfigError: it is not.
        """
        says = await self._first_token(loaded.inner)
        if not loaded.moves or says != self._base_says:
            return
        problem = f"{loaded.path} was loaded, and vLLM still answers exactly as the base model does"
        if self.info.dtype == "float32":
            raise ConfigError(f"{problem}: it does not apply this adapter.")
        log.warning("%s; its change may be below what %s can show.", problem, self.info.dtype)

    async def _first_token(self, model: str) -> list[tuple[int, float]]:
        """The most probable tokens after a fixed prompt, and their logprobs."""
        vocab = self.info.vocab_size
        ids = [at * vocab // _PROBE_TOKENS for at in range(_PROBE_TOKENS)]
        body = completion_body(
            model, ids, Sampling(top_logprobs=8, temperature=0.0), max_tokens=1, eos=[]
        )
        return [top async for drawn in self._vllm.draw(body) for top in drawn.top[0]]

    async def _unload_adapter(self, call: Call) -> None:
        if (adapter := self._adapters.pop(call.params["name"], None)) is not None:
            adapter.retired = True
            await self._let_go(adapter)

    async def _let_go(self, adapter: Loaded) -> None:
        if adapter.retired and not adapter.users:
            adapter.retired = False  # once
            await self._forget(adapter)

    async def _forget(self, adapter: Loaded) -> None:
        await self._vllm.unload(adapter.inner)
        self._shelf.drop(adapter)
