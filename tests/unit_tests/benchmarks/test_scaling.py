"""The simulation of a fit against closed forms; the plan's arithmetic against another way to it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling.plan import DOCUMENTED, Needs, Workload, breaks, needs
from benchmarks.scaling.queues import Clock, Fit, Pool, simulate
from benchmarks.scaling.stored import measure, run_of
from langchain_art.gpu_memory import Shape
from langchain_art_server.config import sqlite_url


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


def test_a_seed_is_a_fit() -> None:
    fit = Fit(runs_at_once=64, slots=32, groups_a_step=4, learn=5.0)
    assert simulate(fit, 1, steps=5) == simulate(fit, 1, steps=5)
    assert simulate(fit, 1, steps=5) != simulate(fit, 2, steps=5)


SMALL = Workload(calls=5, first_prompt=900, group=4)


def test_tokens_are_those_of_the_runs_that_are_stored() -> None:
    _, records = run_of("run", SMALL)
    prompts = [len(one.prompt_token_ids) for one in records]
    assert sum(prompts) == SMALL.prompt_tokens
    assert prompts[-1] + SMALL.reply == SMALL.distinct_tokens
    for before, after in itertools.pairwise(records):
        grown = [*before.prompt_token_ids, *before.token_ids]
        assert after.prompt_token_ids[: len(grown)] == grown
    of_group = SMALL.first_prompt + SMALL.group * (SMALL.distinct_tokens - SMALL.first_prompt)
    assert SMALL.group * SMALL.learned_tokens == of_group


def test_an_adapter_is_as_large_as_the_doctor_says() -> None:
    shape = Shape(
        layers=36, hidden=4096, intermediate=12_288, queries=4096, keys=1024, vocabulary=151_936
    )
    assert DOCUMENTED.adapter_bytes == 4 * shape.lora_parameters(16)


def test_a_part_is_full_where_the_plan_says_that_it_breaks() -> None:
    load, known = Workload(), DOCUMENTED
    found = breaks(load, known)
    assert list(found.values()) == sorted(found.values())

    def at(part: str) -> Needs:
        [runs] = [runs for name, runs in found.items() if name.startswith(part)]
        return needs(replace(load, runs_a_day=runs), known, 0.0)

    assert at("one gateway").gateway_cores == pytest.approx(known.full)
    assert at("the writer").writer == pytest.approx(known.full)
    assert at("64 replicas").replicas in (64, 65)
    assert at("eight GPUs that learn").learners in (8, 9)
    assert at("64 GiB").hours_of_quota == pytest.approx(24)
    assert at("a disk of 4 TB").gigabytes_a_day == pytest.approx(4000)


async def test_a_run_is_measured_in_a_real_database(tmp_path: Path) -> None:
    """12 calls' rows, their links, the run, and its facts; room of deleted ones is used again."""
    stored = await measure(sqlite_url(tmp_path), Workload(), 16)
    calls = 2 * Workload().calls  # and the link of each
    assert calls < stored.rows_of_run <= calls + 6
    _, records = run_of("run-0", Workload())
    ids = 4 * sum(len(one.prompt_token_ids) for one in records)
    assert ids < stored.bytes_of_run < 4 * ids
    assert stored.grown_again < 1.2
