"""Batches: rollouts that run ahead of the training."""

from itertools import count
from pathlib import Path

import pytest

from langchain_art.tracing.run import Run
from langchain_art.wire import TrainConfig
from tests.support.chat_models import model_of
from tests.support.live_server import LiveServer
from tests.support.trainers import asking, trainer_of

#: So that runs which are some versions old agree with the learner.
SMALL_STEPS = TrainConfig(learning_rate=2e-5)
SCENARIOS = [{"id": f"c-{n}", "question": f"When is audit {n}?"} for n in range(8)]


@pytest.mark.parametrize("max_steps_ahead", [0, 2])
async def test_how_far_rollouts_run_ahead(
    art_server: LiveServer, tmp_path: Path, max_steps_ahead: int
) -> None:
    started = 0
    most: dict[int, int] = {}  # steps that were trained when a group began -> groups that had
    options = {"group_size": 2, "config": SMALL_STEPS, "max_steps_ahead": max_steps_ahead}
    trainer, numbers = trainer_of(art_server, tmp_path / "fit", **options), count()
    inner = asking(lambda *_: float(next(numbers)), model_of(art_server, trainer.policy))
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
