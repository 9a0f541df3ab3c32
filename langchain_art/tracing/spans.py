"""The spans of one run: a tree of graphs, attempts of nodes, chains, tools and model calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any, Literal, TypeAlias, TypeGuard
from uuid import UUID, uuid4

from langgraph.errors import GraphBubbleUp, GraphRecursionError, ParentCommand

from langchain_art.call_tags import Surroundings, node_names

SpanOutcome = Literal["ok", "error", "interrupted"]
Task: TypeAlias = "tuple[str | UUID | None, str]"
"""The identity of a task over its attempts: its thread (without one, the topmost span), and its
namespace."""


@dataclass(slots=True)
class Span:
    """The execution of a graph, an attempt of a node, a chain, a tool or a model call."""

    run_id: UUID
    parent: UUID | None
    kind: Literal["chain", "tool", "model"]
    namespace: str = ""
    step: int | None = None
    """LangGraph's, of the graph around it; None outside of nodes."""
    thread: str | None = None
    root: UUID | None = None
    """The topmost span above it that this run's handler recorded."""
    attempt: UUID | None = None
    """The span of the enclosing attempt of a node; None if its start was not recorded."""
    attempt_number: int = 1
    """The number of the task's attempt within one run of the graph, from 1."""
    outcome: SpanOutcome | None = None
    """None while it runs."""
    waits: bool = False
    """True if it is a graph that an interrupt has stopped."""
    started: int = 0
    """Logical time of the start."""
    ended: int = 0
    """Logical time of the end; 0 while it runs."""
    name: str = ""
    """Name of the graph, node, chain or tool; empty for a model call."""
    begun_at: float = field(default_factory=perf_counter)
    """Seconds of the monotonic clock, as `first_token_at` and `ended_at`."""
    first_token_at: float | None = None
    ended_at: float | None = None
    """None while it runs."""
    error: str | None = None
    alone: bool = True
    """True if ``generate`` was asked for this model call alone, not for several prompts."""
    looped: bool = False
    """True if the error was that a graph had reached its recursion limit."""
    input: Any = None
    """Input by the graph, if the run keeps values (`RunRecorder.keeps_values`); so is `output`. Of
    a model call, the turn has both."""
    output: Any = None
    handler: int = 0
    """Number of the handler that told its start."""
    around: Surroundings | None = None
    """Inherited by the calls of a chain or tool with callbacks of its own, and of those in it."""

    @property
    def task(self) -> Task:
        """See `Task`."""
        return self.thread or self.root, self.namespace


#: Nodes of ``add_node(error_handler=…)``, whose namespace is in that of the task that failed.
_ERROR_HANDLERS = ("__error_handler__", "__default_error_handler__")


def is_pause(error: BaseException | None) -> bool:
    """True if a graph stopped to be gone on with: an interrupt, or LangGraph's drain."""
    return isinstance(error, GraphBubbleUp) and not isinstance(error, ParentCommand)


def _contains(outer: str, inner: str) -> bool:
    """True if a namespace is that of a part of the graph whose task has the namespace `outer`.

    A subgraph with a memory of its own (``compile(checkpointer=True)``) has a namespace without the
    ids of the tasks around it: ``team|work:03`` in ``team:8f``.
    """
    first = inner.split("|")[0]
    if not first or ":" in first:
        return first == outer.split("|")[0]
    names = node_names(outer)
    return node_names(inner)[: len(names)] == names


def _place(span: Span) -> tuple[str | None, list[str]]:
    """Place of a task: its thread, and its namespace without the ids of tasks."""
    return span.thread, [part.split(":", 1)[0] for part in span.namespace.split("|")]


class SpanTree:
    """All spans of one run. Not thread-safe."""

    def __init__(self) -> None:
        self.in_scope = False
        """True if a `capture` scope says how the run ends, if it ends outside of graphs."""
        self._spans: dict[UUID, Span] = {}
        self._again: dict[UUID, UUID] = {}  # a config's run_id that was used again -> the latest
        self._latest_attempt: dict[Task, UUID] = {}
        self._attempts: Counter[tuple[UUID | None, str]] = Counter()
        self._handlers: dict[str, Span] = {}  # a failed task's namespace -> its error handler
        self._graphs: list[Span] = []  # topmost spans that are no model calls
        self._clock = count(1)

    def __getitem__(self, run_id: UUID) -> Span:
        return self._spans[self._again.get(run_id, run_id)]

    def has(self, run_id: UUID | None) -> TypeGuard[UUID]:
        """True if a span was recorded."""
        return run_id in self._spans

    def __iter__(self) -> Iterator[Span]:
        """Iterate in the order in which they started."""
        return iter(self._spans.values())

    def start(self, span: Span) -> bool:
        """Add a span. Returns whether it is a graph or chain with no known span above it."""
        if span.parent is not None:
            span.parent = self._again.get(span.parent, span.parent)
        if self.has(span.run_id):
            known = self[span.run_id]
            if known.outcome is None and known.handler != span.handler:  # both are of this run
                span.run_id, span.attempt_number = known.run_id, known.attempt_number
                return False
            self._again[span.run_id] = uuid4()
            span.run_id = self._again[span.run_id]
        above = self._above(span)
        span.root = above.root if above else span.run_id
        if above is not None and above.namespace == span.namespace:
            span.attempt, span.attempt_number = above.attempt, above.attempt_number
        elif above is not None:
            span.attempt = span.run_id
            self._attempts[span.parent, span.namespace] += 1
            span.attempt_number = self._attempts[span.parent, span.namespace]
            failed, _, task = span.namespace.rpartition("|")
            if failed and task.startswith(_ERROR_HANDLERS):
                self._handlers[failed] = span
        elif span.kind != "model":
            span.attempt = span.parent  # the scope was opened inside of the node
        if span.namespace and span.attempt:
            self._latest_attempt[span.task] = span.attempt
        span.started = next(self._clock)
        self._spans[span.run_id] = span
        top = above is None and span.kind != "model"
        if top:
            self._graphs.append(span)
        return top

    def end(self, run_id: UUID, error: BaseException | None) -> bool:
        """Record a span's end. Returns whether the run ends with this span."""
        span = self[run_id]
        span.ended = next(self._clock)
        span.ended_at = perf_counter()
        span.outcome = "ok"
        if is_pause(error):
            span.outcome = "interrupted"
        elif error is not None and not isinstance(error, ParentCommand):
            span.outcome = "error"  # the command, a handoff to a parent graph, is no error
            span.error = f"{type(error).__name__}: {error}"
            span.looped = isinstance(error, GraphRecursionError)
        above = self._above(span)
        # Only outside of nodes: a node may run a graph of its own, let it wait, and continue.
        waits = span.outcome == "interrupted" or (span.waits and not span.namespace)
        if above is not None and waits:
            above.waits = True
        if span.root != span.run_id or self._is_handled(span):
            return False
        return span.kind != "model" or not self._graphs

    def interrupt(self, run_id: UUID | None) -> None:
        """Record that a graph waits at a node named in ``interrupt_before`` or ``_after``."""
        if self.has(run_id):
            self[run_id].waits = True

    def outcome(self) -> SpanOutcome:
        """The worst outcome of the run's graphs, without those that another graph followed."""
        if not self._graphs:
            return "ok"
        newest = max(graph.started for graph in self._graphs)
        last = [
            graph
            for graph in self._graphs
            if not 0 < graph.ended < newest and not self._is_handled(graph)
        ]
        if any(graph.outcome == "error" for graph in last):
            return "error"
        waits = any(graph.waits or graph.outcome == "interrupted" for graph in last)
        return "interrupted" if waits else "ok"

    def _is_handled(self, top: Span) -> bool:
        """True if the program handles a topmost span's error: of no graph, in a scope.

        If the program does not, it leaves the scope, and the run fails by it.
        """
        return (
            self.in_scope
            and top.outcome == "error"
            and not any(
                span.root == top.run_id and span.namespace != top.namespace
                for span in self._spans.values()
            )
        )

    def enclosing_namespaces(self, parent: UUID | None, namespace: str) -> list[str]:
        """Namespaces of the tasks around a graph with a thread of its own, outermost first.

        Such a graph's `namespace` does not contain them. Empty for parts of one graph.
        """
        found: list[str] = []
        span = self[parent] if self.has(parent) else None
        while span is not None:
            if span.namespace and not _contains(span.namespace, namespace):
                namespace = span.namespace
                found.insert(0, namespace)
            span = self._above(span)
        return found

    def exclusion(self, span: Span, superseded: bool) -> str | None:
        """Reason why the graph discarded a model call; None if the call counts.

        A call counts if it belongs to the last attempt of its task, unless a span around it failed
        and the run recovered (a chain with retries or fallbacks, a caught exception, a node's error
        handler, another graph after it), or was interrupted and never resumed while its thread
        continued. The calls of a run that failed without recovery count, since they may get a low
        reward. So do those of a graph that reached its recursion limit in a tool or node that went
        on: to loop is what the policy did, and no fault around it. `superseded` says that LangGraph
        counted a later attempt; it is used if the node's start was not recorded.
        """
        if span.attempt is None:
            if superseded:
                return "retried"
        elif span.namespace and self._latest_attempt[span.task] != span.attempt:
            attempt = self._spans.get(span.attempt)
            interrupted = attempt is not None and attempt.outcome == "interrupted"
            return "interrupted" if interrupted else "retried"
        above = self._above(span)
        while above is not None:
            if (why := self._recovered(above)) is not None:
                return why
            if above.outcome == "interrupted" and self._is_redone(span, above):
                return "interrupted"
            above = self._above(above)
        return None

    def _is_redone(self, span: Span, node: Span) -> bool:
        """True if a node that was resumed ran a task of a graph within it anew, as new.

        A graph without checkpoints begins again there; one with them goes on, and what it runs
        again has the namespace that it had. LangGraph numbers the graphs of one task, and keeps the
        results of tasks of the functional API.
        """
        latest = self._spans.get(self._latest_attempt.get(node.task, node.run_id))
        if latest is None or latest.started <= node.started:
            return False
        inner: Span | None = span
        while inner is not None and inner is not node:
            outer = self._above(inner)
            if _is_node(inner):
                again = self._spans.get(self._latest_attempt[inner.task], inner)
                if outer is node or again.started > latest.started:
                    return False  # a task of the functional API, or one that went on
            inner = outer
        known = {one.namespace for one in self._spans.values() if one.started < latest.started}
        place = _place(span)
        return any(
            one.step == span.step
            and one.namespace not in known
            and _place(one) == place
            and self.is_within(one, latest)
            for one in self._spans.values()
        )

    def is_within(self, span: Span, outer: Span) -> bool:
        """True if a span is another, or in it."""
        above: Span | None = span
        while above is not None and above is not outer:
            above = self._above(above)
        return above is outer

    def _recovered(self, span: Span) -> str | None:
        if span.outcome == "interrupted":
            return "interrupted" if self._is_abandoned(span) else None
        if span.outcome != "error":
            return None
        if _is_node(span):  # around a subgraph
            latest = self._spans.get(self._latest_attempt[span.task])
            # A retry restarts the subgraph; another run of the thread continues within it.
            if latest is not None and latest is not span and latest.root == span.root:
                return "retried"
            handler = self._handlers.get(span.namespace)
            handled = handler is not None and handler.outcome == "ok"
            return "error" if handled and not span.looped else None
        above = self._above(span)
        if above is not None and span.looped and self._was_caught(span, above):
            return None
        recovered = self._is_followed(span) if above is None else above.outcome == "ok"
        return "error" if recovered else None

    def _was_caught(self, graph: Span, above: Span) -> bool:
        """True if a tool or node went on without a graph, and no fallback or retry replaced it.

        LangChain records the graphs in a ``with_fallbacks`` beside its span, not in it.
        """
        replaced = any(
            one.kind == "chain"
            and one.parent == graph.parent
            and one.started < graph.started < graph.ended < one.ended
            and one.outcome == "ok"
            for one in self._spans.values()
        )
        return (above.kind == "tool" or _is_node(above)) and not replaced

    def _is_abandoned(self, node: Span) -> bool:
        """True if a later graph finished the thread of an interrupted node without resuming it."""
        return (
            node.namespace != ""
            and self._latest_attempt.get(node.task) == node.attempt
            and any(
                later.outcome == "ok"
                and not later.waits
                and later.started > node.ended
                and later.thread == node.thread is not None
                for later in self._graphs
            )
        )

    def _is_followed(self, graph: Span) -> bool:
        """True if another graph ran after this one failed, other than on the same thread."""
        return any(
            later.outcome == "ok"
            and later.started > graph.ended
            and (later.thread is None or later.thread != graph.thread)
            for later in self._graphs
        )

    def _above(self, span: Span) -> Span | None:
        return self._spans.get(span.parent) if span.parent else None


def _is_node(span: Span) -> bool:
    return span.namespace != "" and span.attempt == span.run_id
