"""The sampler's own process: takes calls from the channel, runs the engine, answers.

Imported only there: the parent (`transformers_sampler`) needs no torch.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from langchain_art.errors import ArtError, ConfigError, UnknownModel
from langchain_art_server.backends.base import ChatReply, ChatRequest, ModelInfo
from langchain_art_server.backends.chat.chat_template import ChatFormat, Prompt
from langchain_art_server.backends.chat.guided_decoding import Grammars
from langchain_art_server.backends.chat.output_processor import (
    Piece,
    Speech,
    hidden_ids,
    read_request,
    room,
    why_excluded,
)
from langchain_art_server.backends.embedded.model_runner import make_runner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank, LoadedAdapter
from langchain_art_server.backends.embedded.prefix_cache import PrefixCache
from langchain_art_server.backends.embedded.scheduler import Engine, Job
from langchain_art_server.backends.embedded.token_sampler import Draw
from langchain_art_server.backends.ipc.chat_codec import pack_reply
from langchain_art_server.backends.ipc.worker import Call, Channel
from langchain_art_server.backends.models.device import set_threads
from langchain_art_server.backends.models.loading import load_model
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
    speech: Speech
    excluded_because: str | None


class SamplerHost:
    """Everything the child holds: the model, its adapters, the engine and the open calls."""

    def __init__(self, settings: Settings, channel: Channel) -> None:
        assert settings.sampler.kind == "transformers"
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
        self._hidden = hidden_ids(self._format)
        self._bank = AdapterBank(loaded.model, runner.device)
        self._adapters: dict[str, LoadedAdapter] = {}
        self._retired: list[LoadedAdapter] = []
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
                    self._hear(running)
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
        request = read_request(call.params, _COLDEST)
        adapter = None
        if request.adapter is not None:
            adapter = self._adapters.get(request.adapter)
            if adapter is None:
                raise UnknownModel(
                    f"got the adapter {request.adapter!r}, expected one of "
                    f"{sorted(self._adapters)} or the base model {self.info.name!r}."
                )
        prompt = self._format.prompt(request.messages, request.tools)
        limit = room(len(prompt.ids), request.sampling.max_tokens, self.info.max_model_len)
        draw = Draw(
            request.sampling,
            random.Random(request.sampling.seed),
            self._grammars.constraint(request, self._format.tools),
        )
        job = Job(prompt.ids, limit, draw, adapter, cancelled=lambda: call.cancelled)
        speech = Speech(request, self._format, self._hidden, self._eos)
        excluded_because = why_excluded(request, constrained=draw.constraint is not None)
        running = _Running(call, request, prompt, job, speech, excluded_because)
        if request.sampling.stop:
            job.watch = lambda token: self._hear(running)
        if adapter is not None:
            adapter.users += 1
        self._running[job] = running
        self.engine.add(job)

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

    def _sweep(self, adapter: LoadedAdapter) -> None:
        if adapter.retired and not adapter.users:
            self._bank.unload(adapter)
            if self._prefixes is not None:
                self._prefixes.forget(adapter.root)

    # --- replies --------------------------------------------------------------------------------

    def _hear(self, running: _Running) -> bool:
        self._send(running, running.speech.hear(running.job.out))
        return running.speech.stopped

    def _send(self, running: _Running, piece: Piece) -> None:
        content, calls = piece
        if running.request.stream and (content or calls):
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
        self._send(running, running.speech.end(job.out))
        reply = self._reply(running)
        message = {"role": "assistant", "content": reply.content, "tool_calls": reply.tool_calls}
        self._channel.result(call, pack_reply(reply))
        request = running.request
        self._format.remember(running.prompt, job.out, request.messages, request.tools, message)

    def _reply(self, running: _Running) -> ChatReply:
        job = running.job
        finish = job.finish or "stop"
        return running.speech.reply(
            job.prompt, job.out, job.logprobs, job.top, finish, running.excluded_because
        )
