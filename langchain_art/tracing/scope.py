"""`capture()`: a scope that records what is run in it as one run."""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

from langchain_core.runnables.config import RunnableConfig, var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from langchain_art.errors import ConfigError
from langchain_art.tracing.handler import CaptureHandler
from langchain_art.tracing.run import UNHEARD, Run
from langchain_art.wire import Turn

_log = logging.getLogger(__name__)


class RunExporter(Protocol):
    """What `capture` takes as `export`: `langchain_art.Exporter`."""

    def add(self, run: Run) -> None:
        """Export a run that has ended."""


@dataclass
class OpenedRuns:
    """The runs that were opened within one rollout, first the one around it."""

    runs: list[Run] = field(default_factory=list[Run])
    around: list[Run | None] = field(default_factory=list["Run | None"])
    """For each of them, the run in whose scope it was opened."""
    exported: bool = False
    """Whether the caller exports them: they keep the values of their spans for it."""

    def unfinished(self) -> Run:
        """The run that the rollout was making when it raised.

        Of those around the one that it opened last, this one included, the outermost that has a
        reward; if none has, the outermost. Not the one around the rollout, if it opened another.
        """
        first, chain = self.runs[0], [self.runs[-1]]
        while chain[0] is not first and (outer := self._around(chain[0])) is not first:
            chain.insert(0, outer)
        rewarded = (run for run in chain if any(map(_has_reward, (run, *run.turns))))
        return next(rewarded, chain[0])

    def _around(self, run: Run) -> Run:
        found = (outer for one, outer in zip(self.runs, self.around, strict=True) if one is run)
        return next(found) or self.runs[0]


def _has_reward(scored: Run | Turn) -> bool:
    return scored.reward is not None


# One hook per depth of nested scopes, so that all scopes' handlers are called. LangChain never
# removes hooks, so all runs share them: one is enough until scopes nest.
_scopes: list[ContextVar[CaptureHandler | None]] = []
#: Where scopes add their runs, if set: `gather` finds here the run of a rollout that raised.
opened: ContextVar[OpenedRuns | None] = ContextVar("langchain_art_opened", default=None)
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
    config's metadata, and the server assembles it (`call_tags`). A scope that heard no call says
    so in the log, and in the trajectory's metadata (``not_heard``).

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
        export: RunExporter | None = None,
    ) -> None:
        if export is not None and not callable(getattr(export, "add", None)):
            raise ConfigError(f"got export={export!r:.200}, expected an Exporter")
        self._run = Run(scenario=scenario, id=id, metadata=metadata)
        self._export = export
        self._entered: list[tuple[ContextVar[Any], Token[Any]]] = []

    def __enter__(self) -> Run:
        if self._entered:
            raise ConfigError(
                "got a scope that was entered before, expected a new capture() per run"
            )
        with _scopes_lock:
            outer = [handler.run for scope in _scopes if (handler := scope.get()) is not None]
            if len(outer) == len(_scopes):
                _add_scope()
            scope = next(scope for scope in _scopes if scope.get() is None)
        handler = CaptureHandler(self._run)
        self._run.recorder.spans.in_scope = True
        self._entered.append((scope, scope.set(handler)))
        config = _config_with(handler)
        if config is not None:
            configs = var_child_runnable_config
            self._entered.append((configs, configs.set(config)))
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
            _log.warning("run %s: %s", self._run.id, UNHEARD)
        for variable, token in reversed(self._entered):
            try:
                variable.reset(token)
            except ValueError:  # left in another context than entered, as in a fixture's finalizer
                variable.set(None)
        if self._export is not None:
            self._export.add(self._run)

    async def __aenter__(self) -> Run:
        return self.__enter__()

    async def __aexit__(self, *raised: Any) -> None:
        self.__exit__(*raised)
