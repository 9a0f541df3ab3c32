"""A graph as the rollout: each scenario becomes the graph's input.

Any object with ``ainvoke`` or ``invoke`` works: a compiled LangGraph, a chain, a `RemoteGraph`. A
graph returns no reward, so an evaluator must score the runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeGuard, cast

from langchain_art.errors import ConfigError


class Graph(Protocol):
    """The part of LangChain's ``Runnable`` that is used."""

    @property
    def ainvoke(self) -> Callable[..., Awaitable[Any]]:
        """Run it on an input, with a config."""
        ...


def is_graph(rollout: object) -> TypeGuard[Graph]:
    """True for an object with ``ainvoke`` or ``invoke``."""
    return callable(getattr(rollout, "ainvoke", None)) or callable(getattr(rollout, "invoke", None))


def check_inputs(rollout: object, scenarios: Iterable[Any]) -> None:
    """Raise ConfigError if `rollout` is a graph and a scenario is not an input for it.

    Called before the first run: in a run, the error would only count as a failed one.
    """
    if is_graph(rollout):
        for scenario in scenarios:
            graph_input(scenario)


def graph_input(scenario: Any) -> Any:
    """The graph's input for `scenario`.

    ===========================================  ==========================================
    scenario                                     input
    ===========================================  ==========================================
    a text                                       ``{"messages": [("user", text)]}``
    a list of messages (objects,                 ``{"messages": [...]}``
    ``{"role": …}``, ``("user", text)``)
    a mapping with ``messages``                  as it is
    a mapping with ``input``, an object with     that; a text or a list of messages in it as
    an attribute ``input``                       above
    any other mapping                            as it is
    ===========================================  ==========================================

    Raises:
        ConfigError: the scenario is none of these.
    """
    if isinstance(scenario, Mapping):
        state = cast("Mapping[str, Any]", scenario)
        found = state["input"] if "input" in state and "messages" not in state else state
    else:
        found = getattr(scenario, "input", scenario)
    if isinstance(found, str):
        return {"messages": [("user", found)]}
    if isinstance(found, list) and found and all(_is_message(m) for m in cast("list[Any]", found)):
        return {"messages": list(cast("list[Any]", found))}
    if isinstance(found, Mapping) or (found is not scenario and found is not None):
        return cast(Any, found)
    raise ConfigError(
        f"got a scenario {scenario!r:.200}, which is no input for a graph. Expected a text, a list "
        "of messages, a mapping (the graph's input), or an object with an attribute (or key) "
        "`input` that is one of these. Or pass a function of the scenario instead of the graph."
    )


def _is_message(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "role" in value or "type" in value
    if isinstance(value, tuple):
        pair = cast("tuple[Any, ...]", value)
        return len(pair) == 2 and isinstance(pair[0], str)
    return hasattr(value, "content")


def is_remote(rollout: object) -> bool:
    """True for a `RemoteGraph`: its model calls are made on another machine."""
    return is_graph(rollout) and hasattr(rollout, "assistant_id")


def as_function(graph: Graph) -> Callable[[Any, str, str], Any]:
    """A function of a scenario, its name and the run's id; async if the graph has ``ainvoke``."""

    def config(name: str, id: str) -> dict[str, Any]:
        # A remote graph, given a thread id, would keep that thread; without one, it removes its
        # own. Its `ChatART` tags its calls with these metadata.
        if is_remote(graph):
            return {"metadata": {"art_trajectory_id": id, "art_scenario": name}}
        return {"configurable": {"thread_id": id}}  # which a graph with a checkpointer needs

    async def run(scenario: Any, name: str, id: str) -> Any:
        return await graph.ainvoke(graph_input(scenario), config(name, id))

    def run_in_thread(scenario: Any, name: str, id: str) -> Any:
        return cast(Any, graph).invoke(graph_input(scenario), config(name, id))

    return run if callable(getattr(graph, "ainvoke", None)) else run_in_thread
