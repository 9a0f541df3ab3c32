"""Train the tic-tac-toe agent by self-play: ``python -m examples.tic_tac_toe.train``.

In training games the policy plays both sides, and each side is rewarded by itself (credit by node):
the calls of X are compared with those of X in the other games from the same position. Every fourth
game is played against an older version of the policy that the server still has, whose calls do not
learn. In held-out games the opponent is a perfect player, whom training never meets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import typer

from examples.support.command import train_command
from examples.support.demo import Demo, Fit, Setup
from examples.tic_tac_toe.agent import Match, build_agent, points
from examples.tic_tac_toe.environment import Scenario, held_out_games, training_games
from langchain_art import ArtError, AsyncArtClient, ChatART, Run, capture

Rollout = Callable[[Scenario], Awaitable[Run]]


async def older_version(model: ChatART, scenario: Scenario) -> ChatART:
    """The chat model of a version that the server still has, drawn for the scenario."""
    policy = model.model_name
    async with AsyncArtClient(model.openai_api_base) as client:
        versions = sorted(one.version for one in await client.checkpoints(policy))
    chosen = random.Random(scenario.id).choice(versions[:-1] or versions)
    return model.model_copy(update={"model_name": f"{policy}@{chosen}"})


def make_rollout(model: ChatART) -> Rollout:
    """The user's part: play one game, say what it was worth to whom."""
    agent = build_agent(model)
    older: dict[str, asyncio.Task[ChatART]] = {}  # all games of a scenario have the same opponent

    async def match_of(scenario: Scenario) -> Match:
        if scenario.opponent != "older":
            return Match(scenario.learner, scenario.opponent, seed=scenario.id)
        if scenario.id not in older:
            older[scenario.id] = asyncio.create_task(older_version(model, scenario))
        try:
            return Match(scenario.learner, "older", await older[scenario.id])
        except ArtError:  # this run is repeated when the server is back, and asks anew
            older.pop(scenario.id, None)
            raise

    async def rollout(scenario: Scenario) -> Run:
        match = await match_of(scenario)
        async with capture(scenario=scenario.id) as run:
            state = await agent.ainvoke({"board": scenario.board}, context=match)
            worth = points(state)
            if scenario.opponent == "perfect":  # held out: nobody wins against it
                held = worth[scenario.learner] >= 0.5
                run.reward = float(held)
                run.scores = {"draws": float(held), "losses": float(not held)}
                run.scores["losses_by_illegal_move"] = float("illegal" in state)
            else:
                nodes = {turn.node for turn in run.turns}
                for mark, value in worth.items():
                    if mark.lower() in nodes:
                        run.reward_node(mark.lower(), value)
        return run

    return rollout


def build_fit(setup: Setup) -> Fit:
    """Training games of the setup's seed, and games against the perfect player."""
    model = setup.chat()
    config = setup.config(credit="node", optimizer_steps=2)
    return Fit(
        trainer=setup.trainer([model], config=config, trainable={"older": False}),
        rollout=make_rollout(model),
        train=training_games(setup.train_scenarios, setup.seed),
        held_out=held_out_games(setup.demo.held_out, setup.seed),
    )


DEMO = Demo(
    name="tic-tac-toe",
    title="Tic-tac-toe",
    base_model=Path(__file__).parent / "base_model",
    policies=("tic-tac-toe",),
    build=build_fit,
    steps=30,
    max_tokens=4,
)

main = train_command(DEMO, "Train a small model to play tic-tac-toe, by playing itself.")

if __name__ == "__main__":
    typer.run(main)
