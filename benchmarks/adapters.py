"""One adapter for both roles of a game against an adapter for each, on equal tokens.

Codenames (`examples/codenames`): a spymaster and a guesser, one reward for both. Three arms begin
from the same base model, play the same boards in the same order, and learn until they have sampled
a number of tokens: two adapters of rank 16, each on its own role's calls; one adapter of rank 16 on
all calls; and one of rank 32, which has as many parameters as the two together. All have the same
alpha / rank and learning rate, which were searched for no arm, and are evaluated on the same
held-out boards of their seed, at an early and at a late number of tokens.

Intervals are over five seeds, by Student's t; differences are in pairs of one seed.
"""

from __future__ import annotations

import asyncio
import io
import os
import statistics
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.learning.seeds import ci95_of_five
from examples.codenames.environment import boards
from examples.codenames.train import BASE_MODEL, DEMO, ROLES, make_rollout
from langchain_art import ChatART, LocalServer, LoraConfig, LRSchedule, TrainConfig, Trainer

SEEDS, GROUPS, SIZE, HELD_OUT = 5, 16, 8, 200
#: Sampled tokens after which an arm is evaluated; its last step may go a little beyond.
EARLY, LATE = 10_000, 20_000
#: Boards of a fit; none is seen twice.
BOARDS = 40 * GROUPS
#: By arm: the policies that play, and the rank of each.
ARMS = {"two": (ROLES, 16), "one": (("player",), 16), "one_wide": (("wide-player",), 32)}
console = Console()


async def learn(base_url: str, folder: Path, seed: int, arm: str) -> dict[int, dict[str, float]]:
    """By `EARLY` and `LATE`: held-out reward, steps, and tokens sampled."""
    roles, rank = ARMS[arm]
    models = [
        ChatART(model=f"{role}-{seed}", base_url=base_url, max_tokens=DEMO.max_tokens)
        for role in roles
    ]
    trainer = Trainer(
        models,
        group_size=SIZE,
        groups_per_step=GROUPS,
        concurrency=GROUPS * SIZE,
        config=TrainConfig(
            learning_rate=DEMO.learning_rate,
            schedule=LRSchedule(warmup_steps=3),
            advantage="standardized",
            tokens_per_microbatch=4096,
        ),
        lora=LoraConfig(rank=rank, alpha=2 * rank),
        out_dir=folder,
        seed=seed,
        console=Console(file=io.StringIO()),
    )
    rollout = make_rollout(models[0], models[-1])
    train, held_out = boards("train", BOARDS, seed, 1), boards("test", HELD_OUT, seed, 1)
    found: dict[int, dict[str, float]] = {}
    steps, tokens = 0, 0
    for budget in (EARLY, LATE):
        while tokens < budget:
            steps += 1
            result = await trainer.fit(rollout, train, steps=steps)
            tokens = sum(record.tokens["completion"] for record in result.history)
        evaluated = await trainer.evaluate(rollout, held_out)
        assert evaluated.mean is not None
        found[budget] = {
            "reward": evaluated.mean,
            "steps": steps,
            "tokens": tokens,
            "rollbacks": len(result.rollbacks),
        }
        console.print(f"seed {seed}, {arm}, {steps} steps, {tokens} tokens: {found[budget]}")
    return found


def run() -> tuple[dict[str, float], dict[str, object]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    every: dict[str, list[dict[int, dict[str, float]]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="art-bench-") as temporary:
        root = Path(temporary)
        with LocalServer(BASE_MODEL, data_dir=root / "server") as server:
            for seed in range(SEEDS):
                for arm, found in every.items():
                    folder = root / f"{seed}-{arm}"
                    found.append(asyncio.run(learn(server.base_url, folder, seed, arm)))
    figures: dict[str, float] = {}
    for name, budget in (("early", EARLY), ("late", LATE)):
        rewards = {arm: [one[budget]["reward"] for one in found] for arm, found in every.items()}
        for arm, found in every.items():
            figures[f"held_out_{arm}_{name}"] = statistics.fmean(rewards[arm])
            figures[f"held_out_{arm}_{name}_ci95"] = ci95_of_five(rewards[arm])
            for count in ("tokens", "steps", "rollbacks"):
                values = [one[budget][count] for one in found]
                figures[f"{count}_{arm}_{name}"] = statistics.fmean(values)
        for arm in ("one", "one_wide"):
            less = [two - one for two, one in zip(rewards["two"], rewards[arm], strict=True)]
            figures[f"two_over_{arm}_{name}"] = statistics.fmean(less)
            figures[f"two_over_{arm}_{name}_ci95"] = ci95_of_five(less)
    return figures, {"fits": every, "arms": ARMS, "tokens": [EARLY, LATE]}
