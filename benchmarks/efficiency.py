"""Rollouts until a set reward: the defaults against those of 2026-11-25.

Three tasks (`benchmarks.learning.tasks`), several seeds of each, on the real server. A fit has
arrived when the mean training reward of its last `Task.window` rollouts is at the task's target.
``rollouts_ratio`` is the rollouts of `BASELINE` over those of the defaults: for each task that of
the medians over the seeds, and of those the median. A fit that does not arrive counts with the
rollouts that it made; ``…_not_arrived`` says how many did not.

With the defaults, and with a named rate of three times or a third of the first one, fits go on for
`Task.least` rollouts at least: ``collapses`` are fits with the defaults that were rolled back;
``ends_above_start`` is the share of the fits at the other two rates whose last `Task.window`
rollouts have a higher mean than the first step, which the base model sampled.

A fit's result is a file in ``out/bench/efficiency``; one that is there is not measured again.
Counts of rollouts do not depend on how busy the machine is.

``python -m benchmarks.efficiency bandit --seed 0 --variant default`` runs some of them, and shows
the figures of all that are there.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.learning.tasks import TASKS, Task
from langchain_art import (
    ChatART,
    ClippedRatio,
    FitResult,
    LocalServer,
    LoraConfig,
    LRSchedule,
    TrainConfig,
    Trainer,
    TruncatedIS,
)
from langchain_art.wire.policies import default_learning_rate

OUT = Path("out/bench/efficiency")
SEEDS = tuple(range(10))
#: Runs of a scenario, of all fits.
GROUP_SIZE = 8
#: The defaults of `Trainer` and `TrainConfig` that were replaced, in full, so that what they have
#: now makes no difference here.
BASELINE_GROUPS = 16
#: The learning rate of then, by the parameters of the base model.
BASELINE_RATE, BASELINE_EXPONENT = 3e-3, -0.588
BASELINE: dict[str, Any] = {
    "schedule": LRSchedule(warmup_steps=0, decay_steps=None),
    "momentum": 0.9,
    "max_grad_norm": 1.0,
    "optimizer_steps": 1,
    "max_kl": None,
    "mask_truncated": False,
    "advantage": "mean",
    "credit": "run",
    "zero_variance_tolerance": 1e-6,
    "overlong": None,
    "max_staleness": 8,
    "loss": ClippedRatio(
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        importance_sampling=TruncatedIS(high=2.0),
        aggregation="token",
    ),
    "kl": None,
    "distillation": None,
    "entropy_bonus": 0.0,
    "guard": 1.25,
    "max_logprob_gap": 0.1,
}
#: Variant -> what the learning rate of the size of the model is multiplied by. None: none is named.
VARIANTS = {"baseline": 1.0, "default": None, "faster": 3.0, "slower": 1 / 3}


@dataclass(frozen=True)
class Case:
    """One fit."""

    task: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.variant}-{self.seed}"

    @property
    def path(self) -> Path:
        return OUT / f"{self.name}.json"


def cases(
    tasks: Iterable[str] = TASKS,
    variants: Iterable[str] = VARIANTS,
    seeds: Iterable[int] = SEEDS,
) -> list[Case]:
    """Seed by seed, so that a run that is stopped has as many of each."""
    chosen, kinds = list(tasks), list(variants)
    return [Case(task, kind, seed) for seed in seeds for task in chosen for kind in kinds]


def config_of(task: Task, variant: str) -> TrainConfig:
    """How a variant trains."""
    if variant == "baseline":
        rate = BASELINE_RATE * (task.parameters / 0.2e6) ** BASELINE_EXPONENT
        return TrainConfig(learning_rate=rate, tokens_per_microbatch=4096, **BASELINE)
    if (factor := VARIANTS[variant]) is None:
        return TrainConfig(tokens_per_microbatch=4096)
    rate = default_learning_rate(task.parameters, LoraConfig()) * factor
    return TrainConfig(learning_rate=rate, tokens_per_microbatch=4096)


def last(rewards: Sequence[float], steps: int) -> float | None:
    """The mean reward of the last steps; None if there are not as many."""
    return statistics.fmean(rewards[-steps:]) if len(rewards) >= steps else None


def enough(variant: str, task: Task, made: int, came: bool) -> bool:
    """Whether a fit has shown what is asked of it."""
    if variant == "baseline":
        return came
    return made >= task.least and (came or variant != "default")


async def fit(case: Case, base_url: str, folder: Path) -> dict[str, Any]:
    """Run a fit until it has arrived, or has made all the rollouts that it may make."""
    task = TASKS[case.task]
    model = ChatART(model=case.name, base_url=base_url, max_tokens=task.max_tokens)
    trainer = Trainer(
        model,
        concurrency=128,
        config=config_of(task, case.variant),
        out_dir=folder / "fit",
        seed=case.seed,
        console=Console(file=io.StringIO()),
        group_size=GROUP_SIZE,
        **({"groups_per_step": BASELINE_GROUPS} if case.variant == "baseline" else {}),
    )
    result: FitResult | None = None
    rewards: list[float] = []
    made, per_step, came = 0, 0, None
    with task.prepare(model, folder, case.seed, task.most) as material:
        while made < task.most:
            steps = len(rewards) + 1
            result = await trainer.fit(material.rollout, material.scenarios, steps=steps)
            rewards = [one.reward_mean or 0.0 for one in result.history]
            per_step = result.history[0].groups * GROUP_SIZE
            made += per_step
            now = last(rewards, task.window // per_step)
            came = made if came is None and now is not None and now >= task.target else came
            if result.stopped or enough(case.variant, task, made, came is not None):
                break
    assert result is not None
    learned = [metrics for one in result.history if (metrics := one.metrics)]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rewards": rewards,
        "rollouts": made,
        "arrived": came,
        "first": rewards[0],
        "last": last(rewards, task.window // per_step),
        "rollbacks": [[one.step, one.to_step, one.why] for one in result.rollbacks],
        "stopped": result.stopped,
        "updates": [one.get("updates") for one in learned],
        "step_kl": [one.get("step_kl") for one in learned],
        "learning_rate": [one.get("learning_rate") for one in learned],
    }


def measure(wanted: Sequence[Case]) -> None:
    """Run the fits whose results are not there, with one server for those of a task."""
    OUT.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(case.task for case in wanted):
        missing = [one for one in wanted if one.task == task and not one.path.exists()]
        if missing:
            with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
                _measure(missing, Path(temporary))


def _measure(missing: Sequence[Case], root: Path) -> None:
    model = TASKS[missing[0].task].base_model(root)
    with LocalServer(model, policies=[missing[0].name], data_dir=root / "server") as server:
        for case in missing:
            folder = root / case.name
            folder.mkdir()
            found = asyncio.run(fit(case, server.base_url, folder))
            case.path.write_text(json.dumps(found) + "\n")
            shown = " ".join(f"{one:.2f}" for one in found["rewards"])
            print(case.name, found["arrived"], found["rollbacks"], shown, flush=True)


def read(variant: str, task: str | None = None) -> list[dict[str, Any]]:
    """The results that are there."""
    found = [one for one in cases() if one.variant == variant and task in (None, one.task)]
    return [json.loads(one.path.read_text()) for one in found if one.path.exists()]


def rollouts(found: dict[str, Any]) -> int:
    """Until the target, or all if it was not reached."""
    return found["arrived"] or found["rollouts"]


def rises(found: dict[str, Any]) -> bool:
    """Whether a fit ends above its start."""
    return found["last"] > found["first"]


def figures() -> dict[str, float]:
    """Of all results that are there."""
    made: dict[str, float] = {}
    ratios: list[float] = []
    for task in TASKS:
        needed = {
            variant: statistics.median(map(rollouts, found))
            for variant in ("baseline", "default")
            if (found := read(variant, task))
        }
        made |= {f"rollouts_{variant}_{task}": value for variant, value in needed.items()}
        if len(needed) == 2:
            ratios.append(needed["baseline"] / needed["default"])
            made[f"rollouts_ratio_{task}"] = ratios[-1]
    if ratios:
        made["rollouts_ratio"] = statistics.median(ratios)
    for variant in VARIANTS:
        found = read(variant)
        made[f"fits_{variant}"] = len(found)
        made[f"{variant}_not_arrived"] = sum(one["arrived"] is None for one in found)
        made[f"{variant}_rolled_back"] = sum(bool(one["rollbacks"]) for one in found)
    made["collapses"] = made["default_rolled_back"]
    others = read("faster") + read("slower")
    if others:
        made["ends_above_start"] = statistics.fmean(map(rises, others))
    return made


def run() -> tuple[dict[str, float], dict[str, Any]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measure(cases())
    return figures(), {"seeds": list(SEEDS), "target": {k: v.target for k, v in TASKS.items()}}


def main(
    tasks: Annotated[list[str] | None, typer.Argument(help="Default: all")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be given again")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="May be given again")] = None,
) -> None:
    """Run some fits, and show the figures of all whose results are there."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measure(cases(tasks or TASKS, variant or VARIANTS, seed or SEEDS))
    for name, value in figures().items():
        print(f"{name:28s} {value:.4g}")


if __name__ == "__main__":
    typer.run(main)
