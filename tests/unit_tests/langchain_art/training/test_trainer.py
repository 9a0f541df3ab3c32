import io
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from langchain_art.errors import ConfigError
from langchain_art.evaluators import RulerEvaluator
from langchain_art.rollout.gather import gather_sync
from langchain_art.training.fit_settings import Schedule
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


@pytest.mark.parametrize(
    "scenarios", ["Which project?", b"x", {"id": "q"}, iter(["a"]), {"a", "b"}, 7]
)
def test_what_is_no_list_of_scenarios_is_refused(tmp_path: Path, scenarios: Any) -> None:
    assert "train_scenarios: got" in str(refused(tmp_path, scenarios).value)
    found = refused(tmp_path, ["a"], eval_scenarios=scenarios)
    assert "eval_scenarios: got" in str(found.value)
    with pytest.raises(ConfigError, match="scenarios: got"):
        Trainer("p", out_dir=tmp_path).evaluate_sync(lambda _: 1.0, scenarios)
    assert "train_scenarios: got none" in str(refused(tmp_path, []).value)
    assert "put a single one in brackets" in str(refused(tmp_path, "Which project?").value)


NUMBERS = ("group_size", "groups_per_step", "max_steps_ahead", "concurrency")


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        *((name, wrong, "an integer of at l") for name in NUMBERS for wrong in (-1, 1.5, "4")),
        *(("seed", wrong, "an integer") for wrong in (None, "x", 1.5, np.float64(2), np.arange(2))),
        *(("max_failed", wrong, "a fraction") for wrong in (-0.5, 50, float("nan"))),
        ("lora", {"rank": 4}, "a LoraConfig"),
    ],
)
def test_an_option_of_another_kind_is_refused(name: str, wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"got {name}={re.escape(repr(wrong))}, expected {words}"):
        Trainer("p", **{name: wrong})


@pytest.mark.parametrize("wrong", ["openai/o3", RulerEvaluator, 0.5])
def test_what_is_no_evaluator_is_refused_before_any_run(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="as an evaluator, expected a function of a group"):
        Trainer("p", evaluator=wrong)


@pytest.mark.parametrize("name", ["steps", "eval_every", "eval_samples"])
def test_a_number_of_steps_is_an_integer_in_range(tmp_path: Path, name: str) -> None:
    for wrong in (-1, 1.5, "3"):
        found = refused(tmp_path, ["a"], eval_scenarios=["b"], **{name: wrong})
        assert f"got {name}={wrong!r}, expected an integer of at least" in str(found.value)


def test_numbers_of_evaluations_and_of_gathers_are_checked(tmp_path: Path) -> None:
    for wrong in (0, 1.5):
        with pytest.raises(ConfigError, match=f"got samples={wrong}, expected an integer"):
            Trainer("p", out_dir=tmp_path).evaluate_sync(lambda _: 1.0, ["a"], samples=wrong)  # pyright: ignore[reportArgumentType]
        for name in ("group_size", "concurrency"):
            with pytest.raises(ConfigError, match=f"got {name}={wrong}, expected an integer"):
                gather_sync(lambda _: 1.0, ["a"], **{name: wrong})


def test_steps_and_samples_of_numpy_are_kept_as_plain_integers() -> None:
    one: Any = np.int64(1)
    schedule = Schedule(steps=one, eval_scenarios=["a"], eval_every=one, eval_samples=one)
    kept = [schedule.steps, schedule.eval_every, schedule.eval_samples]
    assert [type(count) for count in kept] == [int] * 3


@pytest.mark.parametrize("alone", [{"eval_every": 5}, {"eval_samples": 3}])
def test_options_of_evaluations_need_held_out_scenarios(
    tmp_path: Path, alone: dict[str, int]
) -> None:
    assert "and no eval_scenarios" in str(refused(tmp_path, ["a"], **alone).value)


@pytest.mark.parametrize("policy", ["Qwen/Qwen2.5-0.5B", "My Agent", "-x", "a..b"])
def test_a_name_that_no_policy_can_have_is_refused_in_words(tmp_path: Path, policy: str) -> None:
    found = str(refused(tmp_path, ["a"], policy=policy).value)
    assert repr(policy) in found and "expected the name of a policy" in found
    assert "pydantic" not in found


def test_an_error_in_a_plain_program_has_one_traceback(tmp_path: Path) -> None:
    shown = "".join(traceback.format_exception(refused(tmp_path, "text").value))
    assert shown.count("Traceback") == 1, shown
    assert "no running event loop" not in shown


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


def test_a_hook_for_advantages_meets_the_config_of_each_policy() -> None:
    plain, turns = TrainConfig(), TrainConfig(credit="turn")
    with pytest.raises(ConfigError, match=r"together with TrainConfig\(credit=…\)"):
        Trainer(
            ["writer", "critic"],
            config={"writer": plain, "critic": turns},
            advantages=lambda group: [],
        )


def trainer(out: Path, **options: Any) -> Trainer:
    return Trainer("tiny", out_dir=out, console=Console(file=io.StringIO()), **options)


@pytest.mark.parametrize("method", ["fit_sync", "evaluate_sync"])
def test_scenarios_and_rollouts_that_do_not_travel_are_refused(method: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"steps": 1} if method == "fit_sync" else {}
    mine = getattr(trainer(tmp_path, workers="server"), method)
    with pytest.raises(ConfigError, match=r"scenarios\[0\]: got tuple .* expected a JSON value"):
        mine(rollout, [(1, 2)], **more)
    with pytest.raises(ConfigError, match="expected a function of a module"):
        mine(lambda _: 1.0, ["q"], **more)
    here = getattr(trainer(tmp_path), method)
    with pytest.raises(ConfigError, match=r'expected the function, or Trainer\(workers="server"\)'):
        here(NAME, ["q"], **more)
