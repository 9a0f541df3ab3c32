"""The simulation of a fit against closed forms."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from benchmarks.scaling.queues import Clock, Fit, Pool, simulate


def erlang_c(servers: int, load: float) -> float:
    """Probability that a customer of M/M/c waits; `load` is arrivals times service seconds."""
    waits = load**servers / math.factorial(servers) * servers / (servers - load)
    return waits / (sum(load**k / math.factorial(k) for k in range(servers)) + waits)


def finite_source(servers: int, sources: int, service: float, thinking: float) -> float:
    """Customers served a second in M/M/c//N: N sources that think, then ask one of c servers.

    Steady state of a birth-death process: births (N - k)/thinking, deaths min(k, c)/service.
    """
    weights = [1.0]
    for k in range(1, sources + 1):
        rate = (sources - k + 1) / thinking / (min(k, servers) / service)
        weights.append(weights[-1] * rate)
    busy = sum(min(k, servers) * one for k, one in enumerate(weights)) / sum(weights)
    return busy / service


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (4, 3.4), (16, 12.0)])
def test_a_queue_waits_as_erlang_says_and_little_holds(servers: int, load: float) -> None:
    draw, clock = random.Random(5), Clock()
    pool = Pool(clock, servers)
    stays: list[float] = []

    def arrive() -> None:
        came = clock.now
        pool.ask(draw.expovariate(1.0), lambda: None, lambda: stays.append(clock.now - came))
        clock.after(draw.expovariate(load), arrive)

    arrive()
    clock.run(lambda: pool.served >= 150_000)
    expected = erlang_c(servers, load) / (servers - load)
    assert pool.waited / pool.served == pytest.approx(expected, rel=0.08)
    assert pool.busy_seconds / clock.now == pytest.approx(load, rel=0.02)
    arrivals = pool.served / clock.now
    little = arrivals * sum(stays) / len(stays)
    assert pool.present_seconds / clock.now == pytest.approx(little, rel=0.01)


@pytest.mark.parametrize(("slots", "runs"), [(8, 12), (8, 40), (30, 40)])
def test_rollouts_without_a_learner_are_a_finite_source_queue(slots: int, runs: int) -> None:
    """Runs that never wait for a version are N sources: they think (tools), then ask a slot."""
    fit = Fit(
        runs_at_once=runs,
        slots=slots,
        group=1,
        groups_a_step=100,
        steps_ahead=10**6,
        learn=0.0,
        publish=0.0,
    )
    seen = simulate(fit, seed=3, steps=60)
    calls = seen.runs * fit.calls / seen.seconds
    expected = finite_source(slots, runs, fit.mean_call, fit.mean_tool)
    assert calls == pytest.approx(expected, rel=0.03)
    assert seen.slots_busy == pytest.approx(expected * fit.mean_call / slots, rel=0.03)


def test_no_step_ahead_is_never_stale_and_takes_turns() -> None:
    fit = Fit(runs_at_once=256, slots=64, groups_a_step=16, steps_ahead=0)
    seen = simulate(fit, seed=1, steps=6, warm_up=2)
    assert seen.mean_staleness == seen.oldest == 0
    assert seen.seconds > 6 * (fit.learn + fit.publish)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_staleness_has_its_bound_and_grows_with_it(ahead: int) -> None:
    """As many steps ahead as allowed when the learner is what is waited for."""
    fit = Fit(runs_at_once=1024, slots=128, groups_a_step=16, steps_ahead=ahead, learn=100.0)
    seen = simulate(fit, seed=2, steps=12)
    assert seen.learner_busy == pytest.approx(fit.learn / (fit.learn + fit.publish), abs=0.01)
    assert ahead - 1 < seen.mean_staleness <= ahead
    fewer = simulate(replace(fit, steps_ahead=ahead - 1), seed=2, steps=12)
    assert fewer.mean_staleness < seen.mean_staleness
