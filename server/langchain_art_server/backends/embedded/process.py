"""The embedded sampler's child process: takes calls from the channel, samples, answers."""

from __future__ import annotations

import dataclasses
import logging
import queue
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from langchain_art.errors import ArtError
from langchain_art_server.backends.chat.sampler_host import ChatCall, SamplerHost
from langchain_art_server.backends.embedded.model_runner import make_runner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank, RoutedAdapter
from langchain_art_server.backends.embedded.prefix_cache import PrefixCache
from langchain_art_server.backends.embedded.scheduler import Scheduler, SequenceState
from langchain_art_server.backends.embedded.token_sampler import SamplingState
from langchain_art_server.backends.ipc.channel import Channel, EngineCall
from langchain_art_server.backends.models.device import set_threads
from langchain_art_server.backends.models.loading import load_model
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)


def serve(channel: Channel, config: dict[str, Any]) -> None:
    """Entry point of the child. `config` is `Settings` as JSON. Ends with the process."""
    channel.listen()
    if Path(config["model"]).is_dir():
        disable_progress_bar()  # nothing is downloaded
    start = channel.inbox.get()
    try:
        host = TransformersHost(Settings.model_validate(config), channel)
    except ArtError as error:
        channel.error(start, error)
        channel.flush()
        return
    channel.result(start, vars(host.info))
    channel.flush()
    while True:
        host.step()


class TransformersHost(SamplerHost[RoutedAdapter]):
    """Everything the child holds: the model, its adapters, the scheduler and the open calls."""

    # Below this, logits / temperature overflows float32.
    min_temperature = 1e-3

    def __init__(self, settings: Settings, channel: Channel) -> None:
        assert settings.sampler.kind == "transformers"
        set_threads(settings.sampler.threads)
        model = load_model(settings)
        max_len, budget = model.info.max_model_len, settings.sampler.kv_cache_bytes
        with torch.inference_mode():
            runner = make_runner(
                model.model,
                max_slots=settings.sampler.max_batch,
                max_len=max_len,
                exact=settings.max_model_len is not None,
                budget=budget,
            )
        self._prefixes: PrefixCache | None = None
        if (cache := runner.cache) is not None:
            max_len = cache.max_len
            self._prefixes = PrefixCache(
                cache.layout, budget=budget, device=cache.device, dtype=cache.dtype
            )
        info = dataclasses.replace(model.info, max_model_len=max_len)
        super().__init__(dataclasses.replace(model, info=info), channel)
        self._bank = AdapterBank(model.model, runner.device)
        self.scheduler = Scheduler(
            runner, self._bank, self._prefixes, model.eos, settings.sampler.max_batch
        )
        self._running: dict[SequenceState, ChatCall[RoutedAdapter]] = {}
        self._methods: dict[str, Callable[[EngineCall], None]] = {
            "chat": self._chat,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    def step(self) -> None:
        """Take new calls, do one step, write what is new. Blocks while there is nothing to do."""
        self._take()
        if self.scheduler.busy:
            for sequence in self.scheduler.step():
                self._end(self._running.pop(sequence), sequence)
            for sequence, chat in list(self._running.items()):
                if chat.request.stream:
                    self._stream(chat, chat.output.update(sequence.out))
        self._channel.flush()

    def _take(self) -> None:
        wait = not self.scheduler.busy
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
            except Exception as error:  # one bad call must not end the others
                if not isinstance(error, ArtError):
                    log.exception("The call %s failed.", call.method)
                self._channel.error(call, error)

    def _chat(self, call: EngineCall) -> None:
        chat = self._open(call)
        sampling = chat.request.sampling
        state = SamplingState(sampling, random.Random(sampling.seed), chat.logits_processor)
        sequence = SequenceState(
            chat.prompt.ids, chat.limit, state, chat.adapter, cancelled=lambda: call.cancelled
        )

        def stops(_token: int) -> bool:
            self._stream(chat, chat.output.update(sequence.out))
            return chat.output.stopped

        if sampling.stop:
            sequence.on_token = stops
        self._running[sequence] = chat
        self.scheduler.add(sequence)

    def _end(self, chat: ChatCall[RoutedAdapter], sequence: SequenceState) -> None:
        self._free(self._release(chat.adapter))
        if sequence.error is not None:
            self._channel.error(chat.call, sequence.error)
        elif sequence.finish is not None:  # otherwise it was cancelled
            top, finish = sequence.top, sequence.finish
            reply = self._finish(chat, sequence.out, sequence.logprobs, top, finish)
            self._channel.result(chat.call, reply)

    def _load_adapter(self, call: EngineCall) -> None:
        name, path = call.params["name"], Path(call.params["path"])
        if not self._is_loaded(name, path):
            root = 0 if self._prefixes is None else self._prefixes.new_root()
            self._adapters[name] = self._bank.load(name, path, root)
        self._channel.result(call, None)

    def _unload_adapter(self, call: EngineCall) -> None:
        self._free(self._retire(call.params["name"]))
        self._channel.result(call, None)

    def _free(self, adapter: RoutedAdapter | None) -> None:
        if adapter is not None:
            self._bank.unload(adapter)
            if self._prefixes is not None:
                self._prefixes.forget(adapter.root)
