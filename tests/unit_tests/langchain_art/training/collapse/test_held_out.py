"""A held-out reward that fell is seen in pairs of scenarios, and chance is not taken for a fall."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from langchain_art.training.collapse.recovery import AT_END, held_out_sign
from langchain_art.training.results.records import EvalResult, StepRecord
from langchain_art.wire import TrainResult


def evaluation(step: int, rewards: Sequence[float], version: int | None = None) -> EvalResult:
    """An evaluation of scenarios with these mean rewards."""
    return EvalResult(
        step=step,
        versions=(f"p@{step if version is None else version}",),
        mean=statistics.fmean(rewards) if rewards else None,
        ci95=None,
        n=len(rewards),
        scenarios={f"q-{i}": reward for i, reward in enumerate(rewards)},
    )


def steps(count: int) -> list[StepRecord]:
    return [
        StepRecord(
            step=step,
            results={"p": TrainResult(policy="p", version=step, metrics={}, excluded={})},
            reward_mean=0.5,
            reward_std=0.5,
            groups=16,
        )
        for step in range(1, count + 1)
    ]


def solved(count: int, of: int = 60) -> list[float]:
    return [float(i < count) for i in range(of)]


def test_an_end_below_the_best_kept_version_is_seen_and_keeps_it() -> None:
    """The best one is not the first, and the last is above the first."""
    evals = [evaluation(0, solved(6)), evaluation(2, solved(20)), evaluation(4, solved(18))]
    found = held_out_sign([*evals, evaluation(6, solved(10))], steps(6), at_end=True)
    assert found is not None and (found.kind, found.keep) == ("held_out", 2)
    assert "fell from 0.333 (p@2) to 0.167 (p@6): 10 scenarios fell and 0 rose" in found.words
    assert "Roll back to p@2" in found.advice


def test_within_a_fit_more_is_asked_for_than_at_its_end() -> None:
    evals = [evaluation(0, solved(20)), evaluation(2, solved(12))]  # 2^-8 = 0.004
    assert held_out_sign(evals, steps(2)) is None
    assert held_out_sign(evals, steps(2), at_end=True) is not None
    assert held_out_sign([evals[0], evaluation(2, solved(9))], steps(2)) is not None  # 2^-11


@pytest.mark.parametrize(
    "evals",
    [
        [],
        [evaluation(0, solved(20))],
        [evaluation(0, solved(20)), evaluation(2, [])],
        [evaluation(0, solved(20)), evaluation(2, solved(15))],  # 2^-5
        [evaluation(0, solved(20)), evaluation(2, solved(40))],
        [evaluation(0, solved(60), 1), evaluation(2, solved(0), 1)],  # the same version
        [evaluation(0, [1.0] * 6), evaluation(2, [0.0] * 6)],  # 2^-6
    ],
)
def test_what_may_be_chance_is_no_fall(evals: list[EvalResult]) -> None:
    assert held_out_sign(evals, steps(2), at_end=True) is None


def test_evaluations_without_scenarios_in_common_are_not_compared() -> None:
    last = evaluation(2, solved(0)).model_copy(update={"scenarios": {"other": 0.0}})
    assert held_out_sign([evaluation(0, solved(60)), last], steps(2), at_end=True) is None


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("count", "scenarios"), [(2, 100), (2, 12), (6, 50)])
def test_a_fit_that_gets_no_worse_is_seldom_taken_back(
    count: int, scenarios: int, samples: int
) -> None:
    """At most one end in a hundred; 400 fits, so that more than 14 have a probability of 2e-5."""
    seed = 5
    draw, false = random.Random(f"{seed}{count}{scenarios}{samples}"), 0
    for _ in range(400):
        rates = [draw.betavariate(0.7, 1.3) for _ in range(scenarios)]
        evals = [
            evaluation(
                step,
                [sum(draw.random() < p for _ in range(samples)) / samples for p in rates],
            )
            for step in range(count)
        ]
        false += held_out_sign(evals, [], at_end=True) is not None
    assert false <= 14, f"{seed=}: {false} false alarms in 400 fits at the level {AT_END}"


def test_a_policy_that_lost_half_is_mostly_seen() -> None:
    """0.33 and 0.17 of 100 questions with rates that vary: 200 fits of two evaluations."""
    seed = 6
    draw, seen = random.Random(seed), 0
    for _ in range(200):
        rates = [draw.betavariate(0.66, 1.34) for _ in range(100)]
        before, after = (
            evaluation(step, [float(draw.random() < p * left) for p in rates])
            for step, left in ((0, 1.0), (12, 0.5))
        )
        seen += held_out_sign([before, after], steps(12), at_end=True) is not None
    assert seen > 140, f"{seed=}: {seen} of 200"
