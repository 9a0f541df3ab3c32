"""Captures a graph run as turns: `capture()`, or `CaptureHandler` as a callback.

Callbacks see every model call of a graph, in whatever node, subgraph, branch, tool or attempt it
is made. A `Turn` holds the call's place in the graph, its prompt and its reply; the sampled tokens
stay on the server, under the completion's id. The handler does no I/O and keeps each message once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import wraps
from itertools import count
from threading import Lock
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec
from uuid import UUID

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import RunnableConfig, var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent

from langchain_art.call_tags import (
    PendingTags,
    node_attempt,
    prepend_outer_path,
    publish_tags,
    tags_from_metadata,
)
from langchain_art.errors import ConfigError
from langchain_art.tracing.recorder import ModelCall
from langchain_art.tracing.run import Run
from langchain_art.tracing.spans import Span

__all__ = ["CaptureHandler", "Run", "capture"]

P = ParamSpec("P")
_serials = count()


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


def _span(
    kind: Literal["chain", "model"], run_id: UUID, parent: UUID | None, metadata: dict[str, Any]
) -> Span:
    thread = metadata.get("thread_id")
    return Span(
        run_id=run_id,
        parent=parent,
        kind=kind,
        namespace=metadata.get("langgraph_checkpoint_ns") or "",
        thread=None if thread is None else str(thread),
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
        self._open: dict[UUID, tuple[ModelCall, PendingTags]] = {}

    # ---- model calls

    @_safely
    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start a turn, and publish its tags for the model."""
        metadata = metadata or {}
        recorder = self.run.recorder
        span = _span("model", run_id, parent_run_id, metadata)
        recorder.spans.start(span)
        # In the later steps of a node that is a chain, LangGraph's own count is not available.
        attempt = max(node_attempt(), span.attempt_number)
        where = tags_from_metadata(metadata, attempt, tags or ())
        outer = recorder.spans.enclosing_namespaces(parent_run_id, where.get("namespace", ""))
        prepend_outer_path(where, outer)
        sent = {**where, "trajectory_id": self.run.id}
        if self.run.scenario is not None:
            sent["scenario"] = self.run.scenario
        pending = PendingTags(run_id, self._serial, sent)
        publish_tags(pending)
        params: dict[str, Any] = kwargs.get("invocation_params") or {}
        call = ModelCall(
            run_id=run_id,
            tags=where,
            tools=params.get("tools") or (),
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

    # ---- the graph around them

    @_safely
    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start the span of a graph, a node or a chain."""
        span = _span("chain", run_id, parent_run_id, metadata or {})
        if self.run.recorder.spans.start(span) and self.run.input is None:
            self.run.input = inputs

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Start the span of a tool, whose body may call models."""
        self.on_chain_start(serialized, inputs or input_str, run_id=run_id, **kwargs)

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
        if not self.run.recorder.end_span(run_id, outputs, error):
            return
        if error is not None:
            self.run.fail(error)
        else:
            self.run.output = outputs if outputs is not None else self.run.output
            self.run.complete()

    @_safely
    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """Record that a graph waits, for example at a node named in ``interrupt_before``."""
        self.run.recorder.spans.interrupt(event.run_id)


# One hook per depth of nested scopes, so that all scopes' handlers are called. LangChain never
# removes hooks, so all runs share them: one is enough until scopes nest.
_scopes: list[ContextVar[CaptureHandler | None]] = []
#: Where scopes add their runs, if set: `gather` finds here the run of a rollout that raised.
opened: ContextVar[list[Run] | None] = ContextVar("langchain_art_opened", default=None)
_scopes_lock = Lock()


def _add_scope() -> None:
    scope = ContextVar[CaptureHandler | None](f"langchain_art_scope_{len(_scopes)}", default=None)
    register_configure_hook(scope, inheritable=True)
    _scopes.append(scope)


_add_scope()


def _config_with(handler: CaptureHandler) -> RunnableConfig | None:
    """The config for graphs inside of a scope, with its handler; None inside of a running node.

    Models and chains get the handler by the hook, but LangGraph's interrupt event goes only to the
    handlers of the graph's config (before LangGraph 1.2.3: not to these, if the graph is run with
    callbacks of its own). Inside of a running node the config is LangGraph's and stays as it is.
    """
    config = var_child_runnable_config.get() or {}
    callbacks = config.get("callbacks") or []
    if not isinstance(callbacks, list):
        return None
    return {**config, "callbacks": [*callbacks, handler]}


class capture:
    """A scope that records every model call made inside of it, whatever graph makes it.

    Use it with ``with`` or ``async with``; it yields the `Run`. Scopes nest: each records all calls
    made inside, and calls are tagged with the id of the innermost. Not recorded are calls in raw
    threads that copy no context (LangChain's own executors copy it): give the model a
    `CaptureHandler` there; and graphs that another process runs: name the trajectory in the
    config's metadata, and the server assembles it (`call_tags`).

    One scope is one trajectory with one reward, whatever is run in it: several turns of a thread,
    forks of it, ``graph.batch``. Open a scope around each run that is to be scored by itself. A
    thread that is resumed or forked in another scope continues in another trajectory: earlier
    replies are context there, and are trained in the trajectory where they were sampled.

    An exception that leaves the scope marks the run as failed (truncated, if the graph's recursion
    limit was reached) and is raised on.

    Args:
        scenario: which task this is a run of (runs of one are judged as a group); default none.
        id: of the trajectory, unique; default a new one.
        metadata: kept with the run for review; default nothing.

    Raises:
        ConfigError: `id` or `scenario` cannot go over the wire.

    Example::

        async with capture(scenario="q-7") as run:
            await graph.ainvoke(state)
            run.reward = 1.0
    """

    def __init__(
        self,
        *,
        scenario: str | None = None,
        id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._run = Run(scenario=scenario, id=id, metadata=metadata)
        self._entered: list[tuple[ContextVar[Any], Token[Any]]] = []

    def __enter__(self) -> Run:
        if self._entered:
            raise ConfigError(
                "got a scope that was entered before, expected a new capture() per run"
            )
        with _scopes_lock:
            if all(scope.get() is not None for scope in _scopes):
                _add_scope()
            scope = next(scope for scope in _scopes if scope.get() is None)
        handler = CaptureHandler(self._run)
        self._entered.append((scope, scope.set(handler)))
        config = _config_with(handler)
        if config is not None:
            configs = var_child_runnable_config
            self._entered.append((configs, configs.set(config)))
        if (runs := opened.get()) is not None:
            runs.append(self._run)
        return self._run

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._run.fail(error)
        for variable, token in reversed(self._entered):
            try:
                variable.reset(token)
            except ValueError:  # left in another context than entered, as in a fixture's finalizer
                variable.set(None)

    async def __aenter__(self) -> Run:
        return self.__enter__()

    async def __aexit__(self, *raised: Any) -> None:
        self.__exit__(*raised)
