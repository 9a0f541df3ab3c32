"""`capture()`: a scope that records what is run in it as one run."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from opcode import opmap
from threading import Lock
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, cast

from langchain_core.runnables.config import RunnableConfig, var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from langchain_art.errors import ConfigError
from langchain_art.tracing.handler import CaptureHandler
from langchain_art.tracing.run import NO_CALLS, Run

if TYPE_CHECKING:
    from langchain_art.export.exporter import Exporter

_log = logging.getLogger(__name__)


@dataclass
class OpenedRuns:
    """The runs that were opened within one rollout, first the one around it."""

    runs: list[Run] = field(default_factory=list[Run])
    around: list[Run | None] = field(default_factory=list["Run | None"])
    """Run in whose scope each of them was opened."""
    exported: bool = False
    """True if the caller exports them: they keep the values of their spans for it."""

    def unfinished(self) -> Run:
        """The run that the rollout was making when it raised.

        Of those around the one that it opened last, this one included, the outermost that has a
        reward; if none has, the outermost. Not the one around the rollout, if it opened another.
        """
        first, chain = self.runs[0], [self.runs[-1]]
        while chain[0] is not first and (outer := self._around(chain[0])) is not first:
            chain.insert(0, outer)
        rewarded = (
            run for run in chain if any(one.reward is not None for one in (run, *run.turns))
        )
        return next(rewarded, chain[0])

    def _around(self, run: Run) -> Run:
        found = (outer for one, outer in zip(self.runs, self.around, strict=True) if one is run)
        return next(found) or self.runs[0]


#: The scopes that were opened in this context, the innermost last.
_open: ContextVar[tuple[capture, ...]] = ContextVar("langchain_art_scopes", default=())
#: The open scopes of generators, and the frame whose body each is for.
_bodies: dict[capture, FrameType] = {}
#: The scopes of generators to whose bodies this thread or task belongs.
_within: ContextVar[frozenset[capture]] = ContextVar("langchain_art_within", default=frozenset())
#: Where scopes add their runs, if set: `gather` finds here the run of a rollout that raised.
opened: ContextVar[OpenedRuns | None] = ContextVar("langchain_art_opened", default=None)


def _open_handlers() -> list[CaptureHandler]:
    """The handlers of the scopes that record a call of this context, the innermost last.

    A generator shares the context of who reads it. Its scope records what runs in its body:
    beneath its frame, or in a thread or task of the context seen while the body was in progress.
    """
    scopes = _open.get()
    if not _bodies:  # as in nearly all programs: no frame is looked at
        return [scope.handler for scope in scopes if not scope.in_generator]
    bodies, frames = _bodies.copy(), set[FrameType]()
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    inner = [scope for scope in bodies if bodies[scope] in frames and scope not in scopes]
    handlers: list[CaptureHandler] = []
    for scope in (*scopes, *inner):
        if scope.in_generator and (body := bodies.get(scope)) not in frames:
            if body is None:
                continue
            if scope not in (within := _within.get()):
                if not _in_progress(body):
                    continue
                _within.set(within | {scope})  # a thread or task has a context of its own
        handlers.append(scope.handler)
    return handlers


def _in_progress(frame: FrameType) -> bool:
    """True if a generator that is not beneath this code stands at no ``yield``.

    Then it is on the stack of another thread, or at an ``await``, after which the bytecode goes on
    with RESUME 3 (the module `dis` documents it; after a ``yield`` it is 1).
    """
    if frame.f_back is not None:
        return True
    code, at = frame.f_code.co_code, frame.f_lasti
    at += 0 if code[at] == opmap["RESUME"] else 2  # Python 3.11 and 3.12 stand before it
    return code[at] == opmap["RESUME"] and code[at + 1] & 3 == 3


def _generator_around() -> FrameType | None:
    """The frame of the generator in whose body a scope is opened; None: in no such body.

    A generator that is a context manager or a fixture opens its scope for the code around it.
    """
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        is_generator = frame.f_code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR)
        reader = frame.f_back
        if is_generator and (reader is None or reader.f_code.co_name not in _ENTERING):
            by = reader.f_globals.get("__name__", "") if reader else ""
            return None if by.startswith(_FIXTURES) else frame
        if not is_generator and frame.f_code.co_name not in _ENTERING:
            return None
        frame = reader
    return None


_ENTERING = ("__enter__", "__aenter__", "enter_context", "enter_async_context")
_FIXTURES = ("_pytest.", "pytest_", "pluggy.", "anyio.")


class _Hook:
    """LangChain's hook for scopes, one a depth; LangChain never removes hooks."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def get(self) -> CaptureHandler | None:
        """Handler that LangChain adds to a call: of the scope of this depth; None: no scope."""
        if not _bodies and len(scopes := _open.get()) == 1:  # nearly always, and asked often
            return None if self._depth or scopes[0].in_generator else scopes[0].handler
        handlers = _open_handlers()
        return handlers[self._depth] if len(handlers) > self._depth else None


_hooks: list[_Hook] = []
_hooks_lock = Lock()


class _ScopeHandler(CaptureHandler):
    """The handler of a scope."""


class _Callbacks(list[Any]):
    """A config's callbacks, with the handlers of those scopes that record what takes a copy."""

    def copy(self) -> list[Any]:
        """Copy that LangChain and LangGraph give to a graph."""
        return [*(one for one in self if not isinstance(one, _ScopeHandler)), *_open_handlers()]


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
    return {**config, "callbacks": _Callbacks([*callbacks.copy(), handler])}


class capture:
    """A scope that records every model call made inside of it, whatever graph makes it.

    Use it with ``with`` or ``async with``; it yields the `Run`. Scopes nest: each records all calls
    made inside, and calls are tagged with the id of the innermost. Not recorded are calls in raw
    threads that copy no context (LangChain's own executors copy it): give the model a
    `CaptureHandler` there; and graphs that another process runs: name the trajectory in the
    config's metadata, and the server assembles it (`call_tags`). A scope that recorded no call says
    so in the log, and in the trajectory's metadata (``not_heard``).

    In a generator a scope records what runs in the generator's body, not what its reader calls
    between two items.

    One scope is one trajectory with one reward, whatever is run in it: several turns of a thread,
    forks of it, ``graph.batch``. Open a scope around each run that is to be scored by itself. A
    thread that is resumed or forked in another scope continues in another trajectory: earlier
    replies are context there, and are trained in the trajectory where they were sampled.

    An exception that leaves the scope marks the run as failed (truncated, if the graph's recursion
    limit was reached) and is raised on. So does a graph that fails, unless another follows; a call,
    chain or tool outside of graphs whose error the program handles does not.

    Args:
        scenario: which task this is a run of (runs of one are judged as a group): its name, or what
            `Trainer` takes as a scenario, which is named by its ``id`` or its content. Default
            none. Of more than 256 characters the first 200 are kept, and a hash of all.
        id: of the trajectory, unique; default a new one.
        metadata: kept with the run for review; default nothing.
        export: where the run goes when the scope ends (`Exporter`), with the rewards and scores
            that it has by then; default nowhere. In the rollout of a `Trainer` that exports, the
            trainer does it, once the run is judged.

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
        scenario: Any = None,
        id: str | None = None,
        metadata: dict[str, Any] | None = None,
        export: Exporter | None = None,
    ) -> None:
        if export is not None and not callable(getattr(export, "add", None)):
            raise ConfigError(f"got export={export!r:.200}, expected an Exporter")
        self._run = Run(scenario=scenario, id=id, metadata=metadata)
        self._export = export
        self._config: RunnableConfig | None = None
        self._entered = self.in_generator = False

    def __enter__(self) -> Run:
        if self._entered:
            raise ConfigError(
                "got a scope that was entered before, expected a new capture() per run"
            )
        self._entered = True
        outer = [handler.run for handler in _open_handlers()]
        self.handler: CaptureHandler = _ScopeHandler(self._run)
        self._run.recorder.spans.in_scope = True
        if (body := _generator_around()) is not None:
            self.in_generator = True
            _bodies[self] = body
        self._config = _config_with(self.handler)
        _open.set((*_open.get(), self))
        depths = len(_open_handlers())
        with _hooks_lock:
            while len(_hooks) < depths:
                _hooks.append(_Hook(len(_hooks)))
                register_configure_hook(cast(Any, _hooks[-1]), inheritable=True)
        if self._config is not None:
            self._outer = var_child_runnable_config.set(self._config)
        if (within := opened.get()) is not None:
            within.runs.append(self._run)
            within.around.append(outer[-1] if outer else None)
            if within.exported:
                self._export = None
                self._run.recorder.keeps_values = True
        if self._export is not None:
            self._run.recorder.keeps_values = True
        return self._run

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._run.fail(error)
        elif opened.get() is None and not self._run.recorder.has_calls:  # else a trainer says it
            _log.warning("run %s: %s", self._run.id, NO_CALLS)
        _bodies.pop(self, None)
        _open.set(tuple(scope for scope in _open.get() if scope is not self))
        if self._config is not None and var_child_runnable_config.get() is self._config:
            try:
                var_child_runnable_config.reset(self._outer)
            except ValueError:  # left in another context than entered, as in a fixture's finalizer
                var_child_runnable_config.set(None)
        config = var_child_runnable_config.get() or {}
        if isinstance(left := config.get("callbacks"), _Callbacks) and not _open.get():
            # It was begun within a scope that has ended before it.
            kept = {**config, "callbacks": left.copy()}
            var_child_runnable_config.set(cast(Any, {n: v for n, v in kept.items() if v}) or None)
        if self._export is not None:
            self._export.add(self._run)

    async def __aenter__(self) -> Run:
        return self.__enter__()

    async def __aexit__(self, *raised: Any) -> None:
        self.__exit__(*raised)
