"""The tree of what ran: graphs, attempts of nodes, chains, tools, models; and what came of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Literal
from uuid import UUID

from langgraph.errors import GraphBubbleUp, GraphInterrupt

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
    number: int = 1
    """Which attempt that is: of those that one run of the graph made of one task."""
    outcome: Outcome | None = None
    """None while it runs."""
    waits: bool = False
    """It is a graph that an interrupt has stopped."""
    began: int = 0
    """By the tree's own clock, as `over`, which is 0 while it runs."""
    over: int = 0

    @property
    def task(self) -> tuple[str | UUID | None, str]:
        """What attempts of one task share: a thread outlives its graph's runs."""
        return self.thread or self.root, self.namespace


class Frames:
    """All frames of one run. Not thread-safe: lock around it."""

    def __init__(self) -> None:
        self._frames: dict[UUID, Frame] = {}
        self._latest: dict[tuple[str | UUID | None, str], UUID] = {}
        self._tries: Counter[tuple[UUID | None, str]] = Counter()
        self._graphs: list[Frame] = []  # those at the top that are no model call
        self._clock = count(1)

    def __getitem__(self, run_id: UUID) -> Frame:
        return self._frames[run_id]

    def started(self, frame: Frame) -> bool:
        """Notes a frame; says whether it is a graph or chain that nothing known stands above."""
        if (known := self._frames.get(frame.run_id)) is not None:
            frame.number = known.number
            return False
        above = self._above(frame)
        frame.root = above.root if above else frame.run_id
        if above is not None and above.namespace == frame.namespace:
            frame.attempt, frame.number = above.attempt, above.number
        elif above is not None:
            frame.attempt = frame.run_id
            self._tries[frame.parent, frame.namespace] += 1
            frame.number = self._tries[frame.parent, frame.namespace]
        elif frame.kind == "chain":
            frame.attempt = frame.parent  # a scope that was opened inside of the node
        if frame.namespace and frame.attempt:
            self._latest[frame.task] = frame.attempt
        frame.began = next(self._clock)
        self._frames[frame.run_id] = frame
        top = above is None and frame.kind == "chain"
        if top:
            self._graphs.append(frame)
        return top

    def ended(self, run_id: UUID, error: BaseException | None) -> bool:
        """Notes a frame's end; says whether the run's outcome is this frame's."""
        frame = self._frames[run_id]
        frame.over = next(self._clock)
        frame.outcome = "ok"
        if isinstance(error, GraphInterrupt):
            frame.outcome = "interrupted"
        elif error is not None and not isinstance(error, GraphBubbleUp):
            frame.outcome = "error"  # a handoff to a parent graph bubbles up too, and is none
        above = self._above(frame)
        # Only outside of nodes: a node may run a graph of its own, let it wait, and go on.
        waits = frame.outcome == "interrupted" or (frame.waits and not frame.namespace)
        if above is not None and waits:
            above.waits = True
        if frame.root != run_id:
            return False
        return frame.kind == "chain" or not self._graphs

    def stopped(self, run_id: UUID | None) -> None:
        """Notes that a graph waits at a node where it was told to."""
        if run_id is not None and (frame := self._frames.get(run_id)) is not None:
            frame.waits = True

    def outcome(self) -> Outcome:
        """What the run came to: the worst of its graphs, without those that others followed."""
        if not self._graphs:
            return "ok"
        newest = max(graph.began for graph in self._graphs)
        last = [graph for graph in self._graphs if not 0 < graph.over < newest]
        if any(graph.outcome == "error" for graph in last):
            return "error"
        waits = any(graph.waits or graph.outcome == "interrupted" for graph in last)
        return "interrupted" if waits else "ok"

    def around(self, parent: UUID | None, namespace: str) -> list[str]:
        """Namespaces of the tasks whose own graphs, on threads of their own, hold `namespace`.

        Such a graph's namespaces begin anew. Outermost first; empty for a graph's own parts.
        """
        found: list[str] = []
        frame = self._frames.get(parent) if parent else None
        while frame is not None:
            if frame.namespace and frame.namespace.split("|")[0] != namespace.split("|")[0]:
                namespace = frame.namespace
                found.insert(0, namespace)
            frame = self._above(frame)
        return found

    def exclusion(self, frame: Frame, number: int, tries: int) -> str | None:
        """Why the graph threw a call's frame away, or None.

        A call counts if it was made in the last attempt of its task, and nothing around it failed
        in a way that the run recovered from (a chain with retries or fallbacks, a caught
        exception, another graph after it), or waited for an answer that never came though the
        thread went on. Where nothing recovered, the whole run failed, and its status says so: what
        led there is kept, for it may earn a bad reward.

        Args:
            frame: of the call.
            number: which attempt of its node the call was made in, by LangGraph's count.
            tries: the highest such number of the same task.
        """
        if frame.attempt is None:  # no node's start was heard: LangGraph's count must do
            if number < tries:
                return "retried"
        elif frame.namespace and self._latest[frame.task] != frame.attempt:
            attempt = self._frames.get(frame.attempt)
            interrupted = attempt is not None and attempt.outcome == "interrupted"
            return "interrupted" if interrupted else "retried"
        return self._left_behind(frame)

    def _left_behind(self, frame: Frame) -> str | None:
        """What stopped something around a call, if that was never gone on with and the run was."""
        above = self._above(frame)
        while above is not None:
            beyond = self._above(above)
            if above.outcome == "interrupted" and self._abandoned(above):
                return "interrupted"
            if above.outcome != "error":
                pass
            elif above.namespace and above.attempt == above.run_id:  # a node around a subgraph
                latest = self._frames.get(self._latest[above.task])
                # A retry starts the subgraph anew; another run of the thread goes on within it.
                if latest is not above and latest is not None and latest.root == above.root:
                    return "retried"
            elif self._followed(above) if beyond is None else beyond.outcome == "ok":
                return "error"
            above = beyond
        return None

    def _abandoned(self, node: Frame) -> bool:
        """Whether a node's thread was gone on with to an end, and the node's question was not."""
        return (
            node.namespace != ""
            and self._latest.get(node.task) == node.attempt
            and any(
                later.outcome == "ok"
                and not later.waits
                and later.began > node.over
                and later.thread == node.thread is not None
                for later in self._graphs
            )
        )

    def _followed(self, graph: Frame) -> bool:
        """Whether another graph was run after this one failed, and not to go on with its thread."""
        return any(
            later.outcome == "ok"
            and later.began > graph.over
            and (later.thread is None or later.thread != graph.thread)
            for later in self._graphs
        )

    def _above(self, frame: Frame) -> Frame | None:
        return self._frames.get(frame.parent) if frame.parent else None
