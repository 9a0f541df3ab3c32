"""Train the documentation agent: ``python -m examples.documentation.train``.

The base model is a pretrained one, SmolLM2-135M-Instruct, and nothing of the fit is set: the rate,
the bound on a step and the sizes are the defaults of `Trainer` and `TrainConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import typer
from langchain_core.messages import AIMessage, BaseMessage

from examples.documentation.agent import ask_answer, ask_open, ask_search, build_agent
from examples.documentation.pages import Index, Question, questions, words
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


def make_rollout(model: ChatART, shots: Sequence[BaseMessage] = ()) -> Rollout:
    """The user's part: run the graph on a question, say how far it came, in thirds."""
    agent = build_agent(model, shots)

    async def rollout(question: Question) -> Run:
        async with capture(scenario=question.id) as run:
            state = await agent.ainvoke({"does": question.does, "parameter": question.parameter})
            run.scores.update(progress(question, state))
            run.reward = sum(run.scores.values()) / 3
        return run

    return rollout


def solved(question: Question) -> list[BaseMessage]:
    """A question with the choices that find its answer; empty if no word of it finds the page."""
    index = Index()
    counts = index.counts(words(question.does))
    for word in counts:
        hits = index.search(word)
        if question.page in [page.name for page in hits]:
            asked = (
                ask_search(question.does, question.parameter, counts),
                ask_open(hits),
                ask_answer(question.page, question.parameter),
            )
            chosen = {"search": word}, {"open": question.page}, {"answer": question.answer}
            replies = [AIMessage(json.dumps(one)) for one in chosen]
            return [message for pair in zip(asked, replies, strict=True) for message in pair]
    return []


def build_fit(setup: Setup) -> Fit:
    """Questions in the order of the setup's seed; held-out ones are of other modules."""
    model, train = setup.chat(), questions("train", setup.seed)
    return Fit(
        trainer=setup.trainer([model]),
        rollout=make_rollout(model, setup.shots(train)),
        train=train,
        held_out=questions("test", setup.seed)[: setup.demo.held_out],
    )


DEMO = pretrained_demo(
    name="documentation",
    title="Documentation",
    policies=("documentation",),
    build=build_fit,
    solved=solved,
)

main = train_command(DEMO, "Train a pretrained model to search, open and answer.")

if __name__ == "__main__":
    typer.run(main)
