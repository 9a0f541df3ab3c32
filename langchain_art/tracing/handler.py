"""Hears a graph run and tells it as turns: `capture()`, or `CaptureHandler` as a callback.

Callbacks see every model call of a graph, in whatever node, subgraph, branch, tool or attempt it
is made. A `Turn` says where the call stood and what it was asked and answered; the sampled tokens
stay on the server, under the completion's id. The handler does no I/O and holds each message once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
from langchain_art.tracing.recorder import Call
from langchain_art.tracing.run import Run
from langchain_art.tracing.spans import Frame

__all__ = ["CaptureHandler", "Run", "capture"]

P = ParamSpec("P")
_serials = count()


def _safely(
    method: Callable[Concatenate[CaptureHandler, P], None],
) -> Callable[Concatenate[CaptureHandler, P], None]:
    """Keeps a payload that we cannot read from harming the graph, and says so on the run."""

    @wraps(method)
    def guarded(self: CaptureHandler, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the graph's own work comes first
            why = f"{method.__name__} was not captured: {type(error).__name__}: {error}"
            self.run.error = self.run.error or why
            self.run.metadata.setdefault("not_captured", []).append(why)

    return guarded


def _frame(
    kind: Literal["chain", "model"], run_id: UUID, parent: UUID | None, metadata: dict[str, Any]
) -> Frame:
    thread = metadata.get("thread_id")
    return Frame(
        run_id=run_id,
        parent=parent,
        kind=kind,
        namespace=metadata.get("langgraph_checkpoint_ns") or "",
        thread=None if thread is None else str(thread),
    )


class CaptureHandler(GraphCallbackHandler):
    """A callback handler that records one run: what `capture()` installs.

    Pass it where a scope cannot reach, as ``config={"callbacks": [handler]}`` or, for threads
    without a context of their own, as ``ChatART(callbacks=[handler])``. One handler tells one run:
    a second graph invocation under it (a resumed thread, the next user turn) goes on with the same
    story. A handler that hears only the model knows nodes, but not what became of their attempts.

    Args:
        run: the story to tell; a new one, without a scenario, if left out.
    """

    run_inline = True  # in the caller's thread and context, in order, in asynchronous graphs too

    def __init__(self, run: Run | None = None) -> None:
        super().__init__()
        self.run = run if run is not None else Run()
        self._serial = next(_serials)
        self._open: dict[UUID, tuple[Call, PendingTags]] = {}

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
        """Opens a turn and leaves its tags for the model."""
        asked = messages[0] if messages else []
        self._ask(asked, run_id, parent_run_id, tags, metadata or {}, kwargs)

    @_safely
    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Opens a turn of a plain text model, as if a user had said the prompt."""
        said = [HumanMessage(prompt) for prompt in prompts[:1]]
        self._ask(said, run_id, parent_run_id, tags, metadata or {}, kwargs)

    def _ask(
        self,
        messages: Sequence[BaseMessage],
        run_id: UUID,
        parent: UUID | None,
        tags: list[str] | None,
        metadata: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> None:
        frame = _frame("model", run_id, parent, metadata)
        self.run.story.started(frame)
        # LangGraph's own count is not known in the later steps of a node that is a chain.
        where = tags_from_metadata(metadata, max(node_attempt(), frame.number), tags or ())
        prepend_outer_path(where, self.run.story.around(parent, where.get("namespace", "")))
        params: dict[str, Any] = kwargs.get("invocation_params") or {}
        call = Call(
            run_id=run_id,
            where=where,
            tools=params.get("tools") or (),
            ours=metadata.get("ls_provider") == "art",
            model=metadata.get("ls_model_name"),
        )
        sent = {**where, "trajectory_id": self.run.id}
        if self.run.scenario is not None:
            sent["scenario"] = self.run.scenario
        pending = PendingTags(run_id, self._serial, sent)
        publish_tags(pending)
        self._open[run_id] = (call, pending)
        self.run.story.asked(call, messages)

    @_safely
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Closes a turn with its reply."""
        self._answer(run_id, response, None)

    @_safely
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Closes a turn with an error, and with what had been streamed before it."""
        self._answer(run_id, kwargs.get("response"), error)

    def _answer(
        self, run_id: UUID, response: LLMResult | None, error: BaseException | None
    ) -> None:
        call, pending = self._open.pop(run_id)
        pending.open = False
        call.latency = time.perf_counter() - call.clock
        call.error = None if error is None else f"{type(error).__name__}: {error}"
        self.run.story.answered(call, response)
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
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Notes a graph, a node or a chain."""
        self._start(run_id, parent_run_id, metadata, inputs)

    @_safely
    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Notes a tool, whose body may call models."""
        self._start(run_id, parent_run_id, metadata, inputs or input_str)

    def _start(
        self, run_id: UUID, parent: UUID | None, metadata: dict[str, Any] | None, inputs: Any
    ) -> None:
        top = self.run.story.started(_frame("chain", run_id, parent, metadata or {}))
        if top and self.run.input is None:
            self.run.input = inputs

    @_safely
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Notes a result."""
        self._end(run_id, outputs, None)

    @_safely
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Notes a result."""
        self._end(run_id, output, None)

    @_safely
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Notes a failed attempt or an interrupt."""
        self._end(run_id, None, error)

    @_safely
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Notes a failed tool."""
        self._end(run_id, None, error)

    def _end(self, run_id: UUID, outputs: Any, error: BaseException | None) -> None:
        if not self.run.story.ended(run_id, outputs, error):
            return
        if error is not None:
            self.run.ended(error)
        else:
            self.run.output = outputs if outputs is not None else self.run.output
            self.run.settled()

    @_safely
    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """Notes that a graph waits: at a node named in ``interrupt_before``, say."""
        self.run.story.stopped(event.run_id)


# One hook per depth of nested scopes, so that each scope's handler is heard beside the outer ones'.
# LangChain keeps hooks for good, so they are shared by all runs: one is enough until scopes nest.
_scopes: list[ContextVar[CaptureHandler | None]] = []
#: Where scopes note their runs, if somebody asks: `gather` finds here the run of what has raised.
opened: ContextVar[list[Run] | None] = ContextVar("langchain_art_opened", default=None)
_scopes_lock = Lock()


def _add_scope() -> None:
    scope = ContextVar[CaptureHandler | None](f"langchain_art_scope_{len(_scopes)}", default=None)
    register_configure_hook(scope, inheritable=True)
    _scopes.append(scope)


_add_scope()


def _config_with(handler: CaptureHandler) -> RunnableConfig | None:
    """What a scope adds to the config of the graphs inside of it, for LangGraph's own events.

    Models and chains hear of a handler by the hook, but a graph tells that it waits only to the
    handlers of its config (before LangGraph 1.2.3: not to these, if it is run with callbacks of its
    own). Inside of a running node the config is LangGraph's: left alone.
    """
    config = var_child_runnable_config.get() or {}
    callbacks = config.get("callbacks") or []
    if not isinstance(callbacks, list):
        return None
    return {**config, "callbacks": [*callbacks, handler]}


class capture:
    """A scope that records every model call made inside of it, whatever graph makes it.

    Use it with ``with`` or ``async with``; it yields the `Run`. Scopes nest: each hears all that
    happens inside, and calls are tagged with the innermost one's id. Calls made in raw threads that
    copy no context are not heard (LangChain's own executors copy it): give the model a
    `CaptureHandler` there. Nor is a graph that another process runs: name the trajectory in its
    config's metadata, and the server puts it together (`tagging`).

    One scope is one trajectory with one reward, whatever is run in it: several turns of a thread,
    forks of it, ``graph.batch``. Open a scope around each run that is to be scored by itself. A
    thread that is resumed or forked in another scope goes on in another trajectory: what was said
    before is context there, and is learned where it was sampled.

    An exception that leaves the scope marks the run as failed (truncated, if the graph's recursion
    limit was reached) and goes on its way.

    Args:
        scenario: which task this is a run of; default none.
        id: of the trajectory; default a new one.
        metadata: whatever should stand beside the run in review; default nothing.

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
            self._run.ended(error)
        for variable, token in reversed(self._entered):
            try:
                variable.reset(token)
            except ValueError:  # left in another context than entered, as in a fixture's finalizer
                variable.set(None)

    async def __aenter__(self) -> Run:
        return self.__enter__()

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)
