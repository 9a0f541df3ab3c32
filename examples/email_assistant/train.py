"""Train the e-mail assistant: ``langchain-art demo email-assistant``.

Training runs are scored by weighted criteria (`criteria`): the right answer counts most, then the
tools that the question calls for, then few calls. With ``--judge openai/o3``, RULER's judgement by
that model counts as much as they do. Held-out runs are scored by their answers alone: their mean is
the success rate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.email_assistant.agent import build_agent
from examples.email_assistant.mailbox import Mailbox, Scenario, is_right, scenarios
from examples.support.answer_tool import answered
from examples.support.command import Given, train_command
from examples.support.demo import Demo, Fit, Setup
from langchain_art import ChatART, Run, capture
from langchain_art.evaluators import (
    GroupEvaluator,
    RulerEvaluator,
    SumEvaluator,
    WeightedCriteriaEvaluator,
)

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "email-assistant"
WEIGHTS = {"accuracy": 0.8, "completeness": 0.1, "efficiency": 0.1}

Rollout = Callable[[Scenario], Awaitable[Run]]


def criteria() -> WeightedCriteriaEvaluator:
    """Weighted criteria; a scenario says what is right, which tools it needs, and how few calls."""
    return WeightedCriteriaEvaluator(weights=WEIGHTS)


def make_rollout(model: ChatART, *, judged: bool) -> Rollout:
    """Run the agent on a scenario. `judged` training runs get no reward of their own."""
    agent = build_agent(model)

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario.id) as run:
            question = {"messages": [("user", scenario.question)]}
            state = await agent.ainvoke(question, context=Mailbox(scenario.mails))
            right = float(is_right(scenario, answered(state)))
            run.scores[f"success, {scenario.kind}"] = right
            if not judged or scenario.split == "test":
                run.reward = right
        return run

    return rollout


def build_fit(setup: Setup) -> Fit:
    """Scenarios of the setup's seed, and the agent that is asked."""
    model = setup.chat()
    return Fit(
        trainer=setup.trainer([model], config=setup.config(optimizer_steps=2)),
        rollout=make_rollout(model, judged=isinstance(setup.evaluator, GroupEvaluator)),
        train=list(scenarios("train", setup.train_scenarios, setup.seed)),
        held_out=list(scenarios("test", setup.demo.held_out, setup.seed)),
    )


DEMO = Demo(
    name="email-assistant",
    title="E-mail assistant",
    base_model=BASE_MODEL,
    policies=(POLICY,),
    build=build_fit,
    steps=60,
    files=("judge.sqlite3",),
)


def options(
    given: Given,
    judge: Annotated[
        str | None,
        typer.Option(help="RULER's, as litellm names it: counts as much as the criteria"),
    ] = None,
) -> dict[str, Any]:
    """What scores training runs."""
    if given.control and judge:
        raise typer.BadParameter("--control shuffles the rewards: no --judge")
    out = given.folder(*(["ruler"] if judge else []))

    def evaluator() -> GroupEvaluator:
        if judge is None:
            return criteria()
        ruler = RulerEvaluator(judge, context=None, cache=out / "judge.sqlite3")
        return SumEvaluator([(criteria(), 0.5), (ruler, 0.5)])

    note = f" (criteria and RULER: {judge})" if judge else ""
    return {"out": out, "evaluator": evaluator, "note": note}


main = train_command(
    DEMO,
    "Train a small model to search, filter, sort and select in an inbox, and to answer.",
    options,
)


if __name__ == "__main__":
    typer.run(main)
