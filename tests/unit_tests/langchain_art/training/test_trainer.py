import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_art.errors import ConfigError
from langchain_art.evaluators import RulerEvaluator
from langchain_art.rollout.gather import gather_sync
from langchain_art.training.trainer import Trainer
from langchain_art.wire import SFTConfig, TrainConfig
from tests.support.leased_agent import NAME, rollout


def refused(
    tmp_path: Path, scenarios: Any, *, policy: str = "p", **options: Any
) -> pytest.ExceptionInfo[ConfigError]:
    trainer = Trainer(policy, out_dir=tmp_path)
    with pytest.raises(ConfigError) as caught:
        trainer.fit_sync(lambda _: 1.0, scenarios, **{"steps": 1, **options})
    return caught


def test_what_is_no_list_of_scenarios_is_refused(tmp_path: Path) -> None:
    for scenarios in ("Which project?", {"id": "q"}, iter(["a"]), {"a", "b"}, 7, []):
        assert "train_scenarios: got" in str(refused(tmp_path, scenarios).value)
    found = refused(tmp_path, ["a"], eval_scenarios=b"x")
    assert "eval_scenarios: got" in str(found.value)
    with pytest.raises(ConfigError, match="scenarios: got"):
        Trainer("p", out_dir=tmp_path).evaluate_sync(lambda _: 1.0, 7)  # pyright: ignore[reportArgumentType]
    assert "put a single one in brackets" in str(refused(tmp_path, "Which project?").value)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        *(("concurrency", wrong, "an integer of at least 1") for wrong in (0, 1.5, "4")),
        ("group_size", 1, "an integer of at least 2"),
        ("groups_per_step", 0, "an integer of at least 1"),
        ("max_steps_ahead", -1, "an integer of at least 0"),
        ("dynamic_sampling_rounds", -1, "an integer of at least 0"),
        *(("seed", wrong, "an integer") for wrong in (None, 1.5, np.float64(2), np.arange(2))),
        *(("max_failed", wrong, "a fraction") for wrong in (-0.5, 50, float("nan"))),
        ("lora", {"rank": 4}, "a LoraConfig"),
    ],
)
def test_an_option_of_another_kind_is_refused(name: str, wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"got {name}={re.escape(repr(wrong))}, expected {words}"):
        Trainer("p", **{name: wrong})


@pytest.mark.parametrize("wrong", ["openai/o3", RulerEvaluator])
def test_what_is_no_evaluator_is_refused_before_any_run(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="as an evaluator, expected a function of a group"):
        Trainer("p", evaluator=wrong)


def test_numbers_of_steps_evaluations_and_gathers_are_checked(tmp_path: Path) -> None:
    for name in ("steps", "eval_every", "eval_samples"):
        found = refused(tmp_path, ["a"], eval_scenarios=["b"], **{name: -1})
        assert f"got {name}=-1, expected an integer of at least" in str(found.value)
    for alone in ({"eval_every": 5}, {"eval_samples": 3}):
        assert "and no eval_scenarios" in str(refused(tmp_path, ["a"], **alone).value)
    with pytest.raises(ConfigError, match="got samples=0, expected an integer"):
        Trainer("p", out_dir=tmp_path).evaluate_sync(lambda _: 1.0, ["a"], samples=0)
    for name in ("group_size", "concurrency"):
        with pytest.raises(ConfigError, match=f"got {name}=0, expected an integer"):
            gather_sync(lambda _: 1.0, ["a"], **{name: 0})


@pytest.mark.parametrize("policy", ["Qwen/Qwen2.5-0.5B", "-x", "a..b"])
def test_a_name_that_no_policy_can_have_is_refused_in_words(tmp_path: Path, policy: str) -> None:
    caught = refused(tmp_path, ["a"], policy=policy)
    found = str(caught.value)
    assert repr(policy) in found and "expected the name of a policy" in found
    assert "pydantic" not in found
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1 and "no running event loop" not in shown, shown


def test_each_policy_may_have_its_config_and_none_of_another_name() -> None:
    own = TrainConfig(learning_rate=1e-4)
    for config, words in (
        ({"writer": own, "critics": own}, "got config= with 'critics' and without 'critic'"),
        ({"writer": own}, "with no other names and without 'critic', expected an entry"),
        ({"writer": None, "critic": None}, "lets no policy learn"),
        ({"writer": own, "critic": SFTConfig()}, "got an SFTConfig"),
        ({"writer": own, "critic": 1e-4}, "got config=0.0001, expected a TrainConfig"),
    ):
        with pytest.raises(ConfigError, match=words):
            Trainer(["writer", "critic"], config=config)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("method", ["fit_sync", "evaluate_sync"])
def test_scenarios_and_rollouts_that_do_not_travel_are_refused(method: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"steps": 1} if method == "fit_sync" else {}
    mine = getattr(Trainer("tiny", out_dir=tmp_path, workers="server"), method)
    with pytest.raises(ConfigError, match=r"scenarios\[0\]: got tuple .* expected a JSON value"):
        mine(rollout, [(1, 2)], **more)
    with pytest.raises(ConfigError, match="expected a function of a module"):
        mine(lambda _: 1.0, ["q"], **more)
    here = getattr(Trainer("tiny", out_dir=tmp_path), method)
    with pytest.raises(ConfigError, match=r'expected the function, or Trainer\(workers="server"\)'):
        here(NAME, ["q"], **more)
