"""A student that learns from a trained version, from rewards, or from both, on equal tokens.

The teacher is the demo's e-mail agent after 30 steps by rewards, on questions of its own. Students
of five seeds begin from the same base model and learn in three ways until they have sampled a
number of tokens: from the teacher alone (their runs have no reward), from rewards alone, and from
both. All are evaluated on the same 200 held-out questions of their seed, at an early and at a late
number of tokens. Coefficients are the default, and for both the one on the page of training
options; neither was searched for.

Intervals are over the five students, by Student's t; there is one teacher, so that they say nothing
of other teachers. The differences are in pairs of one seed. What the teacher itself sampled is not
counted: it is there already where a version is distilled.
"""

from __future__ import annotations

import asyncio
import io
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.learning.seeds import ci95_of_five
from examples.email_search.inbox import MailStore, build
from examples.email_search.train import BASE_MODEL, MAX_TOKENS, POLICY, make_rollout
from langchain_art import (
    ChatART,
    Distillation,
    LocalServer,
    LRSchedule,
    TrainConfig,
    Trainer,
)

SEEDS, GROUPS, SIZE, HELD_OUT = 5, 8, 8, 200
TEACHER, TEACHER_SEED, TEACHER_STEPS, TEACHER_GROUPS = f"{POLICY}-teacher", 1000, 30, 16
#: Sampled tokens after which a student is evaluated; its last step may go a little beyond.
EARLY, LATE = 12_000, 36_000
#: Questions of a student; none is seen twice.
QUESTIONS = 40 * GROUPS
WAYS: dict[str, dict[str, Any]] = {
    "teacher": {"distillation": {"rewards": False, "coefficient": 1.0}},
    "reward": {"advantage": "standardized"},
    "both": {"advantage": "standardized", "distillation": {"coefficient": 0.1}},
}
console = Console()


def trainer_of(
    base_url: str,
    folder: Path,
    policy: str,
    seed: int,
    config: TrainConfig,
    groups_per_step: int = GROUPS,
) -> Trainer:
    """A trainer of the demo's model."""
    return Trainer(
        ChatART(model=policy, base_url=base_url, max_tokens=MAX_TOKENS),
        group_size=SIZE,
        groups_per_step=groups_per_step,
        concurrency=TEACHER_GROUPS * SIZE,
        config=config,
        on_collapse="warn",
        out_dir=folder / "fit",
        seed=seed,
        console=Console(file=io.StringIO()),
    )


def config_of(schedule: LRSchedule, **options: Any) -> TrainConfig:
    """The demo's learning rate; `options` are of `TrainConfig`."""
    return TrainConfig(
        learning_rate=3e-3,
        schedule=schedule,
        tokens_per_microbatch=4096,
        **options,
    )


def mails_of(folder: Path, seed: int, questions: int) -> MailStore:
    folder.mkdir()
    path = folder / "mails.sqlite3"
    return MailStore(build(path, n_train=questions, n_test=HELD_OUT, seed=seed))


async def make_teacher(base_url: str, folder: Path) -> tuple[str, float, float]:
    """The teacher's version, and its held-out reward before and after it was trained."""
    mails = mails_of(folder, TEACHER_SEED, TEACHER_STEPS * TEACHER_GROUPS)
    model = ChatART(model=TEACHER, base_url=base_url, max_tokens=MAX_TOKENS)
    trainer = trainer_of(
        base_url,
        folder,
        TEACHER,
        TEACHER_SEED,
        groups_per_step=TEACHER_GROUPS,
        config=config_of(
            LRSchedule(warmup_steps=5, decay_steps=TEACHER_STEPS), advantage="standardized"
        ),
    )
    result = await trainer.fit(
        make_rollout(model, mails),
        mails.scenarios("train"),
        steps=TEACHER_STEPS,
        eval_scenarios=mails.scenarios("test"),
    )
    mails.close()
    assert result.before is not None and result.before.mean is not None
    assert result.after is not None and result.after.mean is not None
    console.print(f"teacher {result.adapter}: {result.before} → {result.after}")
    return result.adapter, result.before.mean, result.after.mean


async def learn(
    base_url: str, folder: Path, seed: int, way: str, teacher: str
) -> dict[int, dict[str, float]]:
    """By `EARLY` and `LATE`: held-out reward, steps, tokens sampled, distance to the teacher."""
    mails = mails_of(folder, seed, QUESTIONS)
    policy = f"{POLICY}-{seed}-{way}"
    model = ChatART(model=policy, base_url=base_url, max_tokens=MAX_TOKENS)
    options = dict(WAYS[way])
    if "distillation" in options:
        options["distillation"] = Distillation(teacher=teacher, **options["distillation"])
    trainer = trainer_of(
        base_url, folder, policy, seed, config=config_of(LRSchedule(warmup_steps=3), **options)
    )
    rollout = make_rollout(model, mails, judged=way == "teacher")
    found: dict[int, dict[str, float]] = {}
    steps, tokens = 0, 0
    for budget in (EARLY, LATE):
        while tokens < budget:
            steps += 1
            result = await trainer.fit(rollout, mails.scenarios("train"), steps=steps)
            tokens = sum(record.tokens["completion"] for record in result.history)
            rewards = [record.reward_mean for record in result.history]
            assert (set(rewards) == {None}) == (way == "teacher"), rewards
        evaluated = await trainer.evaluate(rollout, mails.scenarios("test"))
        assert evaluated.mean is not None
        last = result.history[-1].metrics
        found[budget] = {
            "reward": evaluated.mean,
            "steps": steps,
            "tokens": tokens,
            "kl_reference": last.get("kl_reference", 0.0),
        }
        console.print(f"seed {seed}, {way}, {steps} steps, {tokens} tokens: {found[budget]}")
    mails.close()
    return found


def run() -> tuple[dict[str, float], dict[str, object]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    every: dict[str, list[dict[int, dict[str, float]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        root = Path(temporary)
        with LocalServer(BASE_MODEL, policies=[TEACHER], data_dir=root / "server") as server:
            url = server.base_url
            teacher, before, after = asyncio.run(make_teacher(url, root / "teacher"))
            for seed in range(SEEDS):
                for way, found in every.items():
                    folder = root / f"{seed}-{way}"
                    found.append(asyncio.run(learn(url, folder, seed, way, teacher)))
    figures = {"held_out_base": before, "held_out_teacher": after}
    for name, budget in (("early", EARLY), ("late", LATE)):
        rewards = {way: [one[budget]["reward"] for one in found] for way, found in every.items()}
        for way, found in every.items():
            figures[f"held_out_{way}_{name}"] = statistics.fmean(rewards[way])
            figures[f"held_out_{way}_{name}_ci95"] = ci95_of_five(rewards[way])
            figures[f"tokens_{way}_{name}"] = statistics.fmean(
                one[budget]["tokens"] for one in found
            )
            figures[f"steps_{way}_{name}"] = statistics.fmean(one[budget]["steps"] for one in found)
        for way in ("teacher", "both"):
            less = [a - b for a, b in zip(rewards[way], rewards["reward"], strict=True)]
            figures[f"{way}_over_reward_{name}"] = statistics.fmean(less)
            figures[f"{way}_over_reward_{name}_ci95"] = ci95_of_five(less)
    return figures, {"students": every, "ways": WAYS, "tokens": [EARLY, LATE]}
