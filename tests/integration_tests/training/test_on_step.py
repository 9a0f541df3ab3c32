"""`Trainer.fit(on_step=)`: a hook gets each step's record, and what it raises loses nothing."""

import json
import traceback
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art.training.records import StepRecord
from langchain_art.training.trainer import Trainer
from tests.support.live_server import LiveServer
from tests.support.trainers import said, trainer_of


@pytest.fixture
def trainer(art_server: LiveServer, tmp_path: Path) -> Trainer:
    return trainer_of(art_server, tmp_path / "fit", group_size=2, groups_per_step=1)


def rollout(scenario: str) -> float:
    return 1.0  # no model is called: a step takes no time


def kept(trainer: Trainer) -> list[dict[str, Any]]:
    lines = (trainer.out_dir / "history.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hook_gets_each_record_that_is_kept(trainer: Trainer, is_async: bool) -> None:
    seen: list[StepRecord] = []

    def note(record: StepRecord) -> None:
        assert kept(trainer)[-1]["step"] == record.step  # it is on disk by now
        seen.append(record)

    async def note_later(record: StepRecord) -> None:
        note(record)

    hook = note_later if is_async else note
    fitted = trainer.fit_sync(rollout, ["a", "b"], steps=2, on_step=hook)
    assert tuple(seen) == fitted.history and [one.step for one in seen] == [1, 2]
    assert seen[0].reward_mean == 1.0 and seen[0].seconds["total"] > 0


def test_what_a_hook_raises_is_loud_and_loses_nothing(trainer: Trainer) -> None:
    def broken(record: StepRecord) -> None:
        raise KeyError("no such metric")

    with pytest.raises(KeyError) as caught:
        trainer.fit_sync(rollout, ["a", "b"], steps=2, on_step=broken)
    words = f"on_step raised after step 1. The step is trained and kept in {trainer.out_dir}"
    assert words in "".join(traceback.format_exception(caught.value))
    assert words in said(trainer) and "KeyError: 'no such metric'" in said(trainer)
    assert [one["step"] for one in kept(trainer)] == [1]
    seen: list[int] = []
    trainer.fit_sync(rollout, ["a", "b"], steps=2, on_step=lambda one: seen.append(one.step))
    assert seen == [2] and [one["step"] for one in kept(trainer)] == [1, 2]


def test_a_hook_that_cannot_be_called_is_refused_before_anything_runs(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="got on_step='wandb', expected a function of a step's"):
        trainer.fit_sync(rollout, ["a"], steps=1, on_step="wandb")
    assert not trainer.out_dir.exists()
