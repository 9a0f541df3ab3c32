import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from langchain_art.call_seeds import run_seed
from langchain_art.errors import RolloutFailed
from langchain_art.rollout.gather import GroupStream, gather
from langchain_art.rollout.runner import RolloutWorker


def stream(rollout: Any, concurrency: int = 8, **options: Any) -> GroupStream:
    worker = RolloutWorker(rollout, concurrency, **options)
    return GroupStream(worker, str, lambda n, _: f"g-{n}", group_size=2)


async def test_what_ends_first_comes_first() -> None:
    held = asyncio.Event()

    async def rollout(scenario: str) -> float:
        if scenario == "0":
            await held.wait()
        return float(scenario)

    async with stream(rollout) as groups:
        groups.allow(3)
        first = await groups.take(2)
        assert {g.id for g in first} == {"g-1", "g-2"}
        assert [t.reward for t in first[0].trajectories] == [float(first[0].id[-1])] * 2
        held.set()
        assert [g.id for g in await groups.take(1)] == ["g-0"]


async def test_nothing_starts_that_is_not_allowed() -> None:
    started: Counter[str] = Counter()

    async def rollout(scenario: str) -> float:
        started[scenario] += 1
        return 1.0

    async with stream(rollout) as groups:
        groups.allow(2)
        await groups.take(2)
        await asyncio.sleep(0.05)
        assert started == {"0": 2, "1": 2}
        groups.allow(1)
        await groups.take(1)
        assert started == {"0": 2, "1": 2, "2": 2}
        with pytest.raises(RuntimeError, match="asked for 1 groups, 0"):
            await groups.take(1)


async def test_too_many_failures_end_it_and_some_do_not() -> None:
    async def rollout(scenario: str) -> float:
        if int(scenario) < 2:
            raise ValueError("no such tool")
        return 1.0

    worker = RolloutWorker(rollout)
    async with GroupStream(worker, str, lambda n, _: f"g-{n}", group_size=2) as groups:
        groups.allow(4)
        runs = [t for g in await groups.take(4) for t in g.trajectories]
        assert Counter(t.status for t in runs) == {"failed": 4, "completed": 4}
        assert worker.first_error is not None
        assert "no such tool" in worker.first_error
    async with stream(rollout, max_failed=0.4) as groups:
        groups.allow(4)
        with pytest.raises(RolloutFailed, match=r"4 rollouts raised, at most 3\.2") as caught:
            await groups.take(4)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_runs_within_a_seeded_run_draw_apart_and_the_same_again() -> None:
    async def draws(kind: Callable[[int], Any]) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []

        async def inner(_: str) -> float:
            seed, asked = run_seed.get(), dict[str, Any](messages=["Who?"])
            assert seed is not None
            with seed.seeding(asked, ()):
                found.append((asked["seed"], seed.rng.random()))
            return 1.0

        async def outer(_: str) -> float:
            for _ in range(2):
                await gather(inner, ["a", "b"], group_size=kind(2))
            return 1.0

        await gather(outer, ["s"], group_size=kind(2), seed=kind(1))
        return found

    first = await draws(int)
    assert len(set(first)) == len(first) == 16
    assert sorted(await draws(np.int64)) == sorted(first)
