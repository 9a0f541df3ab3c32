"""The embedded sampler's child process: takes calls from the channel, samples, answers."""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from langchain_art.errors import ArtError
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat.sampler_host import ChatCall, SamplerHost
from langchain_art_server.backends.embedded.model_runner import make_runner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank, RoutedAdapter
from langchain_art_server.backends.embedded.prefix_cache import PrefixCache
from langchain_art_server.backends.embedded.scheduler import Scheduler, SequenceState
from langchain_art_server.backends.embedded.token_sampler import SamplingState
from langchain_art_server.backends.ipc.channel import Channel, EngineCall
from langchain_art_server.backends.ipc.longest_pause import LongestPause
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
        self._pauses = LongestPause()
        self._running: dict[SequenceState, ChatCall[RoutedAdapter]] = {}
        self._methods: dict[str, Callable[[EngineCall], None]] = {
            "chat": self._chat,
            "longest_pause": lambda call: self._channel.result(call, self._pauses.seconds),
            "begin": lambda call: self._begin(**call.params),
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    def step(self) -> None:
        """Take new calls, do one step, write what is new. Blocks while there is nothing to do."""
        begun = self._take()
        if self.scheduler.busy:
            for sequence in self.scheduler.step():
                self._end(self._running.pop(sequence), sequence)
            for sequence, chat in list(self._running.items()):
                if chat.request.stream:
                    self._stream(chat, chat.output.update(sequence.out))
        self._channel.flush()
        self._pauses.add(time.monotonic() - begun)

    def _take(self) -> float:
        """Begin new calls; returns the time at which there was something to do."""
        wait, begun = not self.scheduler.busy, time.monotonic()
        while True:
            try:
                call = self._channel.inbox.get(block=wait)
            except queue.Empty:
                return begun
            if wait:
                wait, begun = False, time.monotonic()
            if call.cancelled:
                continue
            try:
                self._methods[call.method](call)
            except Exception as error:  # one bad call must not end the others
                if not isinstance(error, ArtError):
                    log.exception("The call %s failed.", call.method)
                self._channel.error(call, error)

    def _chat(self, call: EngineCall) -> None:
        request, adapter = self._admit(call)
        prepare = functools.partial(self._prepare_sampling, call, request, adapter)
        if self._is_quick(call, request):
            self._begin(adapter, prepare)
            return
        prepared = self._threads.submit(prepare)
        params = {"adapter": adapter, "prepared": prepared.result}
        begin = EngineCall(call.id, "begin", params)
        prepared.add_done_callback(lambda _: self._channel.inbox.put(begin))

    def _prepare_sampling(
        self, call: EngineCall, request: ChatRequest, adapter: RoutedAdapter | None
    ) -> tuple[ChatCall[RoutedAdapter], SamplingState]:
        chat, sampling = self._prepare(call, request, adapter), request.sampling
        processor = None if chat.grammar is None else self._grammars.logits_processor(chat.grammar)
        return chat, SamplingState(sampling, random.Random(sampling.seed), processor)

    def _begin(
        self,
        adapter: RoutedAdapter | None,
        prepared: Callable[[], tuple[ChatCall[RoutedAdapter], SamplingState]],
    ) -> None:
        """Queue a call for sampling. Raises what its preparation raised."""
        try:
            chat, state = prepared()
        except BaseException:
            self._free(self._release(adapter))
            raise
        call = chat.call
        sequence = SequenceState(
            chat.prompt.ids, chat.limit, state, adapter, cancelled=lambda: call.cancelled
        )

        def stops(_token: int) -> bool:
            self._stream(chat, chat.output.update(sequence.out))
            return chat.output.stopped

        if state.sampling.stop:
            sequence.on_token = stops
        self._running[sequence] = chat
        self.scheduler.add(sequence)

    def _end(self, chat: ChatCall[RoutedAdapter], sequence: SequenceState) -> None:
        self._free(self._release(chat.adapter))
        if sequence.error is not None:
            self._channel.error(chat.call, sequence.error)
        elif sequence.finish is not None:  # otherwise it was cancelled
            top, finish = sequence.top, sequence.finish
            drawn_from = sequence.sampling.drawn_from
            reply = self._finish(chat, sequence.out, sequence.logprobs, top, finish, drawn_from)
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
