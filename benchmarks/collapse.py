"""A learning rate that is too high, with the collapse undone and without.

The demo's e-mail agent with two optimizer steps a step and 1e-2, three times the demo's learning
rate: its rewards fall to nothing within a few steps. The same fit with
``Trainer(on_collapse="rollback")``, the default, and with ``"warn"``, three seeds each, from the
same base model on the same questions; both are evaluated on the same held-out questions before the
first step and after the last.
"""

from __future__ import annotations

import asyncio
import io
import os
import statistics
import tempfile
from pathlib import Path

from rich.console import Console

from examples.email_search.inbox import MailStore, build
from examples.email_search.train import BASE_MODEL, MAX_TOKENS, POLICY, make_rollout
from langchain_art import ChatART, FitResult, LocalServer, LRSchedule, TrainConfig, Trainer

SEEDS, STEPS, GROUPS, SIZE, HELD_OUT = 3, 12, 16, 8, 100
LEARNING_RATE, OPTIMIZER_STEPS = 1e-2, 2
MODES = ("warn", "rollback")
console = Console()


async def fit(base_url: str, folder: Path, seed: int, mode: str) -> FitResult:
    """A fit with both evaluations."""
    mails = MailStore(
        build(folder / "mails.sqlite3", n_train=STEPS * GROUPS, n_test=HELD_OUT, seed=seed)
    )
    policy = f"{POLICY}-{seed}-{mode}"
    model = ChatART(model=policy, base_url=base_url, max_tokens=MAX_TOKENS)
    trainer = Trainer(
        model,
        group_size=SIZE,
        groups_per_step=GROUPS,
        concurrency=GROUPS * SIZE,
        config=TrainConfig(
            learning_rate=LEARNING_RATE,
            optimizer_steps=OPTIMIZER_STEPS,
            schedule=LRSchedule(warmup_steps=5, decay_steps=30),
            advantage="standardized",
            tokens_per_microbatch=4096,
        ),
        on_collapse=mode,
        out_dir=folder / "fit",
        seed=seed,
        console=Console(file=io.StringIO()),
    )
    result = await trainer.fit(
        make_rollout(model, mails),
        mails.scenarios("train"),
        steps=STEPS,
        eval_scenarios=mails.scenarios("test"),
    )
    mails.close()
    by_step = " ".join(f"{one.reward_mean:.2f}" for one in result.history)
    undone = [(one.step, one.to_step) for one in result.rollbacks]
    console.print(f"seed {seed}, {mode}: {result.before} → {result.after}; {by_step}; {undone}")
    return result


def run() -> tuple[dict[str, float], dict[str, object]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, float] = {}
    after: dict[str, list[float]] = {mode: [] for mode in MODES}
    before: list[float] = []
    rollbacks = 0
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        root = Path(temporary)
        with LocalServer(BASE_MODEL, policies=[POLICY], data_dir=root / "server") as server:
            for seed in range(SEEDS):
                for mode in MODES:
                    folder = root / f"{seed}-{mode}"
                    folder.mkdir()
                    result = asyncio.run(fit(server.base_url, folder, seed, mode))
                    assert result.before is not None and result.before.mean is not None
                    assert result.after is not None and result.after.mean is not None
                    before.append(result.before.mean)
                    after[mode].append(result.after.mean)
                    rollbacks += len(result.rollbacks)
                    figures[f"held_out_after_{mode}_seed{seed}"] = result.after.mean
    figures["held_out_before"] = statistics.fmean(before)
    for mode, found in after.items():
        figures[f"held_out_after_{mode}"] = statistics.fmean(found)
    figures["rollbacks"] = rollbacks
    more = {"learning_rate": LEARNING_RATE, "optimizer_steps": OPTIMIZER_STEPS, "steps": STEPS}
    return figures, more
