"""The loop that `Trainer` runs, written out on `AsyncArtClient`: for a loop of your own.

``langchain-art serve BASE`` in one terminal, ``python -m examples.loop`` in another. Left to
`Trainer` are resuming after a crash, seeds, going back after a collapse, trackers and workers.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import typer
from langgraph.graph.state import CompiledStateGraph

from examples.triage.agent import build_agent
from examples.triage.tickets import Ticket, tickets
from langchain_art import AsyncArtClient, ChatART, TrainConfig, Trajectory, TrajectoryGroup, capture

POLICY = "loop"


async def run(agent: CompiledStateGraph, ticket: Ticket) -> Trajectory:
    """One rollout: the graph as it is, its calls captured, its outcome scored."""
    async with capture(scenario=ticket.id) as captured:
        state = await agent.ainvoke({"message": ticket.message})
        captured.reward = float(state.get("department") == ticket.department)
    return captured.trajectory()


async def evaluate(agent: CompiledStateGraph, held_out: Sequence[Ticket]) -> float:
    """Mean reward of one run of each."""
    runs = await asyncio.gather(*(run(agent, ticket) for ticket in held_out))
    return statistics.fmean(one.reward or 0.0 for one in runs)


async def train(steps: int, scenarios: int, runs: int, held_out: int) -> None:
    """Each step: gather groups of runs, order a step of them, wait for the new version."""
    some = tickets("train", steps * scenarios)
    unseen = tickets("test", held_out)
    async with AsyncArtClient() as client:
        await client.create_policy(POLICY)
        agent = build_agent(ChatART(model=POLICY, max_tokens=48))  # always the newest version
        print(f"held out before: {await evaluate(agent, unseen):.3f}")
        for step in range(steps):
            batch = some[step * scenarios : (step + 1) * scenarios]
            gathered = await asyncio.gather(
                *(run(agent, ticket) for ticket in batch for _ in range(runs))
            )
            groups = [
                TrajectoryGroup(id=ticket.id, trajectories=tuple(gathered[n * runs :][:runs]))
                for n, ticket in enumerate(batch)
            ]
            job = await client.train(groups, POLICY, TrainConfig())
            result = await client.wait(job)
            reward = statistics.fmean(one.reward or 0.0 for one in gathered)
            print(f"step {step + 1}: reward {reward:.3f}, {POLICY}@{result.version}")
            if result.excluded:
                print(f"  not trained: {result.excluded}")
        print(f"held out after: {await evaluate(agent, unseen):.3f}")


def main(steps: int = 20, scenarios: int = 4, runs: int = 8, held_out: int = 48) -> None:
    """Train the triage agent by a loop written out."""
    asyncio.run(train(steps, scenarios, runs, held_out))


if __name__ == "__main__":
    typer.run(main)
