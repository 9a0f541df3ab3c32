"""The rollout worker of `Forks`: a run, then its continuations from checkpoints in its middle."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from langchain_core.runnables import RunnableConfig

from langchain_art.errors import ConfigError
from langchain_art.rollout.fork_points import (
    Compiled,
    ForkPoint,
    check_goes_on,
    check_graph,
    fork_points,
    unsafe,
)
from langchain_art.rollout.forks import FORK, ForkOf, Forks
from langchain_art.rollout.graph_rollout import graph_input
from langchain_art.rollout.runner import Rollout, RolloutWorker, StopsAll
from langchain_art.wire import Trajectory

if TYPE_CHECKING:
    from langchain_art.tracing.run import Run


class ForkWorker(RolloutWorker):
    """As `RolloutWorker`, of a graph whose runs are branched; a run is followed by its branches.

    The continuations of a run go one after the other: two at once on one thread would see each
    other's checkpoints in a subgraph with a memory of its own.

    Raises:
        ConfigError: the graph cannot be continued so (`fork_points.check_graph`).
    """

    def __init__(self, rollout: Rollout, concurrency: int, *, forks: Forks, **options: Any) -> None:
        check_graph(forks, rollout)
        super().__init__(rollout, concurrency, **options)
        self.forks = forks
        self.runs_each = forks.runs
        self._graph = cast("Compiled", rollout)
        self._unsafe = unsafe(forks, self._graph)

    async def run(self, scenario: Any, name: str) -> list[Trajectory]:
        """One run of one scenario and its continuations; those of a failed run are none.

        Raises:
            ConfigError: the run was interrupted, or a continuation would run a node that may not
                be run again.
        """
        trunk, recorded = await self.attempt(name, partial(self.outcome, scenario, name))
        if trunk.status == "failed":
            return [trunk]
        config: RunnableConfig = {"configurable": {"thread_id": recorded.id}}
        if trunk.status == "interrupted":
            await self._refuse(config)
        history = [one async for one in self._graph.aget_state_history(config)]
        calls = recorded.recorder.outermost_nodes()
        points = fork_points(self.forks, trunk.id, recorded.rng, history, calls)
        found = [trunk]
        for point in points:
            about = ForkOf(of=trunk.id, node=point.node, turns=point.turns)
            for _ in range(self.forks.continuations):
                branch, _ = await self.attempt(name, partial(self._go_on, scenario, point, about))
                known = branch.metadata | {FORK: about.model_dump()}  # of one that failed, too
                found.append(branch.model_copy(update={"metadata": known}))
        return found

    async def _go_on(self, scenario: Any, point: ForkPoint, about: ForkOf, run: Run) -> Run:
        """A continuation, in the scope of `run`."""
        run.input, run.metadata[FORK] = graph_input(scenario), about.model_dump()
        config = cast(RunnableConfig, point.config)
        run.output = await self._graph.ainvoke(None, config, interrupt_before=self._unsafe)
        if run.status == "interrupted":
            await self._refuse({"configurable": {"thread_id": about.of}})
        return run

    async def _refuse(self, config: RunnableConfig) -> None:
        """Raise that the newest run of a thread has stopped in its middle."""
        state = await self._graph.aget_state(config)
        try:
            check_goes_on(self.forks, state.next, bool(state.interrupts))
        except ConfigError as error:
            raise StopsAll(str(error)) from error
