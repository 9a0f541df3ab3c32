"""Difficulty pools: what is always or never solved is drawn less, and none is forgotten."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from langchain_art.rollout.scenarios import draw
from langchain_art.training.records import GroupResult
from langchain_art.training.step_batch import FLOOR, DifficultyPools, Drawing

SEED = 3


def scenarios(rates: Mapping[str, float]) -> list[dict[str, str]]:
    return [{"id": name} for name in rates]


def simulated(
    rates: Mapping[str, float], steps: int, *, pools: bool, groups: int = 16, size: int = 8
) -> tuple[list[list[GroupResult]], DifficultyPools, int]:
    """Steps of groups of runs that are solved at the scenarios' rates, and places drawn."""
    chance, known = random.Random(SEED), DifficultyPools(scenarios(rates), SEED)
    drawing = Drawing(scenarios(rates), SEED, 0, known if pools else None)
    made: list[list[GroupResult]] = []
    for step in range(steps):
        results: list[GroupResult] = []
        for n in range(step * groups, (step + 1) * groups):
            name = drawing.scenario(n)["id"]
            solved = sum(chance.random() < rates[name] for _ in range(size))
            flat = solved in (0, size)
            results.append(GroupResult(scenario=name, reward=solved / size, flat=flat))
        known.add(results)
        made.append(results)
    return made, known, drawing.after(steps * groups)


#: A third each is always solved, never solved, and in between.
RATES = {f"q-{i}": (1.0, 0.0, 0.5)[i % 3] for i in range(90)}


def test_fewer_groups_are_flat() -> None:
    shares: dict[bool, float] = {}
    for pools in (False, True):
        made, _, _ = simulated(RATES, 60, pools=pools)
        late = [one.flat for results in made[20:] for one in results]
        shares[pools] = sum(late) / len(late)
    assert shares[False] == pytest.approx(2 / 3, abs=0.05), f"seed {SEED}"
    assert shares[True] < 0.3, f"seed {SEED}: {shares}"


def test_none_is_forgotten_and_each_has_its_pool() -> None:
    """About 160 turns each after the first steps: not drawn at all has a probability of 5e-8."""
    made, pools, places = simulated(RATES, 400, pools=True)
    drawn = Counter(one.scenario for results in made[40:] for one in results)
    assert drawn.keys() == RATES.keys(), f"seed {SEED}"
    mean = {rate: sum(n for q, n in drawn.items() if RATES[q] == rate) / 30 for rate in (0, 0.5, 1)}
    for rate in (0, 1):
        assert 0.8 * FLOOR < mean[rate] / mean[0.5] < 1.2 * FLOOR, f"seed {SEED}: {mean}"
    assert pools.counts() == {"new": 0, "mixed": 30, "easy": 30, "hard": 30}
    assert places > 400 * 16, "what was passed over counts as places"


def test_a_group_with_variance_puts_a_scenario_back() -> None:
    pools = DifficultyPools([{"id": "a"}, {"id": "b"}], SEED)
    flat = GroupResult(scenario="a", reward=0.0, flat=True)
    shares = [pools.share("a")]
    for _ in range(6):
        pools.add([flat])
        shares.append(pools.share("a"))
    assert shares == [1, 0.5, 0.25, 0.125, FLOOR, FLOOR, FLOOR]
    assert pools.counts() == {"new": 1, "mixed": 0, "easy": 1, "hard": 0}
    pools.add([flat.model_copy(update={"flat": False, "reward": 0.5})])
    assert pools.share("a") == pools.share("b") == 1
    assert pools.counts() == {"new": 1, "mixed": 1, "easy": 0, "hard": 0}


def test_what_was_drawn_is_drawn_again_by_a_fit_that_goes_on() -> None:
    made, pools, place = simulated(RATES, 10, pools=True)
    whole, _, _ = simulated(RATES, 11, pools=True)
    again = DifficultyPools(scenarios(RATES), SEED)
    for results in made:
        again.add(results)
    drawing = Drawing(scenarios(RATES), SEED, place, again)
    assert [drawing.scenario(n)["id"] for n in range(16)] == [one.scenario for one in whole[10]]
    assert again.counts() == pools.counts()


def test_without_pools_every_place_is_drawn_and_each_epoch_has_all() -> None:
    some = scenarios(dict(list(RATES.items())[:5]))
    drawing = Drawing(some, SEED, 5, None)
    assert [drawing.scenario(n) for n in range(10)] == [draw(some, 5 + n, SEED) for n in range(10)]
    assert {drawing.scenario(n)["id"] for n in range(5)} == {one["id"] for one in some}
    assert [drawing.after(n) for n in (0, 1, 10)] == [5, 6, 15]
