"""Folders of fits, as a `Trainer` would leave them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_art.training.fit_settings import FitSettings
from langchain_art.training.fit_state import History
from langchain_art.training.identity import FitIdentity
from langchain_art.training.records import EvalResult, StepRecord
from langchain_art.wire import TrainConfig, TrainResult


def identity(**changes: Any) -> FitIdentity:
    given: dict[str, Any] = {
        "policies": ("p",),
        "seed": 0,
        "config": {"learning_rate": 1e-5},
        "settings": {"group_size": 8},
        "rollout": {"rollout": "a", "score": "b"},
        "scenarios": "4 a",
        "eval_scenarios": "0 a",
    }
    return FitIdentity(**(given | changes))


def settings(**changes: Any) -> FitSettings:
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
    return FitSettings(**(given | changes))


def record(step: int, version: int, reward: float | None = 0.5) -> StepRecord:
    trained = TrainResult(policy="p", version=version, metrics={}, excluded={})
    return StepRecord(
        step=step, results={"p": trained}, reward_mean=reward, reward_std=0.1, groups=2
    )


def evaluation(mean: float | None, step: int) -> EvalResult:
    return EvalResult(mean=mean, ci95=0.1, n=4, versions=(f"p@{step}",), step=step)


def write_fit(
    folder: Path,
    rewards: Sequence[float],
    held_out: dict[int, float] | None = None,
    *,
    steps: int | None = None,
    **changes: Any,
) -> History:
    """A fit of as many steps as there are rewards, of `steps`; finished if these are all."""
    history = History(folder, identity(**changes))
    history.save(steps=len(rewards) if steps is None else steps)
    for step in range(len(rewards) + 1):
        if step:
            history.append(record(step, step, rewards[step - 1]))
        if held_out and step in held_out:
            history.append(evaluation(held_out[step], step))
    if history.state.steps == len(rewards):
        history.save(finished=len(rewards))
    return history
