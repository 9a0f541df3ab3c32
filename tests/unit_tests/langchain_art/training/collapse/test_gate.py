"""Which versions a gate keeps, from the records of their evaluations."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from langchain_art.errors import ConfigError
from langchain_art.training.collapse.gate import check_gate, gate_sign, not_below
from langchain_art.training.results.records import EvalResult


def held_out(step: int, rewards: list[float], **known: Any) -> EvalResult:
    scenarios = {f"q-{i}": reward for i, reward in enumerate(rewards)}
    mean = statistics.fmean(rewards) if rewards else None
    known = {"versions": (f"p@{step}",), "mean": mean, "ci95": 0.1} | known
    return EvalResult(step=step, n=len(rewards), scenarios=scenarios, **known)


def naive(best: list[float], new: list[float]) -> bool:
    """The paired difference plus its 95 % interval is at least 0, in float64."""
    changes = [b - a for a, b in zip(best, new, strict=True)]
    mean = sum(changes) / len(changes)
    std = math.sqrt(sum((one - mean) ** 2 for one in changes) / (len(changes) - 1))
    return mean + 1.96 * std / math.sqrt(len(changes)) >= 0


def test_it_is_the_interval_of_the_paired_difference() -> None:
    rng, verdicts = random.Random(0), set[bool]()
    for _ in range(200):
        n = rng.choice([2, 8, 30])
        best = [rng.random() for _ in range(n)]
        new = [one + rng.gauss(-0.1, 0.3) for one in best]
        verdict = not_below(held_out(0, best), held_out(1, new))
        assert verdict == naive(best, new)
        verdicts.add(verdict)
    assert verdicts == {True, False}


def test_a_version_without_a_reward_is_below() -> None:
    assert not not_below(held_out(0, [0.5, 0.5]), held_out(1, []))
    assert not_below(held_out(0, [0.5, 0.5]), held_out(1, [0.5, 0.5]))


async def test_it_is_asked_about_the_best_that_was_kept_and_a_new_version() -> None:
    asked: list[tuple[str, str]] = []

    async def gate(best: EvalResult, new: EvalResult) -> bool:
        asked.append((best.version, new.version))
        return False

    evals = [held_out(0, [0.2, 0.4]), held_out(5, [0.5, 0.7]), held_out(10, [0.4, 0.4])]
    assert await gate_sign(gate, evals[:1], []) is None, "there is nothing to compare with"
    assert await gate_sign(None, evals, []) is None
    sign = await gate_sign(gate, evals, [])
    assert asked == [("p@5", "p@10")]
    assert sign is not None and sign.kind == "gate" and sign.keep == 0
    assert sign.words.startswith("step 10: the gate did not let p@10 pass: 0.400 ± 0.100 (n=2)")
    again = [*evals[:2], held_out(10, [0.0, 0.0], versions=("p@0",))]
    assert await gate_sign(gate, again, []) is None, "it was let pass, and serves again"


@pytest.mark.parametrize("wrong", ["True", 1, None, [True]])
def test_no_gate_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="expected True, False, or a function of two"):
        check_gate(wrong)


async def test_a_gate_that_says_nothing_is_refused() -> None:
    evals = [held_out(0, [0.2, 0.4]), held_out(5, [0.5, 0.7])]
    with pytest.raises(ConfigError, match=r"gate= returned None for p@5, expected True"):
        await gate_sign(lambda _best, _new: None, evals, [])  # pyright: ignore[reportArgumentType]
