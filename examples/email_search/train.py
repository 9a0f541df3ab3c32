"""Train the e-mail agent: ``python -m examples.email_search.train`` (what ``make demo`` runs).

It starts a server on this machine (or uses ``--base-url``), runs the agent on training questions,
rewards right answers, trains, evaluates on held-out questions before and after, and stops.

With ``--reward ruler`` nobody says which answers to training questions are right: RULER compares
the runs of each question, and its scores are the only reward. Held-out questions are scored by
their answers all the same, which the judge never sees.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.email_search.agent import build_agent, reward
from examples.email_search.inbox import MailStore, Scenario, build
from examples.email_search.scripted_judge import ScriptedJudge
from examples.support.command import Given, train_command
from examples.support.demo import Demo, Fit, Setup
from langchain_art import ArtClient, ChatART, FitResult, LRSchedule, RulerEvaluator, Run, capture

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "email-agent"
HELD_OUT = 200
MAX_TOKENS = 48

Rollout = Callable[[Scenario], Awaitable[Run]]


class Reward(StrEnum):
    """What says how good a training run was: the right answer, or a judge that does not know it."""

    ANSWER = "answer"
    RULER = "ruler"


def make_rollout(model: ChatART, mails: MailStore, *, judged: bool = False) -> Rollout:
    """The user's part: run the graph on one scenario, say what is good.

    Of training runs that are `judged` it does not say it: they have no reward of their own.
    """
    agent = build_agent(model)

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario.id) as run:
            question = {"messages": [("user", scenario.question)]}
            state = await agent.ainvoke(question, context=mails.inbox(scenario.inbox))
            if not judged or scenario.split == "test":
                run.reward = reward(scenario, state)
        return run

    return rollout


def ruler(judge: str, cache: Path | None = None) -> RulerEvaluator:
    """The judge of training runs: ``scripted``, or a model as litellm names it (``openai/o3``).

    It is told nothing of the scenario, which holds the right answer: it sees what the runs saw.
    """
    model = ScriptedJudge() if judge == "scripted" else judge
    return RulerEvaluator(model, context=None, cache=cache)


def build_fit(setup: Setup) -> Fit:
    """Questions of the setup's seed, each about its own inbox, and the agent that is asked.

    Little of Adam's momentum, a bound on each step, and so a higher rate and smaller steps: the
    other examples have the settings of `Setup.config` (docs/benchmarks.md compares them).
    """
    database = build(
        setup.out / "mails.sqlite3",
        n_train=setup.train_scenarios,
        n_test=setup.demo.held_out,
        seed=setup.seed,
    )
    mails, model = MailStore(database), setup.chat()
    schedule = LRSchedule(warmup_steps=2, decay_steps=max(setup.steps, 3))
    config = setup.config(momentum=0.6, max_kl=0.02, schedule=schedule)
    return Fit(
        trainer=setup.trainer([model], config=config),
        rollout=make_rollout(model, mails, judged=isinstance(setup.evaluator, RulerEvaluator)),
        train=mails.scenarios("train"),
        held_out=mails.scenarios("test"),
        close=mails.close,
    )


DEMO = Demo(
    name="email-search",
    title="E-mail agent",
    base_model=BASE_MODEL,
    policies=(POLICY,),
    build=build_fit,
    steps=32,
    groups_per_step=8,
    held_out=HELD_OUT,
    learning_rate=4e-3,
    max_tokens=MAX_TOKENS,
    files=("mails.sqlite3", "judge.sqlite3"),
    folder="demo",
)


def options(
    given: Given,
    by: Annotated[
        Reward, typer.Option("--reward", help="What scores training runs")
    ] = Reward.ANSWER,
    judge: Annotated[
        str | None, typer.Option(help="Of --reward ruler: scripted, or as litellm names a model")
    ] = None,
) -> dict[str, Any]:
    """What scores training runs."""
    if given.control and by is Reward.RULER:
        raise typer.BadParameter("--control shuffles the rewards of answers: no --reward ruler")
    if judge is not None and by is not Reward.RULER:
        raise typer.BadParameter(f"--judge {judge} is not asked; add --reward ruler")
    if by is not Reward.RULER:
        return {}
    asked, out = judge or "scripted", given.folder(by.value)

    def spent(result: FitResult, judging: RulerEvaluator, _: ArtClient) -> dict[str, Any]:
        print(f"Judge {asked}: {judging.spent}")
        return {"judge": {"model": asked, **asdict(judging.spent), "cost": result.judge_cost}}

    return {
        "out": out,
        "evaluator": lambda: ruler(asked, out / "judge.sqlite3"),
        "note": f" (RULER: {asked})",
        "more": spent,
    }


main = train_command(
    DEMO,
    "Train a small model to search an inbox, read the right mail and answer, by reward alone.",
    options,
)


if __name__ == "__main__":
    typer.run(main)
