import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from langchain_art.training.learning_rates import FACTOR, MOST, next_rate
from langchain_art.training.records import StepRecord
from langchain_art.wire import LRSchedule, TrainConfig, TrainResult
from langchain_art.wire.policies import LARGEST_DEFAULT_RATE

BOUND, FIRST = 0.02, 6e-5
CONFIG = TrainConfig(max_kl=BOUND)


def record(
    step: int, rate: float, moved: float | None, kept: float = 1.0, entropy: float = 1.0
) -> StepRecord:
    metrics: dict[str, float] = {}
    if moved is not None:
        metrics = {"learning_rate": rate, "step_kl": moved, "step_kept": kept, "entropy": entropy}
    result = TrainResult(policy="p", version=step, metrics=metrics, excluded={}, nodes={})
    return StepRecord(step=step, results={"p": result}, reward_mean=0.5, reward_std=0.5, groups=4)


def fit(
    divergence: float, first: float, steps: int, shares: Sequence[float] = (), **options: Any
) -> tuple[list[float], list[StepRecord]]:
    """Rates and steps of a policy that a step moves by `divergence` times the rate's square."""
    config, made, rates = CONFIG.model_copy(update=options), list[StepRecord](), list[float]()
    for step in range(1, steps + 1):
        rates.append(next_rate(first, config, "p", made))
        used = rates[-1] * (shares[step - 1] if shares else 1.0)
        moved = divergence * used**2
        kept = min(1.0, math.sqrt(0.9 * BOUND / moved)) if moved > BOUND else 1.0
        made.append(record(step, used, moved * kept**2, kept))
    return [*rates, next_rate(first, config, "p", made)], made


@pytest.mark.parametrize("good", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("factor", [1 / 30, 1 / 3, 1.0, 3.0, 10.0])
def test_a_rate_that_is_wrong_ends_where_steps_are_about_as_long_as_their_bound(
    good: float, factor: float
) -> None:
    """`good` moves by the bound."""
    rates, made = fit(BOUND / good**2, factor * good, 12)
    assert BOUND / 2 <= made[-1].metrics["step_kl"] <= BOUND
    assert made[-1].metrics["step_kept"] >= 1 / 3 and rates[-1] == rates[-2]
    assert good / math.sqrt(2) <= rates[-1] <= good * 3
    assert [*rates] in ([*sorted(rates)], [*sorted(rates, reverse=True)]), "it never turns back"


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_plain_computation_with_fractions_gives(seed: int) -> None:
    drawn = random.Random(seed)
    made, rate, first = list[StepRecord](), Fraction(FIRST), 0
    for step in range(1, 61):
        found = next_rate(FIRST, CONFIG, "p", made)
        assert found == pytest.approx(float(rate), rel=1e-12)
        kept = drawn.choice([1.0, 1.0, 1.0, 0.8, 0.4, 0.3, 0.1, 0.0])
        moved = 0.0 if kept == 0 else BOUND * (drawn.random() if kept == 1 else 0.9)
        entropy = drawn.choice([Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8)])
        first = first or (entropy if moved else 0)
        made.append(record(step, found, moved, kept, float(entropy)))
        short = BOUND / 2 * min(1, entropy / first) if first else 0
        explores = first == 0 or entropy * 10 >= first
        up, down = kept == 1 and moved < short and explores, kept < 1 / 3
        rate *= Fraction(3, 2) if up else Fraction(2, 3) if down else 1
        rate = max(Fraction(FIRST) / 16, min(rate, 64 * Fraction(FIRST)))


def test_it_stays_within_its_bounds_and_as_it_is_without_one() -> None:
    assert fit(0.0001, FIRST, 30)[0][-1] == pytest.approx(MOST * FIRST)
    assert fit(0.0001, 2.4e-3, 30)[0][-1] == LARGEST_DEFAULT_RATE
    assert set(fit(1.0, FIRST, 5, max_kl=None)[0]) == {FIRST}


def test_a_schedule_is_not_made_up_for() -> None:
    """Of a rate that is right, short steps of warm-up and decay are no reason to raise it."""
    shares = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.5, 0.1, 0.1]
    schedule = LRSchedule(warmup_steps=5, decay_steps=9)
    rates, _ = fit(BOUND / FIRST**2, FIRST, len(shares), shares, schedule=schedule)
    assert set(rates) == {FIRST}
    rates, _ = fit(BOUND / 20 / FIRST**2, FIRST, len(shares), shares, schedule=schedule)
    assert rates[1] == FIRST * FACTOR and rates[-1] < 4 * FIRST


def test_policies_of_one_fit_have_rates_of_their_own() -> None:
    one = record(1, FIRST, 1e-5)
    other = TrainResult(policy="q", version=1, metrics={}, excluded={}, nodes={})
    both = one.model_copy(update={"results": {**one.results, "q": other}})
    assert next_rate(FIRST, CONFIG, "p", [both]) > next_rate(FIRST, CONFIG, "q", [both]) == FIRST
