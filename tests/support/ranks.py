"""Learners on several gloo ranks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from langchain_art.wire import KLPenalty, TrainConfig
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.config import PeftSettings, Settings
from tests.support.engines import alive
from tests.support.learner_cases import (
    FILES,
    LENIENT,
    branching_rows,
    contents,
    folder,
    fresh,
    ignore,
    long_runs,
    make_rows,
    naive_divergence,
    on_policy,
    quiet,
    restricted,
)
from tests.support.soak import count, share
from tests.support.worker_child import FORKED

STEPS = count(4, 20)


def ranked(
    model: str,
    ranks: int = 2,
    *,
    shard: bool = False,
    dtype: str | None = None,
) -> PeftLearner:
    """A learner of several ranks, all of them forked; in ``make soak`` as a server starts them.

    `test_backend_pairs` has a server with them in ``make test``.
    """
    chosen = PeftSettings(threads=1, ranks=ranks, shard=shard)
    learner = PeftLearner(Settings(model=model, device="cpu", dtype=dtype, learner=chosen))
    learner._program.target = "tests.support.worker_child:serve_learner"
    if not share():
        learner._program._env[FORKED] = "1"
    return learner


def others(pid: int | None) -> list[int]:
    """The processes that rank 0 has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def distance(one: Path, other: Path, file: str) -> float:
    """Norm of the difference over the norm, all tensors together."""
    a, b = load_file(one / file), load_file(other / file)
    assert a.keys() == b.keys()
    apart = sum((a[name] - b[name]).double().square().sum().item() for name in a)
    return (apart / sum(a[name].double().square().sum().item() for name in a)) ** 0.5


async def started(learner: PeftLearner) -> AsyncIterator[PeftLearner]:
    """For a fixture: the learner while it runs. No rank outlives it, whatever befell it."""
    await learner.start()
    yield learner
    left = others(learner.pid)
    await learner.close()
    await gone(left)
    assert left, "it has no other ranks"


async def gone(pids: list[int]) -> None:
    """Wait until the processes have ended."""
    for _ in range(2400):  # one that still imports its modules notices nothing before
        if not (there := [pid for pid in pids if alive(pid)]):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"they run: {there}")


async def check_steps(learner: PeftLearner, tiny: str, tmp_path: Path, **changes: Any) -> None:
    """The adapter of several ranks is one rank's, and so are their metrics."""
    core, restarts = LearnerCore(tiny), learner.restarts
    alone = together = fresh(core, tmp_path)
    config = TrainConfig(
        learning_rate=1e-3,
        optimizer_steps=2,
        kl=KLPenalty(estimator="k3", coefficient=0.01),
        **(LENIENT | {"max_kl": 0.01}),
        **changes,
    )
    for step in range(1, STEPS + 1):
        make = branching_rows if step % 2 else make_rows  # with and without weights, shared
        rows = make(9, seed=step)
        rows += restricted(rows[:3])
        out = folder(tmp_path, f"alone{step}")
        expected = core.step(LearnerStep(alone, out, step, rows, config), quiet)
        alone, out = out, folder(tmp_path, f"together{step}")
        metrics = await learner.step(LearnerStep(together, out, step, rows, config), ignore)
        together = out
        timed = {"seconds", "save_seconds", "kl_seconds", "cpu_seconds"}
        for name in set(expected) - timed - {"tokens_processed"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
        assert metrics["forest"] == 1.0
    assert learner.restarts == restarts
    assert distance(alone, fresh(core, tmp_path), FILES[1]) > 0.05  # they have learned
    apart = distance(together, alone, FILES[1])
    assert apart <= 1e-6
    assert sorted(contents(together)) == sorted(FILES)


async def check_a_sampled_step(learner: PeftLearner, tiny: str, tmp_path: Path) -> None:
    """The divergence of many tokens is measured on a sample of each rank's rows."""
    core, restarts = LearnerCore(tiny), learner.restarts
    start, out = fresh(core, tmp_path), folder(tmp_path, "out")
    rows = on_policy(core, start, long_runs(24, 8, 80))
    config = TrainConfig(learning_rate=3e-2, **(LENIENT | {"max_kl": 0.01}))
    metrics = await learner.step(LearnerStep(start, out, 1, rows, config), ignore)
    off = metrics["step_kl"] - naive_divergence(core, start, out, rows)
    assert 0 < abs(off) < 4 * metrics["step_kl_error"] < 0.5 * metrics["step_kl"]
    assert 0 < metrics["step_kl"] <= 0.01 and learner.restarts == restarts
