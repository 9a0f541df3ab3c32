"""`benchmarks.efficiency`: when a fit ends, and the figures of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import efficiency
from benchmarks.efficiency import BASELINE, Case, cases, config_of, enough, figures, last
from benchmarks.learning.tasks import TASKS, Task
from langchain_art.wire import LoraConfig, TrainConfig
from langchain_art.wire.policies import default_learning_rate

BANDIT = TASKS["bandit"]


def test_the_baseline_names_every_setting_that_may_change_a_step() -> None:
    free = {"kind", "learning_rate", "tokens_per_microbatch"}
    assert set(BASELINE) == set(TrainConfig.model_fields) - free
    baseline, default, faster = (
        config_of(BANDIT, one) for one in ("baseline", "default", "faster")
    )
    assert baseline.max_kl is None and baseline.learning_rate == pytest.approx(6.78e-3, rel=1e-3)
    rate = default_learning_rate(BANDIT.parameters, LoraConfig())
    assert default == TrainConfig(tokens_per_microbatch=4096)
    assert faster == default.model_copy(update={"learning_rate": 3 * rate})


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_task_has_its_base_models_number_of_parameters(task: Task, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(task.base_model(tmp_path))
    assert model.num_parameters() == task.parameters


def test_a_mean_needs_its_whole_window() -> None:
    assert last([0.1, 0.2], 3) is None
    assert last([9.0, 0.1, 0.2, 0.3], 3) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("variant", "made", "came", "expected"),
    [
        ("baseline", 384, True, True),
        ("baseline", BANDIT.least, False, False),
        ("default", BANDIT.least - 64, True, False),
        ("default", BANDIT.least, False, False),
        ("default", BANDIT.least, True, True),
        ("slower", BANDIT.least, False, True),
        ("faster", BANDIT.least - 64, True, False),
    ],
)
def test_a_fit_goes_on_until_it_has_shown_what_is_asked(
    variant: str, made: int, came: bool, expected: bool
) -> None:
    assert enough(variant, BANDIT, made, came) is expected


def test_figures_are_medians_over_seeds_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficiency, "OUT", tmp_path)

    def put(task: str, variant: str, seed: int, arrived: int | None, **more: Any) -> None:
        found = {"arrived": arrived, "rollouts": 2000, "first": 0.2, "last": 0.6, "rollbacks": []}
        Case(task, variant, seed).path.write_text(json.dumps(found | more))

    for seed, (old, new) in enumerate([(1000, 500), (1200, 800), (3000, 600)]):
        put("bandit", "baseline", seed, old)
        put("bandit", "default", seed, new)
    put("demo", "baseline", 0, None)
    put("demo", "default", 0, 500, rollbacks=[[3, 1, "fell"]])
    put("demo", "faster", 0, None, rollbacks=[[3, 1, "fell"]])
    put("demo", "slower", 0, None, last=0.1)
    found = figures()
    assert found["rollouts_ratio_bandit"] == 1200 / 600
    assert found["rollouts_ratio_demo"] == 2000 / 500
    assert found["rollouts_ratio"] == 3.0
    assert found["collapses"] == 1 and found["fits_default"] == 4
    assert found["baseline_not_arrived"] == 1
    assert found["ends_above_start"] == 0.5


def test_a_run_that_is_stopped_has_as_many_of_each_task() -> None:
    first = cases(seeds=(0, 1))[: len(TASKS) * 4]
    assert {one.seed for one in first} == {0} and len({one.name for one in first}) == 12
