"""A graph as the rollout: each scenario becomes the graph's input.

Any object with ``ainvoke`` or ``invoke`` works: a compiled LangGraph, a chain, a `RemoteGraph`. A
graph returns no reward, so an evaluator must score the runs.

Callbacks do not reach a graph on another machine. Its `ChatART` tags its calls with the run id from
the run's config, so the server has the turns: they are fetched for the evaluator and scored there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

from langchain_art.errors import ConfigError, NotFound
from langchain_art.wire import NOT_HEARD, Reward, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from langchain_art.client.async_client import AsyncArtClient


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
        inner = "input" in scenario and "messages" not in scenario
        found = scenario["input"] if inner else scenario
    else:
        found = getattr(scenario, "input", scenario)
    if isinstance(found, str):
        return {"messages": [("user", found)]}
    if isinstance(found, list) and found and all(map(_is_message, found)):
        return {"messages": list(found)}
    if isinstance(found, Mapping) or (found is not scenario and found is not None):
        return found
    raise ConfigError(
        f"got a scenario {scenario!r:.200}, which is no input for a graph. Expected a text, a list "
        "of messages, a mapping (the graph's input), or an object with an attribute (or key) "
        "`input` that is one of these. Or pass a function of the scenario instead of the graph."
    )


def _is_message(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "role" in value or "type" in value
    if isinstance(value, tuple):
        return len(value) == 2 and isinstance(value[0], str)
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


_AT_ONCE = 16


async def fetch_remote(
    client: AsyncArtClient, groups: Sequence[TrajectoryGroup]
) -> list[TrajectoryGroup]:
    """A `RemoteGraph`'s groups with the turns that the server has; a ConfigError if it has none."""
    known = await _put(client, groups)
    runs = [run for group in groups for run in group.trajectories if run.status != "failed"]
    if runs and not any(run.id in known for run in runs):
        raise ConfigError(
            f"No model call of {len(runs)} runs of the remote graph bears its run's id. Let its "
            "nodes call a ChatART of this server; a graph that does not hand its config on (a "
            "thread without a context, say) must be run by a function instead."
        )

    def whole(run: Trajectory) -> Trajectory:
        turns = known.get(run.id, run).turns
        return run.model_copy(update={"turns": turns, "metadata": _heard(run.metadata)})

    return [
        group.model_copy(update={"trajectories": tuple(map(whole, group.trajectories))})
        for group in groups
    ]


async def score_remote(
    client: AsyncArtClient, groups: Sequence[TrajectoryGroup]
) -> list[list[str]]:
    """Send rewards; returns the ids of the runs that the server has, group by group."""
    known = await _put(client, groups)
    ids = [[run.id for run in group.trajectories if run.id in known] for group in groups]
    return [group for group in ids if group]


async def _put(client: AsyncArtClient, groups: Sequence[TrajectoryGroup]) -> dict[str, Trajectory]:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def put(run: Trajectory) -> Trajectory | None:
        scored = Reward(
            reward=run.reward,
            turns={t.call_id: t.reward for t in run.turns if t.call_id and t.reward is not None},
            scores=run.scores,
            metadata=_heard(run.metadata),
            scenario=run.scenario,
            status=run.status,
        )
        async with slots:
            try:
                return await client.reward(run.id, scored)
            except NotFound:  # the run made no call
                return None

    found = await asyncio.gather(*(put(run) for group in groups for run in group.trajectories))
    return {run.id: run for run in found if run is not None}


def _heard(metadata: dict[str, Any]) -> dict[str, Any]:
    """A run's metadata without the note on unrecorded calls, since the server recorded them."""
    return {key: value for key, value in metadata.items() if key != NOT_HEARD}
