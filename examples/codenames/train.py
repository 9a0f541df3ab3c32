"""Train spymaster and guesser: ``python -m examples.codenames.train``.

Both learn from the same games and the same reward, the share of the team's cards that were found;
each has an adapter of its own, and learns on its own calls. With ``--one-adapter`` a single one
plays both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.language_models import BaseChatModel

from examples.codenames.agent import build_agent
from examples.codenames.environment import LEVELS, Board, Game, boards, reward, role_figures
from examples.support import command
from examples.support.demo import Demo, Fit, Setup, control_words, folder_of, run
from langchain_art import FitResult, Run, capture

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
    """Boards of the setup's seed, and the two roles: the first policy and the last one."""
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
    max_tokens=24,
)


def _tokens(result: FitResult, _: object) -> dict[str, Any]:
    trained = [record.tokens.get("trained", 0) for record in result.history]
    return {"tokens_trained": sum(trained)}


def main(
    seed: command.Seed = 0,
    steps: command.Steps = DEMO.steps,
    control: command.Control = False,
    one_adapter: Annotated[
        bool, typer.Option(help="A single adapter plays both roles, and learns on all calls")
    ] = False,
    level: Annotated[
        int, typer.Option(min=1, max=max(LEVELS), help="Size of the boards; 3 is the game's own")
    ] = 1,
    out: command.Out = None,
    base_url: command.BaseUrl = None,
    fresh: command.Fresh = False,
    learning_rate: command.LearningRate = DEMO.learning_rate,
    max_tokens: command.MaxTokens = DEMO.max_tokens,
) -> None:
    """Train a spymaster and a guesser of Codenames, by what their team finds.

    Stopped (Ctrl-C) and run again, it goes on; finished and run again, it shows its result.
    """
    words = ["one"] if one_adapter else []
    words += [f"level{level}"] if level > 1 else []
    run(
        replace(
            DEMO,
            policies=("player",) if one_adapter else ROLES,
            build=partial(build_fit, level=level),
            learning_rate=learning_rate,
            max_tokens=max_tokens,
        ),
        out=out or folder_of(DEMO, seed, *control_words(control), *words),
        steps=steps,
        seed=seed,
        control=control,
        base_url=base_url,
        fresh=fresh,
        note=", one adapter" if one_adapter else "",
        more=_tokens,
    )


if __name__ == "__main__":
    typer.run(main)
