"""Prompt distillation of triage on SmolLM2-135M: students of a few-shot prompt, and rewards alone.

Students learn by supervised steps, without the examples in their prompts: from all runs that the
base made with them, from those that were right, and from the base's own right runs without them.

- `base`, `few_shot`, `all`, `right`, `own`, `rewards`: mean held-out reward over the seeds.
- `prompt_ratio`: tokens of a prompt with the examples, over those without.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.support.demo import Fit, Setup
from examples.triage.train import DEMO
from langchain_art import ChatART, LocalServer, Trainer, Trajectory, gather

SEEDS, SHOTS, SCENARIOS, RUNS = 5, 16, 40, 8
EPOCHS, BATCH = 2, 32
STUDENTS = ("all", "right", "own")
console = Console()


@dataclass(frozen=True)
class OfPolicy(Setup):
    """A setup whose chat model is not the demo's: `policy`."""

    policy: str = ""

    def chat(self, policy: str | None = None) -> ChatART:
        return super().chat(self.policy)


def fit_of(policy: str, base_url: str, out: Path, seed: int, shots: int = 0) -> Fit:
    folder, steps = out / policy, DEMO.steps
    return DEMO.build(OfPolicy(DEMO, base_url, folder, steps, seed, few_shot=shots, policy=policy))


def conversations(runs: Sequence[Trajectory], skipped: int) -> list[list[Any]]:
    """Prompts without the examples, which stand behind the system message, and replies."""
    found: list[list[Any]] = []
    for turn in (turn for run in runs for turn in run.turns):
        messages = [*turn.messages, turn.reply]
        found.append(messages[:1] + messages[1 + skipped :])
    return found


def prompt_tokens(runs: Sequence[Trajectory]) -> float:
    usages = [turn.usage for run in runs for turn in run.turns]
    return statistics.fmean(usage.prompt_tokens for usage in usages if usage)


async def one_seed(base_url: str, out: Path, seed: int) -> dict[str, float]:
    base = fit_of("base", base_url, out, seed)
    few = fit_of("base", base_url, out, seed, SHOTS)

    async def held_out(fit: Fit) -> float:
        return (await fit.trainer.evaluate(fit.rollout, base.held_out, samples=2)).mean

    found = {"base": await held_out(base), "few_shot": await held_out(few)}
    asked = base.train[SHOTS : SHOTS + SCENARIOS]
    made: list[list[Trajectory]] = []
    for fit in (few, base):
        gathered = await gather(fit.rollout, asked, group_size=RUNS, seed=seed + len(made))
        made.append([run for group in gathered.groups for run in group.trajectories])
    with_shots, without = made
    found["prompt_ratio"] = prompt_tokens(with_shots) / prompt_tokens(without)
    lessons = {
        "all": conversations(with_shots, 2 * SHOTS),
        "right": conversations([run for run in with_shots if run.reward == 1], 2 * SHOTS),
        "own": conversations([run for run in without if run.reward == 1], 0),
    }
    for name, lesson in lessons.items():
        random.Random(seed).shuffle(lesson)
        model = ChatART(model=name, base_url=base_url)
        trainer = Trainer(model, out_dir=out / f"{name}-supervised", seed=seed)
        await trainer.warm_start(lesson, epochs=EPOCHS, batch_size=BATCH)
        found[name] = await held_out(fit_of(name, base_url, out, seed))
    fit = fit_of("rewards", base_url, out, seed)
    await fit.trainer.fit(fit.rollout, fit.train, steps=SCENARIOS // DEMO.groups_per_step)
    return found | {"rewards": await held_out(fit)}


def run() -> tuple[dict[str, float], dict[str, Any]]:
    """Figures, and those of each seed."""
    found: list[dict[str, float]] = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory(prefix="art-bench-") as folder:
            policies = ["base", *STUDENTS, "rewards"]
            data = Path(folder, "data")
            with LocalServer("smollm2-135m", policies=policies, data_dir=data) as server:
                found.append(asyncio.run(one_seed(server.base_url, Path(folder), seed)))
        console.print(seed, found[-1])
    return {name: statistics.fmean(one[name] for one in found) for name in found[0]}, {
        "seeds": found
    }
