"""Batches: rollouts that run ahead of the training."""

import asyncio
import io
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from langchain_art.errors import ConfigError
from langchain_art.tracing.run import Run
from langchain_art.tracing.scope import capture
from langchain_art.training.trainer import Trainer
from langchain_art.wire import TrainConfig
from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer

#: So that runs which are some versions old agree with the learner.
SMALL_STEPS = TrainConfig(learning_rate=2e-5)
SCENARIOS = [{"id": f"c-{n}", "question": f"When is audit {n}?"} for n in range(8)]


def trainer_of(server: LiveServer, tmp_path: Path, **options: Any) -> Trainer:
    model = model_of(server, f"collect-{uuid.uuid4().hex[:8]}")
    given = {"group_size": 2, "groups_per_step": 2, "config": SMALL_STEPS, **options}
    return Trainer(model, out_dir=tmp_path / "fit", console=Console(file=io.StringIO()), **given)


def rollout_of(server: LiveServer, policy: str, reward: Callable[[str], float]) -> Any:
    model = model_of(server, policy)

    async def rollout(scenario: dict[str, str]) -> Run:
        async with capture(scenario=scenario["id"]) as told:
            await model.ainvoke(scenario["question"])
            told.reward = reward(scenario["id"])
        return told

    return rollout


@pytest.mark.parametrize("max_steps_ahead", [0, 2])
async def test_how_far_rollouts_run_ahead(
    art_server: LiveServer, tmp_path: Path, max_steps_ahead: int
) -> None:
    started = 0
    most: dict[int, int] = {}  # steps that were trained when a group began -> groups that had
    numbers = count()
    trainer = trainer_of(art_server, tmp_path, max_steps_ahead=max_steps_ahead)
    inner = rollout_of(art_server, trainer.policy, lambda _: float(next(numbers)))
    history = tmp_path / "fit" / "history.jsonl"

    async def rollout(scenario: dict[str, str]) -> Run:
        nonlocal started
        done = len(history.read_text().splitlines()) if history.exists() else 0
        started += 1
        most[done] = started
        return await inner(scenario)

    found = await trainer.fit(rollout, SCENARIOS, steps=5)
    assert [step.version for step in found.history] == [1, 2, 3, 4, 5]
    assert started == 5 * 2 * 2, "no more than the steps need"
    for done, runs in most.items():
        assert runs <= (done + 1 + max_steps_ahead) * 2 * 2
    if max_steps_ahead:
        assert most[0] == (1 + max_steps_ahead) * 2 * 2
        assert max(step.metrics["staleness_mean"] for step in found.history) > 0


async def test_a_step_does_not_wait_for_the_slowest(art_server: LiveServer, tmp_path: Path) -> None:
    numbers, held = count(), asyncio.Event()
    trainer = trainer_of(art_server, tmp_path, max_steps_ahead=1)
    inner = rollout_of(art_server, trainer.policy, lambda _: float(next(numbers)))
    slow: list[str] = []
    order: list[str] = []

    async def rollout(scenario: dict[str, str]) -> Run:
        slow[:] = slow or [scenario["id"]]
        if scenario["id"] == slow[0]:
            await held.wait()
        told = await inner(scenario)
        order.append(scenario["id"])
        if len(order) >= 4:  # two whole groups, and the first scenario is not among them
            held.set()
        return told

    found = await trainer.fit(rollout, SCENARIOS, steps=2)
    assert found.version == 2
    assert slow[0] not in order[:4]
    assert order.count(slow[0]) == 2, "and yet it is trained"


async def test_bad_numbers_are_refused(art_server: LiveServer, tmp_path: Path) -> None:
    for bad in ({"max_steps_ahead": -1}, {"dynamic_sampling_rounds": -1}, {"group_size": None}):
        with pytest.raises(ConfigError, match=r"of at least [02]"):
            trainer_of(art_server, tmp_path, **bad)
