"""Records the spans and model calls of one run, and which calls are excluded from training."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, Generation, LLMResult

from langchain_art.tracing.candidates import CandidateReplies
from langchain_art.tracing.message_log import LoggedPrompt, MessageLog, SampledReply, jsonable
from langchain_art.tracing.spans import Span, SpanTree
from langchain_art.wire import Message, Turn, Usage
from langchain_art.wire.turn_links import superseded_attempts

#: The ids of the server's calls, in each of its formats, and the end of its versions' names.
_OUR_ID = re.compile(r"(?:chatcmpl-|msg_|resp_)[0-9a-f]{32}(?::\d+)?")
_OUR_MODEL = re.compile(r"@\d{1,6}\Z")  # others append a date of eight digits
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ModelCall:
    """One model call, from its start until it becomes a `Turn`."""

    span: Span
    tags: dict[str, Any]
    """Fields of `wire.CallTags`."""
    params: Mapping[str, Any]
    ours: bool
    """True if the server sampled it: for `ChatART`, or for another model that speaks to it."""
    model: str | None
    first: int = 0
    """Number of the first call of its request: of itself, but for further choices (``n > 1``)."""
    clock: float = field(default_factory=time.perf_counter)
    latency: float | None = None
    prompt: LoggedPrompt | None = None
    reply: SampledReply | None = None
    logged_reply: Message | None = None
    call_id: str | None = None
    usage: Usage | None = None
    error: str | None = None
    passed_on: bool = False
    """True if its reply is that of another call: of the model that it asked, or from a cache."""

    @property
    def namespace(self) -> str:
        """LangGraph's checkpoint namespace; empty outside of a graph."""
        return self.tags.get("namespace", "")

    def set_reply(self, generation: Generation, llm_output: dict[str, Any]) -> None:
        """Take reply, id, model and usage from a model's answer, which may be incomplete."""
        is_chat = isinstance(generation, ChatGeneration)
        reply = generation.message if is_chat else AIMessage(generation.text)
        metadata = {**llm_output, **reply.response_metadata}
        self.call_id = metadata.get("call_id")
        if self.call_id is None and not self.ours:
            is_ours = _OUR_ID.fullmatch(reply.id or "")  # of a streamed reply
            self.call_id = reply.id if is_ours else metadata.get("id")
        self.model = metadata.get("model_name") or self.model
        if _OUR_ID.fullmatch(self.call_id or "") and _OUR_MODEL.search(self.model or ""):
            self.ours = True
        usage = getattr(reply, "usage_metadata", None)
        if usage and "input_tokens" in usage:  # LangChain's cache gives a cost alone
            self.usage = Usage(
                prompt_tokens=usage["input_tokens"], completion_tokens=usage["output_tokens"]
            )
        # A rejected request gives an empty message with the error, which is no reply.
        if self.error is None or self.call_id or reply.content:
            self.reply = SampledReply.of(reply)


class RunRecorder:
    """Spans and model calls of one run. A callback holds `lock`; reading the run takes it."""

    def __init__(self) -> None:
        #: Reentrant: the garbage collector may close a half-read stream within a callback, whose
        #: end is another callback of this thread.
        self.lock = RLock()
        # The wall clock is read once: if it jumps later, the calls' distances stay as they were.
        self._epoch = time.time() - time.perf_counter()
        self.spans = SpanTree()
        self.keeps_values = False
        """True if spans keep their inputs and outputs: set where the run is exported."""
        self._candidates = CandidateReplies()
        self._messages = MessageLog()
        self._calls: list[ModelCall] = []
        self._index: dict[UUID, int] = {}
        self._unlogged: list[int] = []  # calls whose reply is not in the message log yet
        self._call_ids: dict[str, ModelCall] = {}
        self._elsewhere: dict[str, None] = {}

    def end_span(self, run_id: UUID, output: Any, error: BaseException | None) -> bool:
        """`SpanTree.end`, with the span's output."""
        span = self.spans[run_id]
        if error is None and span.kind != "model":  # of a model call, the turn has the reply
            self._candidates.add_output(span.run_id, output)
            if self.keeps_values:
                span.output = output
        return self.spans.end(run_id, error)

    def start_call(self, call: ModelCall, messages: Sequence[BaseMessage]) -> None:
        """Record a call and its prompt, once per `Span.run_id`."""
        if call.span.run_id in self._index:
            return
        self._log_replies()
        call.prompt = self._messages.add_prompt(messages, call.namespace)
        call.first = self._index[call.span.run_id] = len(self._calls)
        self._add(call)
        self._note_replies(messages[call.prompt.position.known :])

    def end_call(self, call: ModelCall, response: LLMResult | None) -> None:
        """Record a call's reply or error.

        The reply is kept as it is now, and logged with the next prompt, since an agent sets
        `AIMessage.name` after the model call has ended.
        """
        generations = response.generations[0] if response and response.generations else []
        llm_output = (response and response.llm_output) or {}
        index = call.first
        if self._calls[index] is not call:
            return
        for number, generation in enumerate(generations):
            if number > 0:  # of a request with n > 1: a call of its own on the server
                index, call = len(self._calls), replace(call, call_id=None, passed_on=False)
                self._add(call)
            call.set_reply(generation, llm_output)
            if number > 0 and call.ours and call.call_id is None:
                call.call_id = f"{self._calls[call.first].call_id}:{number}"
            elif call.call_id is None and not call.ours and _OUR_MODEL.search(call.model or ""):
                _log.warning(
                    "a reply of %s came without the id of its call, which is not trained: "
                    "ChatAnthropic drops the ids of streamed replies. Set disable_streaming=True.",
                    call.model,
                )
            if self._is_passed_on(call):
                call.passed_on = True
                self._candidates.remove_call(index)
                continue
            if call.call_id is not None:
                self._call_ids[call.call_id] = call
            if len(generations) > 1:
                call.usage = None  # only the sum over all choices is reported
            if call.reply is not None:
                self._unlogged.append(index)
                ids = (call.reply.reply.id, call.call_id)
                self._candidates.add_reply(index, ids, call.reply.wire)

    def _is_passed_on(self, call: ModelCall) -> bool:
        """True if a call's reply is another's; some servers give all calls one id."""
        other = self._call_ids.get(call.call_id or "")
        if other is None or other.reply is None or call.reply is None:
            return False
        usage = getattr(call.reply.reply, "usage_metadata", None) or {}
        return (
            call.reply.reply is other.reply.reply
            or self.spans.is_within(other.span, call.span)
            or "total_cost" in usage  # with which LangChain marks what its cache gave
        )

    def turns(self) -> list[Turn]:
        """The calls so far as turns, in the order in which they started."""
        with self.lock:
            self._log_replies()
            superseded = superseded_attempts(
                (call.span.task, call.tags.get("attempt", 1)) for call in self._calls
            )
            extended = [call.prompt.extends for call in self._calls if call.prompt is not None]
            unchosen = self._candidates.unchosen({one for one in extended if one is not None})
            own = [index for index, call in enumerate(self._calls) if not call.passed_on]
            numbers = {index: number for number, index in enumerate(own)}
            return [
                self._turn(self._calls[index], numbers, index in superseded, index in unchosen)
                for index in own
            ]

    @property
    def has_calls(self) -> bool:
        """True if a model call was recorded."""
        return bool(self._calls)

    def wall_clock(self, at: float) -> float:
        """A time of the monotonic clock (`Span.begun_at`) as seconds since the epoch."""
        return self._epoch + at

    def span_list(self) -> tuple[list[Span], list[ModelCall]]:
        """The spans so far, in the order of their start, and the call of each of the `turns`."""
        with self.lock:
            return list(self.spans), [call for call in self._calls if not call.passed_on]

    def sampled_elsewhere(self, output: Any) -> list[str]:
        """Ids of calls of other runs whose replies are in this run's prompts or `output`."""
        with self.lock:
            for value in output.values() if isinstance(output, Mapping) else (output,):
                self._note_replies(value if isinstance(value, list) else [value])
            return list(self._elsewhere)

    def _add(self, call: ModelCall) -> None:
        index, attempt = len(self._calls), call.span.attempt
        self._calls.append(call)
        if call.prompt is not None:
            prompt, question = call.prompt.position.node, (call.model, call.params)
            self._candidates.add_call(attempt, prompt, index, call.first, question)

    def _note_replies(self, messages: Sequence[Any]) -> None:
        for message in messages:
            metadata: Any = None
            if isinstance(message, AIMessage):
                metadata = message.response_metadata
            elif isinstance(message, dict):  # as a RemoteGraph gives it
                metadata = message.get("response_metadata")
            id = metadata.get("call_id") if isinstance(metadata, dict) else None
            if id is not None and id not in self._call_ids:
                self._elsewhere[str(id)] = None

    def _log_replies(self) -> None:
        unlogged, self._unlogged = self._unlogged, []
        for index in unlogged:
            call = self._calls[index]
            extra = call.first != index
            if call.prompt is not None and call.reply is not None:
                call.logged_reply = self._messages.add_reply(
                    index, call.prompt, call.reply, call.namespace, extra_choice=extra
                )

    def _turn(
        self, call: ModelCall, numbers: Mapping[int, int], superseded: bool, unchosen: bool
    ) -> Turn:
        messages, prompt = self._messages.messages, call.prompt
        span = call.span
        if call.error is not None or span.outcome is None:
            excluded_because = "error"
        else:
            excluded_because = self.spans.exclusion(span, superseded)
            excluded_because = excluded_because or ("unchosen" if unchosen else None)
        tools = call.params.get("tools") or ()
        tools = tools if call.ours else jsonable(tools)
        return Turn(
            **call.tags,
            call_id=call.call_id,
            model=call.model,
            extends=numbers.get(prompt.extends) if prompt and prompt.extends is not None else None,
            messages=tuple(messages[number] for number in prompt.new) if prompt else (),
            tools=tuple(tool for tool in tools if isinstance(tool, dict)),
            reply=call.logged_reply,
            edited=call.reply.edited() if call.reply else None,
            usage=call.usage,
            started_at=self._epoch + call.clock,
            latency=call.latency,
            ours=call.ours,
            excluded_because=excluded_because,
            error=call.error if span.outcome else "it has not ended: cancelled, or still running",
        )
