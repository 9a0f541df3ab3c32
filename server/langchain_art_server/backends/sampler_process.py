"""The sampler's own process: takes calls from the channel, runs the engine, answers.

Imported only there: the parent (`transformers_sampler`) needs no torch.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from langchain_art.errors import ArtError, ConfigError, InvalidRequest, PromptTooLong, UnknownModel
from langchain_art_server.backends.base import ChatReply, ChatRequest, ModelInfo, Sampling
from langchain_art_server.backends.chat_format import ChatFormat, Prompt
from langchain_art_server.backends.decoding import Engine, Job
from langchain_art_server.backends.grammar import Grammars
from langchain_art_server.backends.lora import Adapter, AdapterBank
from langchain_art_server.backends.model_loading import load_model
from langchain_art_server.backends.model_runner import make_runner
from langchain_art_server.backends.prefix_cache import PrefixCache
from langchain_art_server.backends.reply_frame import pack_reply
from langchain_art_server.backends.reply_text import ReplyText
from langchain_art_server.backends.token_choice import Draw
from langchain_art_server.backends.tool_calls import ReplyParser
from langchain_art_server.backends.torch_setup import set_threads
from langchain_art_server.backends.worker import Call, Channel
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
#: Below this, logits / temperature leaves float32.
_COLDEST = 1e-3


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the child. `config` is `Settings` as JSON. Ends with the process."""
    channel.listen()
    if Path(config["model"]).is_dir():
        disable_progress_bar()  # there is no download to watch
    start = channel.inbox.get()
    try:
        host = SamplerHost(Settings.model_validate(config), channel)
    except ArtError as error:
        channel.error(start, error)
        channel.flush()
        return
    channel.result(start, dataclasses.asdict(host.info))
    channel.flush()
    while True:
        host.turn()


@dataclass(eq=False)
class _Running:
    call: Call
    request: ChatRequest
    prompt: Prompt
    job: Job
    text: ReplyText
    parser: ReplyParser
    untrainable: str | None
    streamed: int = 0


class SamplerHost:
    """Everything the child holds: the model, its adapters, the engine and the open calls."""

    def __init__(self, settings: Settings, channel: Channel) -> None:
        set_threads(settings.sampler.threads)
        loaded = load_model(settings)
        budget = settings.sampler.kv_cache_bytes
        with torch.inference_mode():
            runner = make_runner(
                loaded.model,
                max_slots=settings.sampler.max_batch,
                max_len=loaded.info.max_model_len,
                exact=settings.max_model_len is not None,
                budget=budget,
            )
        self._prefixes: PrefixCache | None = None
        max_len = loaded.info.max_model_len
        if (cache := runner.cache) is not None:
            max_len = cache.max_len
            self._prefixes = PrefixCache(
                cache.layout, budget=budget, device=cache.device, dtype=cache.dtype
            )
        self.info: ModelInfo = dataclasses.replace(loaded.info, max_model_len=max_len)
        self._format = ChatFormat(loaded.tokenizer, loaded.eos)
        self._grammars = Grammars(loaded.tokenizer, self.info.vocab_size, sorted(loaded.eos))
        self._eos = loaded.eos
        self._hidden = self._hidden_ids(loaded.tokenizer)
        self._bank = AdapterBank(loaded.model, runner.device)
        self._adapters: dict[str, Adapter] = {}
        self._retired: list[Adapter] = []
        self.engine = Engine(
            runner, self._bank, self._prefixes, loaded.eos, settings.sampler.max_batch
        )
        self._channel = channel
        self._running: dict[Job, _Running] = {}
        self._methods: dict[str, Callable[[Call], None]] = {
            "chat": self._chat,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    def turn(self) -> None:
        """Take what came in, do one step, write what came out. Blocks while there is nothing."""
        self._take()
        if self.engine.busy:
            for job in self.engine.step():
                self._end(self._running.pop(job))
            for running in list(self._running.values()):
                if running.request.stream:
                    self._stream(running)
        self._channel.flush()

    def _take(self) -> None:
        wait = not self.engine.busy
        while True:
            try:
                call = self._channel.inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if call.cancelled:
                continue
            try:
                self._methods[call.method](call)
            except ArtError as error:
                self._channel.error(call, error)
            except Exception as error:  # one bad call must not end the others
                log.exception("The call %s failed.", call.method)
                self._channel.error(call, error)

    # --- calls ----------------------------------------------------------------------------------

    def _chat(self, call: Call) -> None:
        request = _request(call.params)
        adapter = None
        if request.adapter is not None:
            adapter = self._adapters.get(request.adapter)
            if adapter is None:
                raise UnknownModel(
                    f"got the adapter {request.adapter!r}, expected one of "
                    f"{sorted(self._adapters)} or the base model {self.info.name!r}."
                )
        prompt = self._format.prompt(request.messages, request.tools)
        limit = self._limit(len(prompt.ids), request.sampling.max_tokens)
        form = self._format.tools
        draw = Draw(
            request.sampling,
            random.Random(request.sampling.seed),
            self._grammars.constraint(request, form),
        )
        parses = bool(request.tools) and request.tool_choice != "none"
        text = ReplyText(self._visible, request.sampling.stop)
        parser = ReplyParser(form if parses else None, one_call=not request.parallel_tool_calls)
        job = Job(prompt.ids, limit, draw, adapter, cancelled=lambda: call.cancelled)
        running = _Running(call, request, prompt, job, text, parser, _untrainable(request, draw))
        if request.sampling.stop:
            job.watch = lambda token: self._watch(running, token)
        if adapter is not None:
            adapter.users += 1
        self._running[job] = running
        self.engine.add(job)

    def _limit(self, prompt: int, max_tokens: int | None) -> int:
        room = self.info.max_model_len - prompt
        if room < 1:
            raise PromptTooLong(
                f"got a prompt of {prompt} tokens, expected at most "
                f"{self.info.max_model_len - 1}: the context of {self.info.max_model_len} must "
                "have room for a reply. Shorten the messages, or serve with a larger "
                "max_model_len.",
                param="messages",
            )
        return room if max_tokens is None else max(1, min(max_tokens, room))

    def _load_adapter(self, call: Call) -> None:
        name, path = call.params["name"], Path(call.params["path"])
        old = self._adapters.get(name)
        if old is not None and old.path != path:
            raise ConfigError(
                f"got {path} for the adapter {name!r}, which is loaded from {old.path}. A name is "
                "used once; publish a new version under a new name."
            )
        if old is None:
            root = 0 if self._prefixes is None else self._prefixes.new_root()
            self._adapters[name] = self._bank.load(name, path, root)
        self._channel.result(call, None)

    def _unload_adapter(self, call: Call) -> None:
        adapter = self._adapters.pop(call.params["name"], None)
        if adapter is not None:
            adapter.retired = True
            self._sweep(adapter)
        self._channel.result(call, None)

    def _sweep(self, adapter: Adapter) -> None:
        if adapter.retired and not adapter.users:
            self._bank.unload(adapter)
            if self._prefixes is not None:
                self._prefixes.forget(adapter.root)

    # --- replies --------------------------------------------------------------------------------

    def _hidden_ids(self, tokenizer: Any) -> set[int]:
        """Special tokens that no text shows, but for those that tool calls are made of."""
        markers = self._format.tools.markers if self._format.tools else ()
        return {
            id_
            for id_, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in markers
        }

    def _visible(self, ids: Sequence[int]) -> str:
        return self._format.text([i for i in ids if i not in self._hidden])

    def _watch(self, running: _Running, token: int) -> bool:
        piece = running.text.push([token])
        running.streamed = len(running.job.out)
        if running.request.stream:
            self._send(running, *running.parser.feed(piece))
        else:
            running.parser.feed(piece)
        return running.text.stopped

    def _stream(self, running: _Running) -> None:
        new = running.job.out[running.streamed :]
        if new:
            running.streamed += len(new)
            self._send(running, *running.parser.feed(running.text.push(new)))

    def _send(self, running: _Running, content: str, calls: list[dict[str, Any]]) -> None:
        if content or calls:
            self._channel.event(running.call, {"content": content, "tool_calls": calls})

    def _end(self, running: _Running) -> None:
        job, call = running.job, running.call
        if job.adapter is not None:
            job.adapter.users -= 1
            self._sweep(job.adapter)
        if job.error is not None:
            self._channel.error(call, job.error)
            return
        if job.finish is None:
            return  # cancelled: nobody waits
        rest = job.out[running.streamed :]
        if rest and rest[-1] in self._eos:
            rest = rest[:-1]
        content, calls = running.parser.feed(running.text.push(rest, last=True))
        more, more_calls = running.parser.finish()
        if running.request.stream:
            self._send(running, content + more, calls + more_calls)
        reply = self._reply(running)
        message = {"role": "assistant", "content": reply.content, "tool_calls": reply.tool_calls}
        self._channel.result(call, pack_reply(reply))
        request = running.request
        self._format.remember(running.prompt, job.out, request.messages, request.tools, message)

    def _reply(self, running: _Running) -> ChatReply:
        job, parser = running.job, running.parser
        finish = job.finish or "stop"
        if parser.calls and finish == "stop":
            finish = "tool_calls"
        token_text = self._format.token_text
        return ChatReply(
            prompt_token_ids=job.prompt,
            token_ids=job.out,
            logprobs=job.logprobs,
            content=parser.content or (None if parser.calls else ""),
            tool_calls=parser.calls,
            finish_reason=finish,
            untrainable=running.untrainable,
            top_logprobs=[[(i, p, token_text(i)) for i, p in top] for top in job.top],
            token_texts=[token_text(i) for i in job.out],
        )


def _request(params: dict[str, Any]) -> ChatRequest:
    sampling = Sampling(**params["sampling"])
    params["sampling"] = dataclasses.replace(sampling, stop=tuple(sampling.stop))
    request = ChatRequest(**params)
    if not request.messages:
        raise InvalidRequest("got no messages, expected at least one.", param="messages")
    if 0.0 < sampling.temperature < _COLDEST:
        raise InvalidRequest(
            f"got temperature={sampling.temperature}, expected 0 (greedy) or at least {_COLDEST}.",
            param="temperature",
        )
    return request


def _untrainable(request: ChatRequest, draw: Draw) -> str | None:
    sampling = request.sampling
    if draw.constraint is not None:
        forced = request.response_format is None
        return f"grammar: {'tool_choice' if forced else 'response_format'}"
    if sampling.temperature == 0.0:
        return "greedy decoding: temperature=0"
    if sampling.top_p < 1.0:
        return f"truncated sampling: top_p={sampling.top_p}"
    if sampling.top_k > 0:
        return f"truncated sampling: top_k={sampling.top_k}"
    return None
