"""Train the function caller: ``python -m examples.function_calling.train``.

The base model is a pretrained one, SmolLM2-135M-Instruct, and nothing of the fit is set. Its own
chat template shows no tools; the server puts a built-in text before it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import typer
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from examples.function_calling.agent import build_agent
from examples.function_calling.leaderboard import Question, grade, questions, solved
from examples.support.command import train_command
from examples.support.demo import Fit, Setup, pretrained_demo
from langchain_art import Run, capture

Rollout = Callable[[Question], Awaitable[Run]]


def make_rollout(model: BaseChatModel, shots: Sequence[BaseMessage] = ()) -> Rollout:
    """The user's part: run the graph on a question, grade what it called."""
    agent = build_agent(model, shots)

    async def rollout(question: Question) -> Run:
        async with capture(scenario=question.id) as run:
            asked = {"request": question.request, "functions": question.tools}
            found = grade(question, (await agent.ainvoke(asked))["calls"])
            run.reward = found.reward
            run.scores["correct"] = float(found.correct)
        return run

    return rollout


def build_fit(setup: Setup) -> Fit:
    """All questions to learn from, and some of the others, drawn by the setup's seed."""
    model, drawn = setup.chat(), random.Random(setup.seed)
    train, rest = questions("train"), questions("held out")
    drawn.shuffle(train)
    return Fit(
        trainer=setup.trainer([model]),
        rollout=make_rollout(model, setup.shots(train)),
        train=train,
        held_out=drawn.sample(rest, min(setup.demo.held_out, len(rest))),
    )


DEMO = pretrained_demo(
    name="function-calling",
    title="Function calling",
    policies=("caller",),
    build=build_fit,
    max_tokens=80,
    serve_options=("--chat-template", "tools"),
    solved=solved,
)

main = train_command(DEMO, "Train a pretrained model to call the functions of a benchmark.")

if __name__ == "__main__":
    typer.run(main)
