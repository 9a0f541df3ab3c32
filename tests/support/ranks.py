"""Learners on several gloo ranks, as a server starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from langchain_art.wire import KLPenalty, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.config import PeftSettings, Settings
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    branching_rows,
    contents,
    folder,
    fresh,
    make_rows,
    quiet,
)

STEPS = 20


async def ignore(_fraction: float, _message: str) -> None: ...


def ranked(model: str, ranks: int = 2, *, shard: bool = False) -> PeftLearner:
    learner = PeftSettings(threads=1, ranks=ranks, shard=shard)
    return PeftLearner(Settings(model=model, device="cpu", learner=learner))


def others(pid: int | None) -> list[int]:
    """The processes that rank 0 has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def distance(one: Path, other: Path, file: str) -> float:
    """Norm of the difference over the norm, all tensors together."""
    a, b = load_file(one / file), load_file(other / file)
    assert a.keys() == b.keys()
    apart = sum((a[name] - b[name]).double().square().sum().item() for name in a)
    return (apart / sum(a[name].double().square().sum().item() for name in a)) ** 0.5


async def check_twenty_steps(
    learner: PeftLearner, tiny: str, tmp_path: Path, **changes: Any
) -> None:
    """The adapter of several ranks is one rank's, and so are their metrics."""
    core = LearnerCore(tiny)
    alone = together = fresh(core, tmp_path)
    config = TrainConfig(
        learning_rate=1e-3,
        optimizer_steps=2,
        kl=KLPenalty(estimator="k3", coefficient=0.01),
        **LENIENT,
        **changes,
    )
    await learner.start()
    try:
        for step in range(1, STEPS + 1):
            make = branching_rows if step % 2 else make_rows  # with and without weights, shared
            rows = make(12, seed=step)
            out = folder(tmp_path, f"alone{step}")
            expected = core.step(LearnerStep(alone, out, step, rows, config), quiet)
            alone, out = out, folder(tmp_path, f"together{step}")
            metrics = await learner.step(LearnerStep(together, out, step, rows, config), ignore)
            together = out
            for name in set(expected) - {"seconds", "cpu_seconds", "tokens_processed"}:
                assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
            assert metrics["forest"] == 1.0
        assert learner.restarts == 0
    finally:
        await learner.close()
    assert distance(alone, fresh(core, tmp_path), FILES[1]) > 0.05  # they have learned
    apart = distance(together, alone, FILES[1])
    assert apart <= 1e-6
    assert sorted(contents(together)) == sorted(FILES)
