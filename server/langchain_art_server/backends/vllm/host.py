"""The child process that holds vLLM: renders prompts, reads replies, keeps adapters.

It ends when vLLM ends, and the parent starts both again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from langchain_art.errors import ArtError, ConfigError, EngineUnavailable, InvalidRequest
from langchain_art_server.algorithms.sequences.token_sets import DrawnFrom, of_bits, single
from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.chat.fair_queue import FairSlots
from langchain_art_server.backends.chat.guided_decoding import GrammarChild
from langchain_art_server.backends.chat.output_processor import truncates
from langchain_art_server.backends.chat.sampler_host import THREADS, ChatCall, SamplerHost
from langchain_art_server.backends.chat.tool_calls.formats import FORMATS
from langchain_art_server.backends.ipc.channel import Channel, EngineCall
from langchain_art_server.backends.ipc.heartbeat import LoopLag, watch_event_loop
from langchain_art_server.backends.models.images import images_of, probe_image
from langchain_art_server.backends.models.loading import load_outline
from langchain_art_server.backends.vllm.adapter_copies import AdapterCopies, CopiedAdapter
from langchain_art_server.backends.vllm.client import BASE, Completion, VllmError, completion_body
from langchain_art_server.backends.vllm.images import SentImage, SentImages, route_lacks
from langchain_art_server.backends.vllm.process import Cards, VllmProcess, fill_in, kept_slots
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
#: How long vLLM may take to end after an error of its own before the error is answered.
_DYING_SECONDS = 10.0
_CANCEL_SECONDS = 0.05  # how often cancelled calls are looked for
#: vLLM's name of an adapter of zeros, for calls of the base model on a CPU. There, a call without
#: an adapter gets the weights of the last slot when it shares a batch with calls of adapters
#: (vLLM 0.32: its index is -1, which torch reads as the last).
_ZERO_ADAPTER = "base@0/0"
_FORCED_SLACK = 1e-3  # how far below 0 vLLM's logprob of the only allowed token may be
_PROBE_TOKENS = 16  # tokens of the prompt that probes a new adapter


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the child: `config` is `Settings` as JSON, and `replica` and `cards`."""
    others = config.pop("replica"), config.pop("cards")
    asyncio.run(_serve(channel, Settings.model_validate(config), *others))


async def _serve(channel: Channel, settings: Settings, replica: int | None, cards: Cards) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[EngineCall] = asyncio.Queue()
    channel.listen(lambda call: loop.call_soon_threadsafe(inbox.put_nowait, call))
    begin = await inbox.get()
    try:
        host = VllmHost(settings, channel, replica, cards)
        await host.start()
    except ArtError as error:
        channel.error(begin, error)
        channel.flush()
        return
    channel.result(begin, vars(host.info))
    channel.flush()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.end_with_vllm())
        tasks.create_task(host.cancel_calls())
        tasks.create_task(watch_event_loop(host.lag))
        while True:
            host.take(await inbox.get())


class VllmHost(SamplerHost[CopiedAdapter]):
    """Everything this process holds: vLLM, the chat template, adapters and open calls."""

    min_temperature = 1e-2  # vLLM raises lower temperatures to this one

    def __init__(
        self, settings: Settings, channel: Channel, replica: int | None, cards: Cards
    ) -> None:
        settings, outline = fill_in(settings, load_outline(settings), cards)
        assert settings.sampler.kind == "vllm"
        form = settings.sampler.tool_format
        images = images_of(settings.model, outline.model, outline.tokenizer, SentImages)
        if not isinstance(images, str):
            images = route_lacks(settings.sampler.python) or images
        self._sent = images if isinstance(images, SentImages) else None
        super().__init__(outline, channel, FORMATS[form] if form else None, images)
        self._copies = copies = AdapterCopies(
            outline.model, settings.sampler.max_rank or settings.lora.rank, self.info.dtype
        )
        self.process = VllmProcess(
            settings, self.info, copies.folder, copies.targets, copies.max_rank, replica
        )
        self._vllm = self.process.client
        self._replays = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._end, self._python = outline.tokenizer.eos_token_id, settings.sampler.python
        self.lag = LoopLag()
        self._loading = asyncio.Lock()
        self._running: dict[int, tuple[EngineCall, asyncio.Task[None]]] = {}
        self._preparing = FairSlots(THREADS)
        most = settings.sampler.max_batch
        self._sampling = FairSlots(most, kept_slots(most))
        self._base = BASE
        self._base_probe: list[tuple[int, float]] = []
        self._flush_is_due = False
        self._methods: dict[str, Callable[[EngineCall], Awaitable[Any]]] = {
            "chat": self._chat,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "state": self._state,
            "sleep": lambda call: self._vllm.change("/sleep?level=1&mode=wait"),
            "wake": lambda call: self.process.wake(),
        }

    async def start(self) -> None:
        """Start vLLM and wait for its first answer. Raises ConfigError."""
        try:
            await self.process.start()
            await self.process.ready()
            self.info = await self.process.fitted(self.info)
            if self.info.device == "cpu":
                await self._vllm.load(_ZERO_ADAPTER, self._copies.zero_adapter())
                self._base = _ZERO_ADAPTER
            self._base_probe = await self._probe(self._base)
            if self._sent is not None:
                await self._check_images(self._sent)
        except VllmError as error:
            await self._wait_for_end()  # for its last output
            self._remove_copies()
            raise ConfigError(
                f"vLLM started and could not sample a first token: {error}. Its output is in "
                f"{self.process.log}; it said:\n{self.process.last_output()}"
            ) from error
        except BaseException:
            self._remove_copies()
            raise

    def _remove_copies(self) -> None:
        """Remove the copies of adapters: the guard does not if it was killed."""
        shutil.rmtree(self._copies.folder, ignore_errors=True)

    async def _wait_for_end(self) -> bool:
        assert self.process.ended is not None
        await asyncio.wait([self.process.ended], timeout=_DYING_SECONDS)
        return self.process.ended.done()

    async def end_with_vllm(self) -> None:
        """Wait for vLLM's end and end this process."""
        await self.process.watch(lambda: bool(self._running))
        log.error("vLLM has ended. It said:\n%s", self.process.last_output())
        self._remove_copies()
        self._channel.flush()
        os._exit(1)

    async def cancel_calls(self) -> None:
        """Cancel the tasks of calls that the parent cancelled, and show that the loop turns.

        Each once: what such a task gives back takes its time. What loads an adapter goes on.
        """
        while True:
            await asyncio.sleep(_CANCEL_SECONDS)
            self._channel.flush()
            for call, task in self._running.values():
                if call.cancelled and call.method == "chat" and not task.cancelling():
                    task.cancel()

    def take(self, call: EngineCall) -> None:
        """Begin a call."""
        self._running[call.id] = call, asyncio.create_task(self._answer(call))

    async def _answer(self, call: EngineCall) -> None:
        try:
            self._send(self._channel.result, call, await self._methods[call.method](call))
        except VllmError as failure:
            if await self._wait_for_end():
                # No answer: this process ends too, and the parent tells the client.
                await asyncio.Event().wait()
            error = EngineUnavailable(
                f"vLLM failed: {failure}. Send the call again.", retry_after=2
            )
            self._send(self._channel.error, call, error)
        except Exception as error:  # one bad call must not end the others
            if not isinstance(error, ArtError):
                log.exception("The call %s failed.", call.method)
            self._send(self._channel.error, call, error)
        finally:
            del self._running[call.id]

    def _send(self, send: Callable[[EngineCall, Any], None], call: EngineCall, what: Any) -> None:
        """Queue a frame; those of one turn of the event loop are written together."""
        send(call, what)
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        self._channel.flush()

    async def _state(self, _call: EngineCall) -> dict[str, Any]:
        queues = self._preparing, self._sampling
        return {
            "loop_lag": self.lag.seconds,
            "free_bytes": None,  # set aside
            "running": self._sampling.held,
            "waiting": self._preparing.held + sum(one.waiting for one in queues),
        }

    async def _chat(self, call: EngineCall) -> dict[str, Any]:
        adapter, client = self._hold(call), call.params["client"]
        try:
            if self._is_quick(call):
                chat = self._prepare(call, adapter)
            else:
                async with self._preparing.one(client):
                    loop = asyncio.get_running_loop()
                    chat = await loop.run_in_executor(self._threads, self._prepare, call, adapter)
            body = completion_body(
                adapter.vllm_name if adapter else self._base,
                (shown := chat.prompt.ids),
                (request := chat.request).sampling,
                max_tokens=chat.limit,
                eos=sorted(self._eos),
                grammar=chat.grammar,
                stream=request.stream,
                tenant=request.tenant,
            )
            if self._sent is not None and chat.prompt.images:
                body = self._sent.body(body, chat.prompt.images, request.tenant)
                shown = self._sent.written(shown)
            async with self._sampling.one(client):
                done = await self._complete(chat, body)
            if done.prompt_ids != shown:
                if chat.prompt.images:
                    raise InvalidRequest(
                        f"got images that vLLM shows in a prompt of {len(done.prompt_ids or ())} "
                        f"tokens, and the model's processor here in one of {len(shown)}, which "
                        "would be trained; leave them out, or try another size.",
                        param="messages",
                    )
                raise EngineUnavailable("vLLM was shown another prompt than it was sent.")
            drawn_from = await self._drawn_from(chat, done)
            finish = "length" if done.finish == "length" else "stop"
            return self._finish(chat, done.token_ids, done.logprobs, done.top, finish, drawn_from)
        finally:
            if (unused := self._release(adapter)) is not None:
                await self._free(unused)

    async def _complete(self, chat: ChatCall[CopiedAdapter], body: dict[str, Any]) -> Completion:
        """Sample a completion, up to the first stop string in the text as this server decodes it.

        Raises VllmError: see there; or the completion has no end, or a logprob is not finite.
        """
        whole, output = Completion([], []), chat.output
        sampling, pieces = chat.request.sampling, self._vllm.complete(body)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                whole.prompt_ids = whole.prompt_ids or piece.prompt_ids
                whole.finish = piece.finish
                for at, token in enumerate(piece.token_ids):
                    whole.token_ids.append(token)
                    whole.logprobs.append(piece.logprobs[at])
                    if sampling.top_logprobs:
                        whole.top.append(piece.top[at][: sampling.top_logprobs])
                    if sampling.stop and token not in self._eos:
                        self._stream(chat, output.update(whole.token_ids))
                        if output.stopped is not None:
                            whole.finish = "stop"
                            return whole
                if chat.request.stream and piece.finish is None:
                    self._stream(chat, output.update(whole.token_ids))
        if whole.finish is None:
            raise VllmError("the completion has no end")
        if not all(map(math.isfinite, whole.logprobs)):
            raise VllmError("the completion's logprobs are not finite")
        return whole

    async def _drawn_from(self, chat: ChatCall[CopiedAdapter], done: Completion) -> DrawnFrom:
        """The tokens that each token could be drawn from, which vLLM does not say."""
        sampling = chat.request.sampling
        if truncates(sampling):
            return DrawnFrom("the server does not ask vLLM which tokens it kept")
        if chat.grammar is None or sampling.temperature == 0.0:
            return DrawnFrom()
        replay = functools.partial(self._replay, chat.grammar, done)
        return await asyncio.get_running_loop().run_in_executor(self._replays, replay)

    @functools.cached_property
    def _grammar_replay(self) -> GrammarChild:
        """Replay of grammars as vLLM makes them: its library, and the tokenizer's end token."""
        return self._grammars.replay([self._end], self._python)

    def _replay(self, grammar: str, done: Completion) -> DrawnFrom:
        """Tokens that the grammar allowed at each token of a reply, computed again."""
        try:
            masks = self._grammar_replay.masks(grammar, done.token_ids)
        except ArtError as error:  # vLLM's Python cannot do it
            return DrawnFrom(f"what it allowed could not be computed: {error}")
        if masks is None or len(masks) < len(done.token_ids):
            return DrawnFrom("what it allowed could not be computed")
        found = DrawnFrom()
        for bits, token, logprob in zip(masks, done.token_ids, done.logprobs, strict=True):
            allowed = of_bits(bits, self.info.vocab_size)
            found.add(allowed)
            if allowed == single(token) and logprob < -_FORCED_SLACK:
                return DrawnFrom("vLLM followed another grammar")
        return found

    async def _load_adapter(self, call: EngineCall) -> None:
        name, path = call.params["name"], Path(call.params["path"])
        async with self._loading:
            if self._is_loaded(name, path):
                return
            adapter = await asyncio.to_thread(self._copies.add, name, path)
            try:
                await self._vllm.load(adapter.vllm_name, adapter.folder)
                if call.params["probe"]:
                    await self._check_effect(adapter)
            except (ConfigError, VllmError):
                await self._free(adapter)
                raise
            if call.cancelled:  # nobody will unload it
                await self._free(adapter)
                return
            self._adapters[name] = adapter

    async def _check_effect(self, adapter: CopiedAdapter) -> None:
        """Sample one token of a new adapter, and compare its logprobs with the base model's.

        Raises ConfigError: they are equal, in float32, though the adapter is not zero.
        """
        probe = await self._probe(adapter.vllm_name)
        if not adapter.has_effect or probe != self._base_probe:
            return
        problem = f"{adapter.path} was loaded, and vLLM still answers exactly as the base model"
        if self.info.dtype == "float32":
            raise ConfigError(f"{problem}: it does not apply this adapter.")
        log.warning("%s; its change may be too small for %s.", problem, self.info.dtype)

    async def _probe(self, model: str) -> list[tuple[int, float]]:
        """The most probable tokens after a fixed prompt, and their logprobs."""
        vocab = self.info.vocab_size
        ids = [at * vocab // _PROBE_TOKENS for at in range(_PROBE_TOKENS)]
        sampling = Sampling(top_logprobs=8, temperature=0.0)
        body = completion_body(model, ids, sampling, max_tokens=1, eos=[])
        return [top async for piece in self._vllm.complete(body) for top in piece.top[0]]

    async def _check_images(self, sent: SentImages) -> None:
        """Show vLLM an image; if its tokens are not the processor's, calls may have none."""
        image = cast(SentImage, sent.read("", probe_image()))
        body = completion_body(self._base, image.whole, Sampling(), max_tokens=1, eos=[])
        written, why = sent.written(image.whole), ""
        try:
            async for piece in self._vllm.complete(sent.body(body, {"": image})):
                if piece.prompt_ids != written:
                    got = len(piece.prompt_ids or ())
                    why = f"vLLM writes {got} tokens for one, not the {len(written)} of its files"
        except InvalidRequest as error:
            why = f"vLLM refuses one: {error}"
        if why:
            self.info, self._images = replace(self.info, no_images=why), None

    async def _unload_adapter(self, call: EngineCall) -> None:
        if (adapter := self._retire(call.params["name"])) is not None:
            await self._free(adapter)

    async def _free(self, adapter: CopiedAdapter) -> None:
        await self._vllm.unload(adapter.vllm_name)
        self._copies.remove(adapter)
