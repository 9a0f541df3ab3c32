"""Train the detective: ``python -m examples.temporal_clue.train``.

A run is one answer to four questions, and its reward is the share that is right.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import typer
from langchain_core.language_models import BaseChatModel

from examples.support.command import level_options, train_command
from examples.support.demo import Demo, Fit, Setup
from examples.temporal_clue.agent import build_agent
from examples.temporal_clue.environment import LEVELS, Puzzle, puzzles, reward, right_answers
from langchain_art import Run, capture

BASE_MODEL = Path(__file__).parent / "base_model"

Rollout = Callable[[Puzzle], Awaitable[Run]]


def make_rollout(model: BaseChatModel) -> Rollout:
    """The user's part: ask about one puzzle, say how much of the answer is right."""
    agent = build_agent(model)

    async def rollout(puzzle: Puzzle) -> Run:
        async with capture(scenario=puzzle.id) as run:
            said = (await agent.ainvoke({"case": puzzle.text}))["answer"]
            run.reward = reward(puzzle, said)
            right = right_answers(puzzle, said)
            run.scores.update({name: float(is_right) for name, is_right in right.items()})
            run.scores["all_right"] = float(all(right.values()))
        return run

    return rollout


def build_fit(setup: Setup, level: int = 1) -> Fit:
    """Puzzles of the setup's seed, and the detective."""
    model = setup.chat()
    return Fit(
        trainer=setup.trainer([model], config=setup.config(optimizer_steps=2)),
        rollout=make_rollout(model),
        train=puzzles("train", setup.train_scenarios, setup.seed, level),
        held_out=puzzles("test", setup.demo.held_out, setup.seed, level),
    )


DEMO = Demo(
    name="temporal-clue",
    title="Temporal Clue",
    base_model=BASE_MODEL,
    policies=("detective",),
    build=build_fit,
    steps=40,
)


main = train_command(
    DEMO,
    "Train a detective to answer who it was, where, when and with what, by the share it got right.",
    level_options(build_fit, LEVELS, "1: told outright; 4: to be deduced"),
)


if __name__ == "__main__":
    typer.run(main)
