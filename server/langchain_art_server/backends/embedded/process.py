"""The embedded sampler's child process: takes calls from the channel, samples, answers."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import queue
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from langchain_art.errors import ArtError
from langchain_art_server.backends.base import SamplerState
from langchain_art_server.backends.chat.fair_queue import FairQueue
from langchain_art_server.backends.chat.sampler_host import THREADS, ChatCall, SamplerHost
from langchain_art_server.backends.embedded.model_runner import make_runner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank, RoutedAdapter
from langchain_art_server.backends.embedded.prefix_cache import PrefixCache
from langchain_art_server.backends.embedded.scheduler import Scheduler
from langchain_art_server.backends.embedded.token_sampler import SamplingState, SequenceState
from langchain_art_server.backends.ipc.channel import Channel, EngineCall
from langchain_art_server.backends.ipc.heartbeat import LoopLag
from langchain_art_server.backends.models.device import free_bytes, set_threads
from langchain_art_server.backends.models.images import Images, images_of
from langchain_art_server.backends.models.loading import load_model
from langchain_art_server.config import Settings

log = logging.getLogger(__name__)
#: Seconds for which a lone client's calls are prepared as they come. More of them come meanwhile,
#: and share a prefill pass and their decode steps.
_PREPARE_SECONDS = 0.05
#: Where several calls come at once to an idle engine, more follow them, as when a training step or
#: a node's branches begin: seconds that it waits for each further one, and for all.
_NEXT_SECONDS, _GATHER_SECONDS = 0.003, 0.02
_AHEAD = 2 * THREADS  # slow calls that threads have at once: each thread one, and its next
#: Seconds of a turn after which no further call that has ended is answered in it: while others
#: wait, and while none does, when to answer all at once makes the next batch full.
_ANSWER_SECONDS, _ANSWER_ALONE_SECONDS = 0.005, 0.05
#: The part of the time that may go into one client's answers while sequences run, and the seconds
#: over which that is counted.
_ANSWER_PART, _ANSWER_SPAN = 0.25, 0.01


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
    # As in the gateway: a look at everything would stop all calls for a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    while True:
        host.step()


class _WaitingCall:
    """A call that waits to be sampled. Threads prepare a slow one before."""

    prepared: Future[tuple[ChatCall[RoutedAdapter], SamplingState]] | None = None

    def __init__(
        self, host: TransformersHost, call: EngineCall, adapter: RoutedAdapter | None
    ) -> None:
        self._host, self.call, self.adapter = host, call, adapter
        self.client: str = call.params["client"]
        self.cancelled: Callable[[], bool] = lambda: call.cancelled

    def prepare(self) -> SequenceState | None:
        """See `Queued`."""
        return self._host.begin(self)


class TransformersHost(SamplerHost[RoutedAdapter]):
    """Everything the child holds: the model, its adapters, the scheduler and the open calls."""

    # Below this, logits / temperature overflows float32.
    min_temperature = 1e-3

    def __init__(self, settings: Settings, channel: Channel) -> None:
        assert settings.sampler.kind == "transformers"
        set_threads(settings.sampler.threads)
        model = load_model(settings)
        images = images_of(settings.model, model.model, model.tokenizer)
        max_len, budget = model.info.max_model_len, settings.sampler.kv_cache_bytes
        with torch.inference_mode():
            runner = make_runner(
                model.model,
                max_slots=settings.sampler.max_batch,
                max_len=max_len,
                exact=settings.max_model_len is not None,
                budget=budget,
            )
        if runner.cache is None and isinstance(images, Images) and images.whole:
            images = "the tokens of its images attend to each other, and its calls have no slots"
        self._prefixes: PrefixCache | None = None
        self._base_roots: dict[str, int] = {}
        if (cache := runner.cache) is not None:
            max_len = cache.max_len
            self._prefixes = PrefixCache(
                cache.layout, budget=budget, device=cache.device, dtype=cache.dtype
            )
        info = dataclasses.replace(model.info, max_model_len=max_len)
        super().__init__(dataclasses.replace(model, info=info), channel, images=images)
        self._device = runner.device
        self._bank = AdapterBank(model.model, runner.device)
        self.scheduler = Scheduler(
            runner, self._bank, self._prefixes, model.eos, settings.sampler.max_batch
        )
        self._lag = LoopLag()
        self._running: dict[SequenceState, ChatCall[RoutedAdapter]] = {}
        self._ended: FairQueue[SequenceState] = FairQueue()
        #: When the answers of a client have had no more than their part of the time.
        self._paid: dict[str, float] = {}
        self._slow: FairQueue[_WaitingCall] = FairQueue()
        self._preparing: Counter[str] = Counter()
        self._prepare_until = 0.0
        self._methods: dict[str, Callable[[EngineCall], None]] = {
            "chat": self._chat,
            "state": self._state,
            "prepared": self._prepared,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    def step(self) -> None:
        """Take new calls, do one step, write what is new. Blocks while there is nothing to do."""
        begun = self._take()
        if self.scheduler.busy:
            for sequence in self.scheduler.step():
                self._ended.put(sequence.client, sequence)
            for sequence in self.scheduler.stepped:
                chat = self._running[sequence]
                over = sequence.finish or sequence.error
                if chat.request.stream and not over:
                    self._read(chat, sequence)
        self._answer()
        self._channel.flush()
        self._lag.add(time.monotonic() - begun)

    def _answer(self) -> None:
        """Answer calls that have ended, for a while: those with many logprobs take long."""
        others = self.scheduler.shared
        now = time.monotonic()
        until = now + (_ANSWER_SECONDS if others else _ANSWER_ALONE_SECONDS)
        while now <= until:
            paid = {one: at for one, at in self._paid.items() if at > now - _ANSWER_SPAN}
            may = {one for one in self._ended.clients if paid.get(one, 0.0) <= now}
            sequence = self._ended.take({}, may if others and self.scheduler.busy else None)
            if sequence is None:
                break
            self._end(self._running.pop(sequence), sequence)
            since, now = now, time.monotonic()
            client, cost = sequence.client, (now - since) / _ANSWER_PART
            paid[client] = max(paid.get(client, 0.0), since - _ANSWER_SPAN) + cost
            self._paid = paid

    def _take(self) -> float:
        """Begin new calls; returns the time at which there was something to do."""
        idle, begun, chats = not (self.scheduler.busy or self._ended), time.monotonic(), 0
        wait = None if idle else 0.0
        while True:
            try:
                call = self._channel.inbox.get(wait != 0, wait)
            except queue.Empty:
                return begun
            now = time.monotonic()
            begun = now if wait is None else begun
            chats += call.method == "chat"
            gathers = idle and chats > 1 and now < begun + _GATHER_SECONDS
            wait = _NEXT_SECONDS if gathers else 0.0
            self._prepare_until = begun + _PREPARE_SECONDS
            if call.cancelled:
                continue
            try:
                self._methods[call.method](call)
            except Exception as error:  # noqa: BLE001  one bad call must not end the others
                self._fail(call, error)

    def _chat(self, call: EngineCall) -> None:
        waiting = _WaitingCall(self, call, self._hold(call))
        if self._is_quick(call):
            alone = not self.scheduler.shared and time.monotonic() < self._prepare_until
            if queued := waiting.prepare() if alone else waiting:
                self.scheduler.add(queued)
        else:
            self._slow.put(waiting.client, waiting)
            self._use_threads()

    def _use_threads(self) -> None:
        """Keep the threads busy, with the calls of each client in turn."""
        while self._preparing.total() < _AHEAD and (one := self._slow.take(self._preparing)):
            self._preparing[one.client] += 1
            call, adapter = one.call, one.adapter
            one.prepared = self._threads.submit(self._prepare_sampling, call, adapter)
            prepared = EngineCall(call.id, "prepared", {"waiting": one})
            one.prepared.add_done_callback(lambda _, done=prepared: self._channel.inbox.put(done))

    def _prepared(self, call: EngineCall) -> None:
        one: _WaitingCall = call.params["waiting"]
        self._preparing -= Counter([one.client])
        self._use_threads()
        self.scheduler.add(one)

    def _prepare_sampling(
        self, call: EngineCall, adapter: RoutedAdapter | None
    ) -> tuple[ChatCall[RoutedAdapter], SamplingState]:
        chat = self._prepare(call, adapter)
        processor = None if chat.grammar is None else self._grammars.logits_processor(chat.grammar)
        sampling = chat.request.sampling
        # `Random` draws the same from -1 and 1.
        seed = None if sampling.seed is None else sampling.seed % (1 << 64)
        return chat, SamplingState(sampling, random.Random(seed), processor)

    def begin(self, waiting: _WaitingCall) -> SequenceState | None:
        """The sequence of a call; None if it is refused, which its caller gets as the error."""
        call, adapter, prepared = waiting.call, waiting.adapter, waiting.prepared
        try:
            chat, state = prepared.result() if prepared else self._prepare_sampling(call, adapter)
        except Exception as error:  # noqa: BLE001  see `_take`
            self._free(self._release(adapter))
            if not call.cancelled:
                self._fail(call, error)
            return None
        sequence = SequenceState(
            chat.prompt.ids,
            chat.limit,
            state,
            waiting.client,
            adapter,
            self._base_root(chat.request.tenant),
            cancelled=waiting.cancelled,
        )

        if state.sampling.stop:
            sequence.on_token = lambda _token: self._read(chat, sequence)
        if self._images is not None:
            self._images.hold(chat.prompt.images.values())
            sequence.shifts = self._images.shifts(chat.prompt.ids)
        self._running[sequence] = chat
        return sequence

    def _read(self, chat: ChatCall[RoutedAdapter], sequence: SequenceState) -> bool:
        """Read, and stream, what was sampled; True if that ends the reply."""
        try:
            self._stream(chat, chat.output.update(sequence.out))
        except Exception as error:  # noqa: BLE001  see `_take`
            sequence.error = error
        return chat.output.stopped is not None or sequence.error is not None

    def _base_root(self, tenant: str) -> int:
        """Root of a tenant's base model blocks, so that times tell nothing of other tenants."""
        if not tenant or self._prefixes is None:
            return 0
        if tenant not in self._base_roots:
            self._base_roots[tenant] = self._prefixes.new_root()
        return self._base_roots[tenant]

    def _fail(self, call: EngineCall, error: Exception) -> None:
        if not isinstance(error, ArtError):
            log.error("The call %s failed.", call.method, exc_info=error)
        self._channel.error(call, error)

    def _end(self, chat: ChatCall[RoutedAdapter], sequence: SequenceState) -> None:
        self._free(self._release(chat.adapter))
        if self._images is not None:
            self._images.let_go(chat.prompt.images.values())
        try:
            if sequence.error is not None:
                raise sequence.error
            if sequence.finish is not None:  # otherwise it was cancelled
                top, finish = sequence.top, sequence.finish
                drawn_from = sequence.sampling.drawn_from
                reply = self._finish(chat, sequence.out, sequence.logprobs, top, finish, drawn_from)
                self._channel.result(chat.call, reply)
        except Exception as error:  # noqa: BLE001  see `_take`
            self._fail(chat.call, error)

    def _load_adapter(self, call: EngineCall) -> None:
        name, path = call.params["name"], Path(call.params["path"])
        if not self._is_loaded(name, path):
            root = 0 if self._prefixes is None else self._prefixes.new_root()
            self._adapters[name] = self._bank.load(name, path, root)
        self._channel.result(call, None)

    def _state(self, call: EngineCall) -> None:
        free = free_bytes(self._device)
        known = free if math.isfinite(free) else None
        running, waiting = self.scheduler.counts
        state = SamplerState(
            self._lag.seconds,
            known,
            running=running,
            waiting=waiting + len(self._slow) + self._preparing.total(),
        )
        self._channel.result(call, vars(state))

    def _unload_adapter(self, call: EngineCall) -> None:
        self._free(self._retire(call.params["name"]))
        self._channel.result(call, None)

    def _free(self, adapter: RoutedAdapter | None) -> None:
        if adapter is not None:
            self._bank.unload(adapter)
            if self._prefixes is not None:
                self._prefixes.forget(adapter.root)
