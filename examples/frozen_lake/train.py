"""Train the agent on TextArena's Frozen Lake: ``python -m examples.frozen_lake.train``.

The base model is a pretrained one, SmolLM2-135M-Instruct, and nothing of the fit is set: the rate,
the bound on a step and the sizes are the defaults of `Trainer` and `TrainConfig`. A run is a walk
of up to eight calls of the model, and has one reward, that of the environment.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence

import typer
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from examples.frozen_lake.agent import build_agent
from examples.frozen_lake.environment import Lake, Walk, lakes
from examples.support.command import train_command
from examples.support.demo import Fit, Setup, pretrained_demo
from langchain_art import ChatART, Run, capture

Rollout = Callable[[Lake], Awaitable[Run]]


def make_rollout(model: ChatART, shots: Sequence[BaseMessage] = ()) -> Rollout:
    """The user's part: walk over a lake, and pass on the environment's reward."""
    agent = build_agent(model, shots)

    async def rollout(lake: Lake) -> Run:
        walk = Walk(lake.seed)
        async with capture(scenario=lake.id) as run:
            await agent.ainvoke({"walk": walk})
            run.reward = walk.reward
            run.scores["reached"] = float(walk.reward == 1)
        return run

    return rollout


def solved(lake: Lake) -> list[BaseMessage]:
    """Each board of a shortest way over a lake, with the right move."""
    walk, messages = Walk(lake.seed), list[BaseMessage]()
    for move in walk.way:
        messages += [HumanMessage(walk.view), AIMessage(json.dumps({"move": move}))]
        walk.go(move)
    return messages


def build_fit(setup: Setup) -> Fit:
    """Lakes of the setup's seed."""
    model, train = setup.chat(), lakes("train", setup.train_scenarios, setup.seed)
    return Fit(
        trainer=setup.trainer([model]),
        rollout=make_rollout(model, setup.shots(train)),
        train=train,
        held_out=lakes("test", setup.demo.held_out, setup.seed),
    )


DEMO = pretrained_demo(
    name="frozen-lake",
    title="Frozen Lake",
    policies=("frozen-lake",),
    build=build_fit,
    solved=solved,
    steps=30,
)

main = train_command(DEMO, "Train a pretrained model on an environment of TextArena.")

if __name__ == "__main__":
    typer.run(main)
