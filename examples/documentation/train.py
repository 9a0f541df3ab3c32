"""Train the documentation agent: ``python -m examples.documentation.train``.

The base model is a pretrained one, SmolLM2-135M-Instruct, and nothing of the fit is set: the rate,
the bound on a step and the sizes are the defaults of `Trainer` and `TrainConfig`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import typer

from examples.documentation.agent import build_agent
from examples.documentation.pages import Question, questions
from examples.support.command import train_command
from examples.support.demo import Fit, Setup, pretrained_demo
from langchain_art import ChatART, Run, capture

Rollout = Callable[[Question], Awaitable[Run]]


def progress(question: Question, state: Mapping[str, Any]) -> dict[str, float]:
    """How far a run came: each is 1 only if the one before it is.

    An answer that stands on another page by chance is none.
    """
    found = question.page in state["hits"]
    opened = state["opened"] == question.page
    answered = opened and state["answer"] == question.answer
    return {"found": float(found), "opened": float(opened), "answered": float(answered)}


def make_rollout(model: ChatART) -> Rollout:
    """The user's part: run the graph on a question, say how far it came, in thirds."""
    agent = build_agent(model)

    async def rollout(question: Question) -> Run:
        async with capture(scenario=question.id) as run:
            state = await agent.ainvoke({"does": question.does, "parameter": question.parameter})
            run.scores.update(progress(question, state))
            run.reward = sum(run.scores.values()) / 3
        return run

    return rollout


def build_fit(setup: Setup) -> Fit:
    """Questions in the order of the setup's seed; held-out ones are of other modules."""
    model = setup.chat()
    return Fit(
        trainer=setup.trainer([model]),
        rollout=make_rollout(model),
        train=questions("train", setup.seed),
        held_out=questions("test", setup.seed)[: setup.demo.held_out],
    )


DEMO = pretrained_demo(
    name="documentation",
    title="Documentation",
    policies=("documentation",),
    build=build_fit,
)

main = train_command(DEMO, "Train a pretrained model to search, open and answer.")

if __name__ == "__main__":
    typer.run(main)
