"""One run: what was heard of it, in order, and which model calls its graph threw away."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal
from uuid import UUID, uuid4

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langgraph.errors import GraphBubbleUp, GraphInterrupt, GraphRecursionError
from pydantic import ValidationError

from langchain_art.errors import ConfigError
from langchain_art.transcript import Prompt, Transcript, jsonable
from langchain_art.wire import CallTags, Status, Trajectory, Turn, Usage

Outcome = Literal["ok", "error", "interrupted"]


@dataclass(slots=True)
class Frame:
    """One thing that runs: a graph, a node's attempt, a chain, a tool, a model."""

    run_id: UUID
    parent: UUID | None
    kind: Literal["chain", "model"]
    namespace: str = ""
    thread: str | None = None
    root: UUID | None = None
    """The topmost frame above it that was heard; a tracer's may stand higher still."""
    attempt: UUID | None = None
    """The frame that runs the node (this attempt of it) around this frame, where that is known."""
    outcome: Outcome | None = None
    """None while it runs."""

    @property
    def task(self) -> tuple[str | UUID | None, str]:
        """What attempts of one task share: a thread outlives its graph's runs."""
        return self.thread or self.root, self.namespace


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

    def answered(self, response: LLMResult | None) -> None:
        """Takes reply, id, model and usage from what the model gave, complete or not."""
        generations = response.generations[0] if response and response.generations else []
        if not generations:
            return
        first = generations[0]
        reply = first.message if isinstance(first, ChatGeneration) else AIMessage(first.text)
        told = {**((response and response.llm_output) or {}), **reply.response_metadata}
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
        self._frames: dict[UUID, Frame] = {}
        self._calls: list[Call] = []
        self._unread: list[int] = []  # calls whose reply is not in the transcript yet
        self._index: dict[UUID, int] = {}
        self._transcript = Transcript()
        self._latest: dict[tuple[str | UUID | None, str], UUID] = {}
        self._graphs = 0  # top-level frames that are no model call
        self._lock = Lock()

    def started(self, frame: Frame) -> bool:
        """Notes a frame; says whether it is a graph or chain that nothing known stands above."""
        with self._lock:
            if frame.run_id in self._frames:
                return False
            above = self._above(frame)
            frame.root = above.root if above else frame.run_id
            if above is not None and above.namespace == frame.namespace:
                frame.attempt = above.attempt
            elif above is not None:
                frame.attempt = frame.run_id
            elif frame.kind == "chain":
                frame.attempt = frame.parent  # a scope that was opened inside of the node
            if frame.namespace and frame.attempt:
                self._latest[frame.task] = frame.attempt
            self._frames[frame.run_id] = frame
            top = above is None and frame.kind == "chain"
            self._graphs += top
            return top

    def ended(self, run_id: UUID, error: BaseException | None) -> bool:
        """Notes a frame's end; says whether the run's outcome is this frame's."""
        with self._lock:
            frame = self._frames[run_id]
            frame.outcome = "ok"
            if isinstance(error, GraphInterrupt):
                frame.outcome = "interrupted"
            elif error is not None and not isinstance(error, GraphBubbleUp):
                frame.outcome = "error"  # a handoff to a parent graph bubbles up too, and is none
            if frame.root != run_id:
                return False
            return frame.kind == "chain" or self._graphs == 0

    def asked(self, call: Call, messages: Sequence[BaseMessage]) -> None:
        """Notes a call and its prompt."""
        with self._lock:
            self._read()
            call.prompt = self._transcript.ask(messages, call.namespace)
            self._index[call.run_id] = len(self._calls)
            self._calls.append(call)

    def answered(self, call: Call, response: LLMResult | None) -> None:
        """Notes how a call ended.

        The reply is read when the next prompt is: an agent signs its replies (`AIMessage.name`)
        only after the model has ended, and the next prompt repeats them signed.
        """
        with self._lock:
            call.answered(response)
            if call.reply is not None:
                self._unread.append(self._index[call.run_id])

    def turns(self) -> list[Turn]:
        """The calls so far as turns, in order of their start."""
        with self._lock:
            self._read()
            tries: dict[tuple[str | UUID | None, str], int] = {}
            for call in self._calls:
                task = self._frames[call.run_id].task
                tries[task] = max(call.number, tries.get(task, 1))
            return [self._turn(call, tries) for call in self._calls]

    def _read(self) -> None:
        for index in self._unread:
            call = self._calls[index]
            if call.prompt is not None and call.reply is not None:
                call.reply_atom = self._transcript.answer(
                    index, call.prompt, call.reply, call.namespace
                )
        self._unread.clear()

    def _turn(self, call: Call, tries: dict[tuple[str | UUID | None, str], int]) -> Turn:
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
            discarded=self._discarded(frame, call, tries[frame.task]),
            error=call.error if frame.outcome else "the call had not ended when the run was read",
        )

    def _discarded(self, frame: Frame, call: Call, tries: int) -> str | None:
        """Why the graph threw a call away, or None.

        A call counts if it ended well, in the last attempt of its task, and nothing around it
        failed in a way that the graph recovered from (a chain with retries or fallbacks, a caught
        exception). Where nothing recovered, the whole run failed, and its status says so: what led
        there is kept, for it may earn a bad reward.
        """
        if call.error is not None or frame.outcome is None:
            return "error"
        if frame.attempt is None:  # no node's start was heard: LangGraph's count must do
            if call.number < tries:
                return "retried"
        elif frame.namespace and self._latest[frame.task] != frame.attempt:
            attempt = self._frames.get(frame.attempt)
            interrupted = attempt is not None and attempt.outcome == "interrupted"
            return "interrupted" if interrupted else "retried"
        return self._recovered(frame)

    def _recovered(self, frame: Frame) -> str | None:
        """How the graph recovered from a failure around a call, if there was one and it did."""
        above = self._above(frame)
        while above is not None:
            beyond = self._above(above)
            if above.outcome != "error":
                pass
            elif above.namespace and above.attempt == above.run_id:  # a node around a subgraph
                latest = self._frames.get(self._latest[above.task])
                # A retry starts the subgraph anew; another run of the thread goes on within it.
                if latest is not above and latest is not None and latest.root == above.root:
                    return "retried"
            elif beyond is not None and beyond.outcome == "ok":
                return "error"
            above = beyond
        return None

    def _above(self, frame: Frame) -> Frame | None:
        return self._frames.get(frame.parent) if frame.parent else None


class Run:
    """The story of one graph run, told while it happens; `capture()` yields it.

    Set `reward`, `scores` and `metadata` as you see fit; `input`, `output`, `status` and `error`
    are filled in by what is heard, and may be overwritten.

    Args:
        scenario: which task this is a run of; runs of one scenario are judged as a group.
        id: of the trajectory, unique; made up if left out.
        metadata: whatever should stand beside the run in review.

    Raises:
        ConfigError: `id` or `scenario` cannot go over the wire.

    Example::

        with capture(scenario="q-7") as run:
            answer = graph.invoke({"messages": [("user", "When did Ann write?")]})
            run.reward = float("Monday" in answer["messages"][-1].text)
        run.trajectory().turns[0].node   # "model"
    """

    def __init__(
        self,
        *,
        scenario: str | None = None,
        id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        try:
            tags = CallTags(trajectory_id=id or uuid4().hex, scenario=scenario)
        except ValidationError as error:
            why = "; ".join(f"`{e['loc'][0]}`: {e['msg']}" for e in error.errors())
            raise ConfigError(f"a run cannot be named so: {why}") from error
        self.id: str = tags.trajectory_id or ""
        self.scenario = scenario
        self.scores: dict[str, float] = {}
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.input: Any = None
        self.output: Any = None
        self.status: Status = "completed"
        self.error: str | None = None
        self._reward: float | None = None
        self.story = Story()

    @property
    def reward(self) -> float | None:
        """The run's reward; None, which is the default, means not scored and is not zero."""
        return self._reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        if value is not None:
            try:
                value = float(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"got a reward of {value!r}, expected a number or None"
                ) from error
            if not math.isfinite(value):
                raise ConfigError(
                    f"got a reward of {value!r}, expected a finite number; "
                    "leave it None if the run could not be scored"
                )
        self._reward = value

    @property
    def turns(self) -> list[Turn]:
        """The calls heard so far, in the order in which they started."""
        return self.story.turns()

    def trajectory(self) -> Trajectory:
        """A frozen snapshot of the run as it stands now.

        Raises:
            ValidationError: a score is not finite, or the run has more than 4096 turns.
        """
        return Trajectory(
            id=self.id,
            scenario=self.scenario,
            turns=tuple(self.turns),
            input=jsonable(self.input),
            output=jsonable(self.output),
            reward=self.reward,
            scores=dict(self.scores),
            metadata=jsonable(self.metadata),
            status=self.status,
            error=self.error,
        )

    def __repr__(self) -> str:
        scored = "not scored" if self.reward is None else f"reward {self.reward:g}"
        return f"<Run {self.id} of {self.scenario!r}: {self.status}, {scored}>"

    def ended(self, error: BaseException) -> None:
        """Notes that the run ended with `error`."""
        self.status = "failed"
        if isinstance(error, GraphRecursionError):
            self.status = "truncated"
        elif isinstance(error, GraphInterrupt):
            self.status = "interrupted"
        self.error = f"{type(error).__name__}: {error}"
