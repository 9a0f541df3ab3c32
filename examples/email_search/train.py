"""Train the e-mail agent: ``python -m examples.email_search.train`` (what ``make demo`` runs).

It starts a server on this machine (or uses ``--base-url``), runs the agent on training questions,
rewards right answers, trains, evaluates on held-out questions before and after, and stops.

With ``--reward ruler`` nobody says which answers to training questions are right: RULER compares
the runs of each question, and its scores are the only reward. Held-out questions are scored by
their answers all the same, which the judge never sees.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.email_search.agent import build_agent, reward
from examples.email_search.inbox import MailStore, Scenario, build
from examples.email_search.scripted_judge import ScriptedJudge
from langchain_art import (
    ArtError,
    ChatART,
    EvalResult,
    FitResult,
    LocalServer,
    LRSchedule,
    RulerEvaluator,
    Run,
    TrainConfig,
    Trainer,
    TrajectoryGroup,
    capture,
    reward_plot,
)

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "email-agent"
GROUPS_PER_STEP = 16
GROUP_SIZE = 8
HELD_OUT = 200
MAX_TOKENS = 48
FILES = (
    "server",
    "mails.sqlite3",
    "fit.json",
    "history.jsonl",
    "pending.json",
    "judge.sqlite3",
    "earlier",
)

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


def shuffled(seed: int) -> Callable[[TrajectoryGroup], Sequence[float]]:
    """The control: the rewards of each group, dealt out at random within it."""

    def score(group: TrajectoryGroup) -> Sequence[float]:
        rewards = [run.reward or 0.0 for run in group.trajectories]
        random.Random(f"{seed}:{group.id}").shuffle(rewards)
        return rewards

    return score


def summary(result: FitResult, seconds: float, seed: int, control: bool) -> dict[str, object]:
    """What ``summary.json`` holds; `ci95` is the half-width of the 95 % interval."""

    def figures(held_out: EvalResult | None) -> dict[str, object] | None:
        return held_out and {"mean": held_out.mean, "ci95": held_out.ci95, "n": held_out.n}

    spent: dict[str, float] = {}
    for record in result.history:
        for phase, value in record.seconds.items():
            spent[phase] = round(spent.get(phase, 0.0) + value, 2)
    return {
        "before": figures(result.before),
        "after": figures(result.after),
        "seconds": round(seconds, 1),
        "steps": len(result.history),
        "adapter": result.adapter,
        "seed": seed,
        "control": control,
        "seconds_by_phase": spent,
        "excluded": result.excluded,
    }


async def train(
    base_url: str,
    out: Path,
    steps: int,
    seed: int,
    evaluator: RulerEvaluator | Callable[[TrajectoryGroup], Sequence[float]] | None = None,
    fresh: bool = False,
) -> FitResult:
    """Train for `steps` steps against a server that has the base model, and evaluate.

    Args:
        base_url: of the server.
        out: where the mails and what a resumed fit needs are kept.
        steps: optimizer steps.
        seed: of the mails and of the order of questions.
        evaluator: scores training runs. None: they bring their rewards.
        fresh: begin anew from the base, on a server that trained the policy before.
    """
    database = build(
        out / "mails.sqlite3", n_train=GROUPS_PER_STEP * steps, n_test=HELD_OUT, seed=seed
    )
    mails = MailStore(database)
    model = ChatART(model=POLICY, base_url=base_url, max_tokens=MAX_TOKENS)
    trainer = Trainer(
        model,
        evaluator=evaluator,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        concurrency=GROUPS_PER_STEP * GROUP_SIZE,
        config=TrainConfig(
            learning_rate=3e-3,
            schedule=LRSchedule(warmup_steps=5, decay_steps=max(steps, 6)),
            advantage="standardized",
            tokens_per_microbatch=4096,
        ),
        out_dir=out,
        seed=seed,
    )
    try:
        return await trainer.fit(
            make_rollout(model, mails, judged=isinstance(evaluator, RulerEvaluator)),
            mails.scenarios("train"),
            steps=steps,
            eval_scenarios=mails.scenarios("test"),
            eval_every=max(1, -(-steps // 3)),
            fresh=fresh,
        )
    finally:
        mails.close()


def folder_of(seed: int, control: bool, by: Reward) -> Path:
    """Where the demo with these settings goes: each has a folder, so that none is mixed up."""
    words = [f"seed{seed}"] if seed else []
    words += ["control"] if control else []
    words += [by.value] if by is not Reward.ANSWER else []
    return Path("out", "-".join(["demo", *words]))


def main(
    seed: Annotated[int, typer.Option(help="Of the mails and of the order of questions")] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps, one version each")] = 30,
    control: Annotated[bool, typer.Option(help="Shuffle the rewards within each group")] = False,
    by: Annotated[
        Reward, typer.Option("--reward", help="What scores training runs")
    ] = Reward.ANSWER,
    judge: Annotated[
        str | None, typer.Option(help="Of --reward ruler: scripted, or as litellm names a model")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where results go. Default: out/demo, or by the settings")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="A server that runs; else start one")] = None,
    fresh: Annotated[
        bool, typer.Option(help="Erase what a former demo left in the directory, and begin anew")
    ] = False,
) -> None:
    """Train a small model to search an inbox, read the right mail and answer, by reward alone.

    Stopped (Ctrl-C) and run again, it goes on; finished and run again, it shows its result.
    """
    console = Console()
    if control and by is Reward.RULER:
        raise typer.BadParameter("--control shuffles the rewards of answers: no --reward ruler")
    if judge is not None and by is not Reward.RULER:
        raise typer.BadParameter(f"--judge {judge} is not asked; add --reward ruler")
    judge = judge or "scripted"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = out or folder_of(seed, control, by)
    if fresh:
        for old in FILES:
            path = out / old
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    local = LocalServer(BASE_MODEL, policies=[POLICY], data_dir=out / "server")
    try:
        judging = ruler(judge, out / "judge.sqlite3") if by is Reward.RULER else None
        evaluator = shuffled(seed) if control else judging
        with local if base_url is None else nullcontext():
            url = base_url or local.base_url
            console.print(f"Server: {url}   data: {out / 'server'}   log: {local.log}")
            started = time.monotonic() - begun
            result = asyncio.run(train(url, out, steps, seed, evaluator, fresh))
            seconds = started + result.seconds  # those of a demo that was stopped included
    except ArtError as error:
        console.print(f"[bold red]{type(error).__name__}:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        if "holds another fit" in str(error):
            console.print(f"Of the demo: --out is another folder, --fresh erases {out}.")
        raise typer.Exit(1) from error
    note = " (control: shuffled rewards)" if control else f" (RULER: {judge})" if judging else ""
    plot = reward_plot(
        result.history,
        out / "reward.png",
        result.before,
        result.after,
        evals=result.evals,
        title=f"E-mail agent, seed {seed}{note}",
    )
    figures = summary(result, seconds, seed, control)
    if judging is not None:
        figures["judge"] = {"model": judge, **asdict(judging.spent), "cost": result.judge_cost}
        console.print(f"Judge {judge}: {judging.spent}")
    (out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(
        f"Held-out reward {result.before} → {result.after} in {seconds:.0f} s.\n"
        f"Plot: {plot}\nSummary: {out / 'summary.json'}\n"
        f"Adapter {result.adapter}: {out / 'server' / 'adapters' / POLICY / str(result.version)}"
    )


if __name__ == "__main__":
    typer.run(main)
