"""Train the e-mail agent: ``python -m examples.email_search.train`` (what ``make demo`` runs).

It starts a server on this machine (or uses ``--base-url``), runs the agent on training questions,
rewards right answers, trains, evaluates on held-out questions before and after, and stops.
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
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from examples.email_search.agent import build_agent, reward
from examples.email_search.inbox import MailStore, Scenario, build
from langchain_art import ChatART, Run, TrainConfig, Trainer, TrajectoryGroup, capture
from langchain_art.errors import ArtError
from langchain_art.local_server import LocalServer
from langchain_art.records import EvalResult, FitResult
from langchain_art.report import reward_plot

BASE_MODEL = Path(__file__).parent / "base_model"
POLICY = "email-agent"
GROUPS_PER_STEP = 16
GROUP_SIZE = 8
HELD_OUT = 200
MAX_TOKENS = 48

Rollout = Callable[[Scenario], Awaitable[Run]]


def make_rollout(model: ChatART, mails: MailStore) -> Rollout:
    """The user's part: run the graph on one scenario, say what is good."""
    agent = build_agent(model)

    async def rollout(scenario: Scenario) -> Run:
        async with capture(scenario=scenario.id) as run:
            question = {"messages": [("user", scenario.question)]}
            state = await agent.ainvoke(question, context=mails.inbox(scenario.inbox))
            run.reward = reward(scenario, state)
        return run

    return rollout


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
        "dropped": result.dropped,
    }


async def train(base_url: str, out: Path, steps: int, seed: int, control: bool) -> FitResult:
    """Train for `steps` steps against a server that has the base model, and evaluate."""
    database = build(
        out / "mails.sqlite3", n_train=GROUPS_PER_STEP * steps, n_test=HELD_OUT, seed=seed
    )
    mails = MailStore(database)
    model = ChatART(model=POLICY, base_url=base_url, max_tokens=MAX_TOKENS)
    trainer = Trainer(
        model,
        evaluator=shuffled(seed) if control else None,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        concurrency=GROUPS_PER_STEP * GROUP_SIZE,
        config=TrainConfig(
            learning_rate=3e-3,
            warmup_steps=5,
            decay_steps=max(steps, 6),
            advantage="standardized",
            tokens_per_microbatch=4096,
        ),
        out_dir=out,
        seed=seed,
    )
    try:
        return await trainer.fit(
            make_rollout(model, mails),
            mails.scenarios("train"),
            steps=steps,
            eval_scenarios=mails.scenarios("test"),
            eval_every=max(1, -(-steps // 3)),
        )
    finally:
        mails.close()


def main(
    seed: Annotated[int, typer.Option(help="Of the mails and of the order of questions")] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps, one version each")] = 30,
    control: Annotated[bool, typer.Option(help="Shuffle the rewards within each group")] = False,
    out: Annotated[Path, typer.Option(help="Where results go")] = Path("out/demo"),
    base_url: Annotated[str | None, typer.Option(help="A server that runs; else start one")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with what is in the directory")] = False,
) -> None:
    """Train a small model to search an inbox, read the right mail and answer, by reward alone."""
    console = Console()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not resume:
        for old in ("server", "mails.sqlite3", "fit.json", "history.jsonl", "pending.json"):
            path = out / old
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    local = LocalServer(BASE_MODEL, policies=[POLICY], data_dir=out / "server")
    try:
        with local if base_url is None else nullcontext():
            url = base_url or local.base_url
            console.print(f"Server: {url}   data: {out / 'server'}   log: {local.log}")
            result = asyncio.run(train(url, out, steps, seed, control))
            seconds = time.monotonic() - begun
    except ArtError as error:
        console.print(f"[bold red]{type(error).__name__}:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    plot = reward_plot(
        result.history,
        out / "reward.png",
        result.before,
        result.after,
        evals=result.evals,
        title=f"E-mail agent, seed {seed}" + (" (control: shuffled rewards)" if control else ""),
    )
    figures = summary(result, seconds, seed, control)
    (out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(
        f"Held-out reward {result.before} → {result.after} in {seconds:.0f} s.\n"
        f"Plot: {plot}\nSummary: {out / 'summary.json'}\n"
        f"Adapter {result.adapter}: {out / 'server' / 'adapters' / POLICY / str(result.version)}"
    )


if __name__ == "__main__":
    typer.run(main)
