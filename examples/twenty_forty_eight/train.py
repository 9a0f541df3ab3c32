"""Train the 2048 agent: ``python -m examples.twenty_forty_eight.train``.

A run is a whole game, of some twenty calls of the model; its reward is the highest tile. Held-out
games have tiles of other seeds, and are played by one who moves at random, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import typer

from examples.support.command import train_command
from examples.support.demo import Demo, Fit, Setup
from examples.twenty_forty_eight.agent import build_agent
from examples.twenty_forty_eight.environment import (
    TARGET,
    Game,
    Scenario,
    games,
    random_game,
    reward,
)
from langchain_art import ChatART, Run, capture

Rollout = Callable[[Scenario], Awaitable[Run]]


def make_rollout(model: ChatART) -> Rollout:
    """The user's part: play one game, say what is good."""
    agent = build_agent(model)

    async def rollout(scenario: Scenario) -> Run:
        game = Game(scenario.id)
        async with capture(scenario=scenario.id) as run:
            await agent.ainvoke({"game": game})
            run.reward = reward(game)
            chance = random_game(scenario.id).highest
            run.scores = {
                "highest_tile": float(game.highest),
                f"reached_{TARGET}": float(game.highest >= TARGET),
                "won_against_random": (1 + (game.highest > chance) - (game.highest < chance)) / 2,
                "moves_without_effect": game.illegal / game.made,
            }
        return run

    return rollout


def build_fit(setup: Setup) -> Fit:
    """Games of the setup's seed."""
    model = setup.chat()
    return Fit(
        trainer=setup.trainer([model]),
        rollout=make_rollout(model),
        train=games("train", setup.train_scenarios, setup.seed),
        held_out=games("test", setup.demo.held_out, setup.seed),
    )


DEMO = Demo(
    name="twenty-forty-eight",
    title="2048",
    base_model=Path(__file__).parent / "base_model",
    policies=("2048",),
    build=build_fit,
    steps=20,
    groups_per_step=8,
    max_tokens=4,
)

main = train_command(DEMO, "Train a small model to play 2048 on a board of three by three.")

if __name__ == "__main__":
    typer.run(main)
