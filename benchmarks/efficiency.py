"""Fits on SmolLM2-135M-Instruct: runs until a set reward, collapses, and an adapter for each node.

Three tasks (`benchmarks.learning.pretrained`), five seeds of each:

- `default`: the defaults; `faster`: three times the rate that they begin with, which stays;
- `baseline`: the defaults of 2026-11-25, until the fit has arrived;
- `nodes`: a policy for each node of `desk`;
- `long`: the defaults for 300 steps.

A fit has arrived when the mean training reward of its last 384 runs is at the task's target.
``rollouts_ratio`` is the runs of `baseline` until then over those of the defaults: of each task
that of the medians, and of those the median. A baseline that has not arrived counts with all of its
runs, so that the ratio is a bound; a task at whose target the defaults do not arrive is left out.
``collapses`` are the fits of the first two kinds that were rolled back. Beside rewards, a fit's
file in ``out/bench/efficiency`` has entropy, divergence and length of replies by step, and the rank
of its update: exp of the entropy of the normalized singular values of B·A (Roy and Vetterli,
EUSIPCO 2007), mean over the modules; at most the adapter's rank.

A fit whose file is there is not run again; two run at a time. ``python -m benchmarks.efficiency
triage default 0`` runs one.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.learning.pretrained import TASKS, Task
from langchain_art import (
    ChatART,
    EvalResult,
    FitResult,
    LocalServer,
    StepRecord,
    TrainConfig,
    Trainer,
)

OUT = Path("out/bench/efficiency")
SEEDS, GROUP_SIZE, WINDOW = range(5), 8, 384
#: The rate at which the defaults begin for this base, and that of 2026-11-25.
RATE, BASELINE_RATE = 1.2e-4, 6.5e-5
BASELINE_STEPS = 20
SETTINGS = ("default", "faster")
KINDS = (*SETTINGS, "nodes", "baseline", "long")


def cases() -> list[tuple[str, str, int]]:
    """Task, kind and seed of each fit."""
    made = [(task, kind, seed) for seed in SEEDS for task in TASKS for kind in SETTINGS]
    made += [("desk", "nodes", seed) for seed in SEEDS]
    made += [(task, "baseline", seed) for seed in SEEDS for task in ("triage", "desk")]
    return [*made, ("triage", "long", 0)]


def config_of(kind: str) -> TrainConfig:
    if kind == "faster":
        return TrainConfig(learning_rate=3 * RATE)
    if kind == "baseline":
        return TrainConfig(learning_rate=BASELINE_RATE, momentum=0.9, max_kl=None, advantage="mean")
    return TrainConfig()


def effective_rank(adapter: Path) -> float:
    """Mean over the modules of the effective rank of their update."""
    weights = load_file(adapter / "adapter_model.safetensors")
    found: list[float] = []
    for name, a in weights.items():
        if "lora_A" in name:
            b = weights[name.replace("lora_A", "lora_B")].double()
            inner = torch.linalg.qr(b).R @ torch.linalg.qr(a.double().T).R.T
            values = torch.linalg.svdvals(inner)
            if values.sum() > 0:
                shares = (values / values.sum()).clamp_min(1e-300)
                found.append(math.exp(-float((shares * shares.log()).sum())))
    return statistics.fmean(found)


def arrived(task: Task, kind: str, rewards: Sequence[float], runs: Sequence[int]) -> float:
    """Runs, with those drawn anew, until the mean reward of the last `WINDOW` is at the target."""
    steps = WINDOW // ((16 if kind == "baseline" else 4) * GROUP_SIZE)
    for end in range(steps, len(rewards) + 1):
        if statistics.fmean(rewards[end - steps : end]) >= task.target:
            return sum(runs[:end])
    return math.inf


def held_out(found: EvalResult | None) -> dict[str, Any] | None:
    return found and {"mean": found.mean, "ci95": found.ci95, "n": found.n}


def fit(name: str, kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one fit on a server of its own."""
    task = TASKS[name]
    policies = task.nodes if kind == "nodes" else ("one",)
    data = folder / "data"
    with LocalServer("smollm2-135m", policies=policies[:1], data_dir=data) as server:
        models = {
            policy: ChatART(model=policy, base_url=server.base_url, max_tokens=task.max_tokens)
            for policy in policies
        }
        by_node = {node: models.get(node, models[policies[0]]) for node in task.nodes}
        baseline = kind == "baseline"
        trainer = Trainer(
            list(models.values()),
            concurrency=128,
            config=config_of(kind),
            out_dir=folder / "fit",
            seed=seed,
            group_size=GROUP_SIZE,
            console=Console(file=io.StringIO()),
            **({"groups_per_step": 16, "dynamic_sampling_rounds": 0} if baseline else {}),
        )
        ranks: dict[int, dict[str, float]] = {}
        steps = 300 if kind == "long" else task.steps

        def after(record: StepRecord) -> None:
            if record.step in (2, 5, 10, 20) or record.step % 40 == 0:
                ranks[record.step] = {
                    policy: effective_rank(data / "adapters" / policy / str(result.version))
                    for policy, result in record.results.items()
                    if result.version
                }
            print(name, kind, seed, record.step, record.reward_mean, flush=True)

        train = task.scenarios("train", 288, seed)
        test = task.scenarios("test", task.held_out, seed)
        rollout = task.rollout(by_node)

        async def run() -> FitResult:
            if not baseline:
                return await trainer.fit(
                    rollout, train, steps=steps, eval_scenarios=test, on_step=after
                )
            for step in range(1, BASELINE_STEPS + 1):
                result = await trainer.fit(rollout, train, steps=step, on_step=after)
                rewards = [one.reward_mean or 0.0 for one in result.history]
                runs = [one.runs for one in result.history]
                if result.stopped or math.isfinite(arrived(task, kind, rewards, runs)):
                    break
            return result

        result = asyncio.run(run())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rewards": [one.reward_mean or 0.0 for one in result.history],
        "runs": [one.runs for one in result.history],
        "drawn": [one.drawn for one in result.history],
        "tokens": [dict(one.tokens) for one in result.history],
        "before": held_out(result.before),
        "after": held_out(result.after),
        "rollbacks": [[one.step, one.to_step, one.why] for one in result.rollbacks],
        "stopped": result.stopped,
        "seconds": result.seconds,
        "ranks": ranks,
        "metrics": [
            {
                policy: {key: one.metrics.get(key) for key in MEASURED}
                for policy, one in record.results.items()
            }
            for record in result.history
        ],
    }


MEASURED = ("entropy", "step_kl", "step_kept", "learning_rate", "truncated_share", "tokens_sampled")


def path_of(case: tuple[str, str, int]) -> Path:
    return OUT / f"{'-'.join(map(str, case))}.json"


def read(task: str, kind: str) -> list[dict[str, Any]]:
    """Results that are there."""
    paths = [path_of(case) for case in cases() if case[:2] == (task, kind)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def figures() -> dict[str, float]:
    """Figures of all results that are there."""
    made: dict[str, float] = {}
    ratios: list[float] = []
    fits = [one for task in TASKS for kind in SETTINGS for one in read(task, kind)]
    made["fits"] = len(fits)
    made["collapses"] = sum(bool(one["rollbacks"]) for one in fits)
    for task in TASKS:
        needed: dict[str, float] = {}
        for kind in KINDS:
            if found := read(task, kind):
                ends = [one["after"]["mean"] for one in found if one["after"]]
                if ends:
                    made[f"after_{kind}_{task}"] = statistics.fmean(ends)
                needed[kind] = statistics.median(
                    arrived(TASKS[task], kind, one["rewards"], one["runs"]) for one in found
                )
                if math.isfinite(needed[kind]):
                    made[f"runs_{kind}_{task}"] = needed[kind]
        if "baseline" in needed and math.isfinite(needed["default"]):
            before = min(needed["baseline"], BASELINE_STEPS * 16 * GROUP_SIZE)
            made[f"rollouts_ratio_{task}"] = before / needed["default"]
            ratios.append(made[f"rollouts_ratio_{task}"])
    if ratios:
        made["rollouts_ratio"] = statistics.median(ratios)
    return made


def measure(case: tuple[str, str, int]) -> None:
    """Run a fit in a process of its own, unless its result is there."""
    if not path_of(case).exists():
        command = [sys.executable, "-m", "benchmarks.efficiency", *map(str, case)]
        subprocess.run(command, check=False)


def run() -> tuple[dict[str, float], dict[str, Any]]:
    """Run the fits whose results are not there."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    OUT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(measure, cases()))
    return figures(), {"targets": {name: task.target for name, task in TASKS.items()}}


def main() -> None:
    task, kind, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="art-bench-") as folder:
        found = fit(task, kind, seed, Path(folder))
    path_of((task, kind, seed)).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
