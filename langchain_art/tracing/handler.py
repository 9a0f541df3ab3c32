"""`CaptureHandler`: a callback handler that records a graph run as turns and spans.

Callbacks see every model call of a graph, in whatever node, subgraph, branch, tool or attempt it
is made. A `Turn` holds the call's place in the graph, its prompt and its reply; the sampled tokens
stay on the server, under the completion's id. The handler does no I/O and keeps each message once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any, Concatenate, Literal, ParamSpec, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent

from langchain_art import call_tags
from langchain_art.tracing.recorder import ModelCall
from langchain_art.tracing.run import Run
from langchain_art.tracing.spans import Span

P = ParamSpec("P")
_serials = count()
_log = logging.getLogger(__name__)


def _safely(
    method: Callable[Concatenate[CaptureHandler, P], None],
) -> Callable[Concatenate[CaptureHandler, P], None]:
    """Let one callback record at a time; its error goes to the run and never to the graph."""

    @wraps(method)
    def guarded(self: CaptureHandler, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with self.run.recorder.lock:
                method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - capturing must not break the graph
            why = f"{method.__name__} was not captured: {type(error).__name__}: {error}"
            self.run.error = self.run.error or why
            self.run.metadata.setdefault("not_captured", []).append(why)

    return guarded


def _kept(value: Any, depth: int = 4) -> Any:
    """An input or output in lists and dicts of its own: the program may append to those it gave."""
    if depth and type(value) is dict:
        return {key: _kept(one, depth - 1) for key, one in cast("dict[Any, Any]", value).items()}
    if depth and type(value) is list:
        return [_kept(one, depth - 1) for one in cast("list[Any]", value)]
    return value


def _span(
    kind: Literal["chain", "tool", "model"],
    run_id: UUID,
    parent: UUID | None,
    metadata: dict[str, Any],
    handler: int,
    name: str = "",
) -> Span:
    thread = metadata.get("thread_id")
    return Span(
        run_id=run_id,
        parent=parent,
        kind=kind,
        namespace=metadata.get("langgraph_checkpoint_ns") or "",
        step=metadata.get("langgraph_step"),
        thread=None if thread is None else str(thread),
        handler=handler,
        name=name,
    )


class CaptureHandler(GraphCallbackHandler):
    """A callback handler that records one run: what `capture()` installs.

    Pass it where a scope cannot reach, as ``config={"callbacks": [handler]}`` or, for threads that
    copy no context, as ``ChatART(callbacks=[handler])``. One handler records one run: a second
    graph invocation under it (a resumed thread, the next user turn) continues the same run. A
    handler that is given to the model alone knows nodes, but not which of their attempts failed.

    Args:
        run: where to record; by default a new one without a scenario.
    """

    run_inline = True  # in the caller's thread and context, in order, in asynchronous graphs too

    def __init__(self, run: Run | None = None) -> None:
        super().__init__()
        self.run = run if run is not None else Run()
        self._serial = next(_serials)
        self._process = os.getpid()
        self._open: dict[UUID, tuple[ModelCall, call_tags.PendingTags]] = {}

    def _around(self, parent: UUID | None) -> call_tags.Surroundings | None:
        """Surroundings of a run that LangChain does not give of it, or of the chain around it."""
        spans = self.run.recorder.spans
        if spans.has(parent):
            return spans[parent].around
        around = call_tags.surroundings()
        if around is None or parent is None or spans.has(around.run_id):
            return around
        return None

    def _parent(self, run_id: UUID, parent: UUID | None) -> UUID | None:
        """The run around another: a model call, if its model asks another model in it.

        LangChain does not say so, unless the model passes its callbacks on. Between the chunks of a
        stream its reader runs, not the model.
        """
        call, spans = call_tags.enclosing_call(run_id), self.run.recorder.spans
        if not spans.has(call) or spans[call].first_token_at is not None:
            return parent
        return call if spans[call].parent == parent and spans[call].alone else parent

    @_safely
    def on_chat_model_start(
        self, serialized: Any, messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Start a turn, and publish its tags for the model."""
        if self._process != os.getpid():  # forked: what is recorded here stays here
            self._process = os.getpid()
            _log.warning("run %s does not hear the calls of process %d", self.run.id, self._process)
        parent, tags = kwargs.get("parent_run_id"), kwargs.get("tags") or ()
        metadata, recorder = kwargs.get("metadata") or {}, self.run.recorder
        if (around := self._around(parent)) is not None:
            parent, metadata = around.run_id, around.complete(metadata)
            tags = [*around.tags, *tags]
        above = self._parent(run_id, parent)
        span = _span("model", run_id, above, metadata, self._serial)
        span.alone = kwargs.get("batch_size", 1) == 1
        recorder.spans.start(span)
        # In the later steps of a node that is a chain, LangGraph's own count is not available.
        attempt = max(call_tags.node_execution()[0], span.attempt_number)
        where = call_tags.tags_from_metadata(metadata, attempt, tags)
        outer = recorder.spans.enclosing_namespaces(parent, where.get("namespace", ""))
        call_tags.prepend_outer_path(where, outer)
        sent = {**where, "trajectory_id": self.run.id}
        if self.run.scenario is not None:
            sent["scenario"] = self.run.scenario
        pending = call_tags.PendingTags(run_id, self._serial, sent)
        call_tags.publish_tags(pending)
        call = ModelCall(
            span=span,
            tags=where,
            params=kwargs.get("invocation_params") or {},
            ours=metadata.get("ls_provider") == "art",
            model=metadata.get("ls_model_name"),
        )
        self._open[run_id] = (call, pending)
        recorder.start_call(call, messages[0] if messages else [])

    def on_llm_start(
        self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Start a turn of a text model; its prompt becomes a user message."""
        messages: list[list[BaseMessage]] = [[HumanMessage(prompt)] for prompt in prompts]
        self.on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note when a call that streams gave its first token."""
        if run_id in self._open:  # without the lock: one call's tokens come one after the other
            span = self.run.recorder.spans[run_id]
            if span.first_token_at is None:
                span.first_token_at = time.perf_counter()

    @_safely
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """End a turn with its reply."""
        self._end_call(run_id, response, None)

    @_safely
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End a turn with an error, and with what was streamed before it."""
        self._end_call(run_id, kwargs.get("response"), error)

    def _end_call(
        self, run_id: UUID, response: LLMResult | None, error: BaseException | None
    ) -> None:
        call, pending = self._open.pop(run_id)
        pending.open = False
        call.latency = time.perf_counter() - call.clock
        call.error = None if error is None else f"{type(error).__name__}: {error}"
        self.run.recorder.end_call(call, response)
        self._end(run_id, None, error)

    @_safely
    def on_chain_start(
        self, serialized: dict[str, Any], inputs: Any, *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Start the span of a graph, a node or a chain."""
        self._start("chain", serialized, inputs, run_id, kwargs)

    def _start(
        self,
        kind: Literal["chain", "tool"],
        serialized: dict[str, Any] | None,
        inputs: Any,
        run_id: UUID,
        more: dict[str, Any],
    ) -> None:
        parent, metadata = more.get("parent_run_id"), more.get("metadata")
        if (around := self._around(parent)) is not None:
            parent, metadata = around.run_id, around.complete(metadata)
            around = replace(around, run_id=run_id)
        name = more.get("name") or (serialized or {}).get("name") or ""
        above = self._parent(run_id, parent)
        span = _span(kind, run_id, above, metadata or {}, self._serial, name)
        span.around = around
        if self.run.recorder.keeps_values:
            span.input = _kept(inputs)
        if self.run.recorder.spans.start(span) and self.run.input is None:
            self.run.input = _kept(inputs)

    @_safely
    def on_tool_start(
        self, serialized: dict[str, Any], input_str: str, *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Start the span of a tool, whose body may call models."""
        self._start("tool", serialized, kwargs.get("inputs") or input_str, run_id, kwargs)

    @_safely
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """End a span."""
        self._end(run_id, outputs, None)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """End a span."""
        self.on_chain_end(output, run_id=run_id, **kwargs)

    @_safely
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End a span that failed or was interrupted."""
        self._end(run_id, None, error)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End the span of a tool that failed."""
        self.on_chain_error(error, run_id=run_id, **kwargs)

    def _end(self, run_id: UUID, outputs: Any, error: BaseException | None) -> None:
        if self.run.recorder.keeps_values:
            outputs = _kept(outputs)
        if not self.run.recorder.end_span(run_id, outputs, error):
            return
        if error is not None:
            self.run.fail(error)
        else:
            self.run.output = _kept(outputs) if outputs is not None else self.run.output
            self.run.complete()

    @_safely
    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """Record that a graph waits, for example at a node named in ``interrupt_before``."""
        self.run.recorder.spans.interrupt(event.run_id)


class _AroundHandler:
    """LangChain's hook for the handlers of the running node, chain or tool, one handler a hook.

    LangChain drops them where a call inside has callbacks of its own.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._next: _AroundHandler | None = None

    def get(self) -> CaptureHandler | None:
        """Handler that LangChain adds to a call: of this number around it, if there is one."""
        config = var_child_runnable_config.get()
        manager = config.get("callbacks") if config else None
        if not isinstance(manager, BaseCallbackManager):
            return None
        handlers = manager.inheritable_handlers
        found = [handler for handler in handlers if isinstance(handler, CaptureHandler)]
        if len(found) <= self._number:
            return None
        if len(found) > self._number + 1 and self._next is None:
            self._next = _hook(self._number + 1)  # LangChain comes to it after this one
        return found[self._number]


def _hook(number: int) -> _AroundHandler:
    hook = _AroundHandler(number)
    register_configure_hook(cast(Any, hook), inheritable=True)
    return hook


_hook(0)
