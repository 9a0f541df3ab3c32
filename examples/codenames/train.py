"""Train spymaster and guesser: ``python -m examples.codenames.train``.

Both learn from the same games and the same reward, the share of the team's cards that were found;
each has an adapter of its own, and learns on its own calls. `compare` trains a single adapter that
plays both, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import typer
from langchain_core.language_models import BaseChatModel

from examples.codenames.agent import build_agent
from examples.codenames.environment import LEVELS, Board, Game, boards, reward, role_figures
from examples.support.command import level_options, train_command
from examples.support.demo import Demo, Fit, Setup
from langchain_art import Run, capture

BASE_MODEL = Path(__file__).parent / "base_model"
ROLES = ("spymaster", "guesser")

Rollout = Callable[[Board], Awaitable[Run]]


def make_rollout(spymaster: BaseChatModel, guesser: BaseChatModel) -> Rollout:
    """The user's part: play one board, say how good the game was."""
    agent = build_agent(spymaster, guesser)

    async def rollout(board: Board) -> Run:
        async with capture(scenario=board.id) as run:
            state = await agent.ainvoke({"game": Game(board)})
            run.reward = reward(state["game"])
            run.scores.update(role_figures(state["game"]))
        return run

    return rollout


def build_fit(setup: Setup, level: int = 1) -> Fit:
    """Boards of the setup's seed, and the two roles: the first policy and the last one.

    With a single policy, it plays both.
    """
    models = [setup.chat(policy) for policy in setup.demo.policies]
    return Fit(
        trainer=setup.trainer(models),
        rollout=make_rollout(models[0], models[-1]),
        train=boards("train", setup.train_scenarios, setup.seed, level),
        held_out=boards("test", setup.demo.held_out, setup.seed, level),
    )


DEMO = Demo(
    name="codenames",
    title="Codenames",
    base_model=BASE_MODEL,
    policies=ROLES,
    build=build_fit,
    steps=20,
    max_tokens=24,
)


main = train_command(
    DEMO,
    "Train a spymaster and a guesser of Codenames, by what their team finds.",
    level_options(build_fit, LEVELS, "Size of the boards; 3 is the game's own"),
)


if __name__ == "__main__":
    typer.run(main)
