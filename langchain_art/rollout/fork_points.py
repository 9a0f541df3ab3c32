"""Where a run can be continued from a checkpoint, and what may not be run a second time.

A continuation runs nodes that have run before. Only nodes that the user named are run so: what else
it could come to is refused by name, before anything runs where the graph's edges tell it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.constants import START
from langgraph.graph.state import CompiledStateGraph

from langchain_art.errors import ConfigError
from langchain_art.rollout.forks import Forks
from langchain_art.rollout.graph_rollout import is_graph, is_remote

if TYPE_CHECKING:
    from langgraph.types import StateSnapshot

Compiled: TypeAlias = CompiledStateGraph[Any, Any, Any, Any]
_PUSH = "__pregel_push"  # the first part of the path of a task that a `Send` made


@dataclass(frozen=True)
class ForkPoint:
    """A checkpoint of a run, and the node whose decision comes next."""

    node: str
    config: dict[str, Any]
    """Of the checkpoint."""
    step: int
    """Of the node, as LangGraph counts."""
    turns: int
    """See `ForkOf.turns`."""


def check_graph(forks: Forks, rollout: object) -> None:
    """ConfigError if `rollout` cannot be continued as `forks` says, as far as its edges tell."""
    if is_remote(rollout):
        raise _refused(
            "a RemoteGraph, whose calls this process does not hear; run the graph in this process"
        )
    if not isinstance(rollout, CompiledStateGraph):
        what = type(rollout).__name__ if is_graph(rollout) else f"{rollout!r:.100}"
        raise _refused(
            f"the rollout {what}, expected a compiled StateGraph as it is, with an evaluator that "
            "scores its runs: only then is it known how to go on from a checkpoint"
        )
    graph = cast("Compiled", rollout)
    if not isinstance(cast(object, graph.checkpointer), BaseCheckpointSaver):
        raise _refused(
            f"a graph with checkpointer={graph.checkpointer!r:.80}, expected one that keeps its "
            "checkpoints: graph.compile(checkpointer=InMemorySaver())"
        )
    if graph.interrupt_before_nodes or graph.interrupt_after_nodes:
        raise _refused(
            "a graph with interrupt_before or interrupt_after, at which its runs wait; compile it "
            "without them for the fit"
        )
    known = [name for name in graph.nodes if name != START]
    for name in (*forks.at, *forks.run_again):
        if name not in known:
            raise ConfigError(
                f"forks: {name!r} is no node of the graph itself; its nodes are "
                f"{', '.join(map(repr, known))}. A subgraph is named by its node in this graph."
            )
    for name in forks.at:
        cached = graph.nodes[name].cache_policy or graph.cache_policy
        if graph.cache is not None and cached:
            raise _refused(
                f"the node {name!r}, whose result is cached: run again, it would decide the same"
            )
    for name in forks.at:
        for reached, way in _reachable(graph, name):
            _check_safe(forks, reached, f"The edges {' → '.join(way)} lead there.")


def unsafe(forks: Forks, graph: Compiled) -> list[str]:
    """Nodes before which a continuation is stopped: all that may not be run again.

    Error handlers belong to the nodes whose errors they handle.
    """
    safe = {START, *forks.at, *forks.run_again}
    handlers = {name for name, spec in graph.builder.nodes.items() if spec.is_error_handler}
    return [name for name in graph.nodes if name not in safe | handlers]


def fork_points(
    forks: Forks,
    run: str,
    chance: random.Random,
    history: Iterable[StateSnapshot],
    calls: Sequence[tuple[str, int] | None],
) -> list[ForkPoint]:
    """Where a run that has ended is branched: at most once for each node of `forks.at`.

    Args:
        forks: the settings.
        run: its id.
        chance: draws the visit of a node.
        history: all checkpoints of its thread.
        calls: for each of its calls in order, node and step in the graph (`outermost_nodes`).

    Raises:
        ConfigError: a node of `at` was a task of a `Send`, or nodes ran after it that may not be
            run again.
    """
    by_step = {(snapshot.metadata or {}).get("step", -1) + 1: snapshot for snapshot in history}
    found: list[ForkPoint] = []
    for node in forks.at:
        visits = [
            step
            for step, snapshot in sorted(by_step.items())
            if node in snapshot.next and (node, step) in calls
        ]
        if not visits:
            continue
        step = chance.choice(visits)
        for one in visits:
            if any(task.path and task.path[0] == _PUSH for task in by_step[one].tasks):
                raise _refused(
                    f"the node {node!r} in a step whose tasks were made by Send: what one of "
                    "several parallel tasks decided has no checkpoint of its own"
                )
        for later, snapshot in sorted(by_step.items()):
            for name in snapshot.next if later >= step else ():
                _check_safe(forks, name, f"It ran in step {later} of the run {run}.")
        behind = [k for k, call in enumerate(calls) if call is not None and call[1] >= step]
        config = cast("dict[str, Any]", by_step[step].config)
        found.append(ForkPoint(node, config, step, behind[0]))
    return found


def check_goes_on(forks: Forks, stopped_at: Sequence[str], waits: bool) -> None:
    """ConfigError about a run that stopped before these nodes, or `waits` for an answer."""
    for name in stopped_at:
        if not waits:
            _check_safe(forks, name, "A continuation was stopped before it.")
    where = ", ".join(map(repr, stopped_at)) or "a node"
    raise _refused(f"a run that was interrupted at {where}; a run must come to its end by itself")


def _check_safe(forks: Forks, node: str, why: str) -> None:
    if node not in (*forks.at, *forks.run_again):
        raise ConfigError(
            f"forks: a continuation would run the node {node!r} a second time, which is not stated "
            f"to be safe. {why} If its effects outside of the graph may happen several times, say "
            f"so with Forks(run_again=({node!r}, …))."
        )


def _refused(what: str) -> ConfigError:
    return ConfigError(f"forks: got {what}.")


def _reachable(graph: Compiled, start: str) -> Iterator[tuple[str, list[str]]]:
    """The nodes to which edges lead from `start`, and how; not those that only a function names."""
    after: dict[str, list[str]] = {}
    builder = graph.builder
    for source, target in builder.edges:
        after.setdefault(source, []).append(target)
    for sources, target in builder.waiting_edges:
        for source in sources:
            after.setdefault(source, []).append(target)
    for source, branches in builder.branches.items():
        for branch in branches.values():
            after.setdefault(source, []).extend((branch.ends or {}).values())
    for source, spec in builder.nodes.items():
        after.setdefault(source, []).extend(spec.ends or ())
    ways, seen = [[start]], {start}
    for way in ways:  # grows while it is read
        for target in sorted(after.get(way[-1], ())):
            if target in graph.nodes and target not in seen:
                seen.add(target)
                ways.append([*way, target])
                yield target, ways[-1]
