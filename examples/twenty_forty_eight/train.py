"""Train the 2048 agent: ``python -m examples.twenty_forty_eight.train``.

A run is a whole game, of some eleven calls of the model. In training games each move is rewarded by
the tiles that it makes: the reward of a whole game says too little of its single moves. In held-out
games the reward is the highest tile; their tiles are of other seeds, and one who moves at random
plays them, too.
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
    move_rewards,
    random_game,
    reward,
)
from langchain_art import ChatART, Run, TurnCredit, capture

#: By how much a later move's reward counts for a move, for each move in between.
DISCOUNT = 0.5

Rollout = Callable[[Scenario], Awaitable[Run]]


def make_rollout(model: ChatART) -> Rollout:
    """The user's part: play one game, say what is good."""
    agent = build_agent(model)

    async def rollout(scenario: Scenario) -> Run:
        game = Game(scenario.id)
        async with capture(scenario=scenario.id) as run:
            await agent.ainvoke({"game": game})
            if scenario.split == "train":
                for turn, worth in zip(run.turns, move_rewards(game), strict=True):
                    run.reward_turn(turn, worth)
            else:
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
    config = setup.config(credit=TurnCredit(discount=DISCOUNT), optimizer_steps=4)
    return Fit(
        trainer=setup.trainer([model], config=config),
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
    steps=12,
    groups_per_step=8,
    max_tokens=4,
)

main = train_command(DEMO, "Train a small model to play 2048 on a board of three by three.")

if __name__ == "__main__":
    typer.run(main)
