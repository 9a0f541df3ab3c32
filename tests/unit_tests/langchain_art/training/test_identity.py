from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from langchain_art import ChatART
from langchain_art.errors import ConfigError
from langchain_art.evaluators import SumEvaluator, own_rewards
from langchain_art.training.addresses import folder_of, sampling_settings
from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.identity import FitIdentity, identity_of
from langchain_art.wire import LRSchedule, TrainConfig, TrajectoryGroup


def rollout(_: object) -> float:
    return 1.0


def judge(group: TrajectoryGroup) -> Sequence[float]:
    return [1.0 for _ in group.trajectories]


def told(
    scenarios: Sequence[Any] = ("a", "b"),
    evals: Sequence[Any] = (),
    models: dict[str, Any] | None = None,
    function: Any = rollout,
    **changes: Any,
) -> FitIdentity:
    given: dict[str, Any] = {
        "policies": ("p",),
        "trainable": {},
        "evaluator": None,
        "group_size": 8,
        "groups_per_step": 16,
        "concurrency": 64,
        "configs": {"p": TrainConfig()},
        "seed": 0,
        "lora": None,
        "max_failed": 0.5,
        "max_steps_ahead": 0,
        "dynamic_sampling_rounds": 0,
    }
    plan = FitSettings(**(given | changes))
    return identity_of(plan, models or {}, function, scenarios, evals)


def summed(weight: float) -> SumEvaluator:
    return SumEvaluator([(judge, weight), (own_rewards, 0.5)])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            told(configs={"p": TrainConfig(learning_rate=1e-4)}),
            "config.learning_rate None -> 0.0001",
        ),
        (
            told(configs={"p": TrainConfig(schedule=LRSchedule(warmup_steps=5))}),
            "config.schedule.warmup_steps 0 -> 5",
        ),
        (told(group_size=4), "group_size 8 -> 4"),
        (told(scenarios=["a"]), "scenarios (2 -> 1)"),
        (told(scenarios=["a", "c"]), "the content of scenarios"),
        (told(evals=["a"]), "eval_scenarios (0 -> 1)"),
        (told(policies=("q",), configs={"q": TrainConfig()}), "policy p -> q"),
        (told(function=lambda _: 2.0), "the rollout's source"),
        (told(evaluator=judge), "the evaluator's source"),
    ],
)
def test_what_differs_is_named(other: FitIdentity, words: str) -> None:
    assert told().differences(other) == [words]


def test_what_changes_no_result_may_differ() -> None:
    assert told().differences(told(concurrency=2, max_failed=1.0)) == []
    assert FitIdentity.model_validate_json(told().model_dump_json()) == told()


def test_a_fit_of_a_release_with_forks_goes_on_if_it_branched_nothing() -> None:
    old = told()
    old.settings["forks"] = None
    assert old.differences(told()) == []
    old.settings["forks"] = {"at": ["choose"]}
    assert old.differences(told()) == ["forks.at ['choose'] -> None"]


def test_settings_of_an_evaluator_count() -> None:
    assert told(evaluator=summed(1.0)).differences(told(evaluator=summed(1.0))) == []
    [words] = told(evaluator=summed(1.0)).differences(told(evaluator=summed(0.5)))
    assert words == "the evaluator's source (evaluator's settings)"


def test_settings_of_the_chat_model_count_where_it_is_given() -> None:
    def model(**settings: Any) -> dict[str, Any]:
        return sampling_settings(ChatART(model="p", base_url="http://h/v1", **settings))

    before, after = told(models=model(max_tokens=48)), told(models=model(max_tokens=16))
    assert before.differences(after) == ["p.max_tokens 48 -> 16"]
    assert before.differences(told()) == [], "a policy's name says nothing of settings"


def test_scenarios_that_are_no_json_count_by_their_id() -> None:
    class Odd:
        def __init__(self, id: str) -> None:
            self.id, self.random = id, random.Random()

    assert told([Odd("a")]) == told([Odd("a")])
    assert told([Odd("a")]) != told([Odd("b")])


def test_what_cannot_be_compared_is_known() -> None:
    assert told().unread == []
    assert told(function=len).unread == ["rollout"]


def test_the_folder_follows_from_the_name() -> None:
    assert folder_of("lr-3", None) == Path("out/lr-3")
    assert folder_of(None, None) == Path("out/train")
    assert folder_of(None, "/data/x") == Path("/data/x")
    with pytest.raises(ConfigError, match="leave one of them out"):
        folder_of("lr-3", "out/x")
    for wrong in ("a/b", "", "..", "-x"):
        with pytest.raises(ConfigError, match="got name="):
            folder_of(wrong, None)


def test_a_policy_with_a_config_of_its_own_is_told_apart_and_so_is_a_frozen_one() -> None:
    def of(**configs: TrainConfig) -> FitIdentity:
        return told(policies=("p", "q"), configs=configs)

    both = of(p=TrainConfig(), q=TrainConfig())
    assert both.config == told().config, "one config for all is not written twice"
    other = of(p=TrainConfig(), q=TrainConfig(learning_rate=1e-4))
    assert both.differences(other) == ["config.q.learning_rate None -> 0.0001"]
    assert both.differences(of(p=TrainConfig())) == ["q learns -> does not learn"]
    assert of(q=TrainConfig()).differences(both) == ["p does not learn -> learns"]
