"""What was heard of one run, in order, and which model calls its graph threw away."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, Generation, LLMResult

from langchain_art.tracing.candidates import Choices
from langchain_art.tracing.message_log import Prompt, Transcript, jsonable
from langchain_art.tracing.spans import Frame, Frames, Outcome
from langchain_art.wire import Turn, Usage


@dataclass(slots=True)
class Call:
    """One model call, until it becomes a `Turn`."""

    run_id: UUID
    where: dict[str, Any]
    """Fields of `wire.CallTags`."""
    tools: Sequence[Any]
    ours: bool
    model: str | None
    started_at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    latency: float | None = None
    prompt: Prompt | None = None
    reply: BaseMessage | None = None
    reply_atom: int | None = None
    call_id: str | None = None
    usage: Usage | None = None
    error: str | None = None

    @property
    def namespace(self) -> str:
        """LangGraph's checkpoint namespace; empty outside of a graph."""
        return self.where.get("namespace", "")

    @property
    def number(self) -> int:
        """Which attempt of its node, from 1."""
        return self.where.get("attempt", 1)

    def answered(self, generation: Generation, told: dict[str, Any]) -> None:
        """Takes reply, id, model and usage from what the model gave, complete or not."""
        is_chat = isinstance(generation, ChatGeneration)
        reply = generation.message if is_chat else AIMessage(generation.text)
        told = {**told, **reply.response_metadata}
        self.call_id = told.get("call_id") or (None if self.ours else told.get("id"))
        self.model = told.get("model_name") or self.model
        if usage := getattr(reply, "usage_metadata", None):
            self.usage = Usage(
                prompt_tokens=usage["input_tokens"], completion_tokens=usage["output_tokens"]
            )
        # A refused request comes with an empty message about the refusal: that is no reply.
        if self.error is None or self.call_id or reply.content:
            self.reply = reply


class Story:
    """Frames and calls of one run. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._choices = Choices()
        self._calls: list[Call] = []
        self._unread: list[int] = []  # calls whose reply is not in the transcript yet
        self._index: dict[UUID, int] = {}
        self._transcript = Transcript()
        self._ids: set[str] = set()
        self._elsewhere: dict[str, None] = {}
        self._lock = Lock()

    def started(self, frame: Frame) -> bool:
        """`Frames.started`."""
        with self._lock:
            return self._frames.started(frame)

    def ended(self, run_id: UUID, output: Any, error: BaseException | None) -> bool:
        """`Frames.ended`."""
        with self._lock:
            if output is not None:
                self._choices.returned(run_id, output)
            return self._frames.ended(run_id, error)

    def stopped(self, run_id: UUID | None) -> None:
        """`Frames.stopped`."""
        with self._lock:
            self._frames.stopped(run_id)

    def around(self, parent: UUID | None, namespace: str) -> list[str]:
        """`Frames.around`."""
        with self._lock:
            return self._frames.around(parent, namespace)

    def outcome(self) -> Outcome:
        """`Frames.outcome`."""
        with self._lock:
            return self._frames.outcome()

    def asked(self, call: Call, messages: Sequence[BaseMessage]) -> None:
        """Notes a call and its prompt: once, though several handlers may tell of it."""
        with self._lock:
            if call.run_id in self._index:
                return
            self._read()
            call.prompt = self._transcript.ask(messages, call.namespace)
            self._index[call.run_id] = len(self._calls)
            self._add(call)
            self._meet(messages[call.prompt.known :])

    def answered(self, call: Call, response: LLMResult | None) -> None:
        """Notes how a call ended.

        The reply is read when the next prompt is: an agent signs its replies (`AIMessage.name`)
        only after the model has ended, and the next prompt repeats them signed.
        """
        generations = response.generations[0] if response and response.generations else []
        told = (response and response.llm_output) or {}
        with self._lock:
            index = self._index[call.run_id]
            if self._calls[index] is not call:
                return
            for number, generation in enumerate(generations):
                if number > 0:  # of a request with n > 1: a call of its own on the server
                    index, call = len(self._calls), replace(call, call_id=None)
                    self._add(call)
                call.answered(generation, told)
                if call.call_id is not None:
                    self._ids.add(call.call_id)
                if len(generations) > 1:
                    call.usage = None  # what is reported is the sum over all of them
                if call.reply is not None:
                    self._unread.append(index)
                    self._choices.answered(index, call.reply.id)

    def turns(self) -> list[Turn]:
        """The calls so far as turns, in order of their start."""
        with self._lock:
            self._read()
            tries: dict[tuple[str | UUID | None, str], int] = {}
            continued: set[int] = set()
            for call in self._calls:
                task = self._frames[call.run_id].task
                tries[task] = max(call.number, tries.get(task, 1))
                if call.prompt is not None and call.prompt.extends is not None:
                    continued.add(call.prompt.extends)
            unchosen = self._choices.unchosen(continued)
            return [
                self._turn(call, tries, index not in unchosen)
                for index, call in enumerate(self._calls)
            ]

    def elsewhere(self, output: Any) -> list[str]:
        """Call ids of our server's replies that prompts and `output` hold and no call gave."""
        with self._lock:
            is_state = isinstance(output, Mapping)
            values = cast("Mapping[Any, Any]", output).values() if is_state else (output,)
            for value in values:
                self._meet(cast("list[Any]", value) if isinstance(value, list) else [value])
            return list(self._elsewhere)

    def _add(self, call: Call) -> None:
        index, attempt = len(self._calls), self._frames[call.run_id].attempt
        self._calls.append(call)
        if call.prompt is not None:
            self._choices.asked(attempt, call.prompt.end, index, self._index[call.run_id])

    def _meet(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, AIMessage):
                id = message.response_metadata.get("call_id")
                if id is not None and id not in self._ids:
                    self._elsewhere[str(id)] = None

    def _read(self) -> None:
        for index in self._unread:
            call = self._calls[index]
            first = self._index[call.run_id] == index
            if call.prompt is not None and call.reply is not None:
                call.reply_atom = self._transcript.answer(
                    index, call.prompt, call.reply, call.namespace, rival=not first
                )
        self._unread.clear()

    def _turn(
        self, call: Call, tries: dict[tuple[str | UUID | None, str], int], chosen: bool
    ) -> Turn:
        wires, prompt = self._transcript.wires, call.prompt
        frame = self._frames[call.run_id]
        tools = call.tools if call.ours else jsonable(call.tools)
        return Turn(
            **call.where,
            call_id=call.call_id,
            model=call.model,
            extends=prompt.extends if prompt else None,
            messages=tuple(wires[atom] for atom in prompt.new) if prompt else (),
            tools=tuple(tool for tool in tools if isinstance(tool, dict)),
            reply=None if call.reply_atom is None else wires[call.reply_atom],
            usage=call.usage,
            started_at=call.started_at,
            latency=call.latency,
            ours=call.ours,
            excluded_because=self._exclusion(frame, call, tries[frame.task], chosen),
            error=call.error if frame.outcome else "no end was heard: cancelled, or still running",
        )

    def _exclusion(self, frame: Frame, call: Call, tries: int, chosen: bool) -> str | None:
        if call.error is not None or frame.outcome is None:
            return "error"
        thrown = self._frames.exclusion(frame, call.number, tries)
        return thrown or (None if chosen else "unchosen")
