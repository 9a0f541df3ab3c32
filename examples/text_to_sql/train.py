"""Train the text-to-SQL agent: ``python -m examples.text_to_sql.train``.

The run's reward says whether its last query is right. Beside it, each node's calls are judged by
what the node is there for: writer and rewriter by whether the query is right, the checker by
whether its verdict is. With ``credit="node"`` a node's calls are compared by both together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import typer

from examples.support.command import train_command
from examples.support.demo import Demo, Fit, Setup
from examples.text_to_sql.agent import State, build_agent
from examples.text_to_sql.environment import Databases, Scenario, reward
from langchain_art import ChatART, Run, capture

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "sql-agent"


def make_rollout(model: ChatART, databases: Databases) -> Callable[[Scenario], Awaitable[Run]]:
    """The user's part: run the graph on one scenario, say what is good."""
    agent = build_agent(model)

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario.id) as run:
            asked: State = {"schema": scenario.schema, "question": scenario.question}
            state = await agent.ainvoke(asked, context=databases.of(scenario))
            right = [databases.right(scenario, query) for query in state["queries"]]
            run.reward = reward(scenario, databases, state["queries"])
            run.scores |= figures(right, state.get("approved", []))
            if scenario.split == "train":
                reward_nodes(run, right, state.get("approved", []))
        return run

    return rollout


def reward_nodes(run: Run, right: Sequence[bool], approved: Sequence[bool]) -> None:
    """Reward each node's calls, by the share of them that were right.

    Args:
        run: whose calls they are.
        right: of each query whether it was right; the first is the writer's.
        approved: of each verdict whether it was that the query is right.
    """
    judged = [verdict == truth for verdict, truth in zip(approved, right, strict=False)]
    for node, values in (("write", right[:1]), ("rewrite", right[1:]), ("check", judged)):
        turns = [turn for turn in run.turns if turn.node == node]
        for turn, value in zip(turns, values, strict=True):
            # A share: the sum over a node's calls must not grow with their number.
            run.reward_turn(turn, value / len(turns))


def figures(right: Sequence[bool], approved: Sequence[bool]) -> dict[str, float]:
    """What the nodes did in one run; a figure is there only where it applies.

    Args:
        right: of each query whether it was right, in their order.
        approved: of each verdict whether it was that the query is right.
    """
    found = {"first query right": float(right[0])}
    if not right[0]:
        found["wrong first query mended"] = float(right[-1])
    if approved and not approved[0]:
        found["checker's precision"] = float(not right[0])
    if approved and not right[0]:
        found["checker's recall"] = float(not approved[0])
    return found


def build_fit(setup: Setup) -> Fit:
    """Questions of the setup's seed, each about a database of its own."""
    databases, model = Databases(setup.out / "databases"), setup.chat()
    scenarios = databases.build(setup.train_scenarios, setup.demo.held_out, setup.seed)
    return Fit(
        trainer=setup.trainer([model], config=setup.config(credit="node")),
        rollout=make_rollout(model, databases),
        train=scenarios["train"],
        held_out=scenarios["test"],
    )


DEMO = Demo(
    name="text-to-sql",
    title="Text-to-SQL with a checker",
    base_model=BASE_MODEL,
    policies=(POLICY,),
    build=build_fit,
    files=("databases",),
)

main = train_command(DEMO, "Train a small model to write, check and rewrite SQL.")

if __name__ == "__main__":
    typer.run(main)
