"""Intervals and tests against naive twins, published values and their own coverage."""

import itertools
import math
import random
from itertools import permutations
from statistics import fmean
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples.email_search.review import bootstrap
from langchain_art.errors import ConfigError
from langchain_art.statistics import intervals
from langchain_art.statistics.agreement import krippendorff_alpha, verdicts
from langchain_art.statistics.intervals import (
    Z95,
    best_of,
    best_of_scenarios,
    paired_test,
    sign_flip_tail,
    sign_test,
    unpaired_test,
    welch,
    wilson,
)
from langchain_art.wire import Review


def naive_wilson(successes: int, n: int) -> tuple[float, float]:
    """The rates p at which the score test of p is just not rejected, by bisection."""

    def rejected(p: float) -> bool:
        spread = math.sqrt(p * (1 - p) / n)
        return abs(successes / n - p) > Z95 * spread

    def edge(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
        return inside

    rate = successes / n
    return edge(rate, 0.0) if successes else 0.0, edge(rate, 1.0) if successes < n else 1.0


@pytest.mark.parametrize(
    ("successes", "n"), [(0, 1), (1, 1), (8, 10), (1, 40), (37, 96), (500, 999)]
)
def test_wilson_inverts_the_score_test(successes: int, n: int) -> None:
    assert wilson(successes, n) == pytest.approx(naive_wilson(successes, n), abs=1e-9)


def test_a_rate_is_inside_its_interval_whatever_is_rounded() -> None:
    for n in range(1, 100):
        for successes in range(n + 1):
            low, high = wilson(successes, n)
            assert 0.0 <= low <= successes / n <= high <= 1.0


def test_wilson_of_a_published_example() -> None:
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0000, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for counts, interval in published.items():
        assert wilson(*counts) == pytest.approx(interval, abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 4)])
def test_what_is_no_count_is_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"got {successes} of {n}"):
        wilson(successes, n)


def naive_p(differences: list[float]) -> float:
    signs = list(itertools.product((-1.0, 1.0), repeat=len(differences)))
    observed = abs(math.fsum(differences))
    sums = [abs(math.fsum(s * d for s, d in zip(one, differences, strict=True))) for one in signs]
    return sum(one >= observed - 1e-12 for one in sums) / len(signs)


def test_the_paired_test_counts_all_signs() -> None:
    chance = random.Random(1)
    for n in range(1, 11):
        differences = [chance.gauss(0.3, 1.0) for _ in range(n)]
        found = paired_test(differences)
        assert found.p_value == naive_p(differences)
        assert found.difference == pytest.approx(sum(differences) / n)
    assert paired_test([0.5]).ci95 is None
    assert paired_test([1.0] * 5).p_value == 2 / 2**5, "five are never significant"
    assert paired_test([0.0] * 4).p_value == 1.0
    mean, spread, _ = paired_test([0.0, 1.0, 2.0, 3.0])
    assert (mean, spread) == pytest.approx((1.5, Z95 * math.sqrt(5 / 3) / 2))


def test_drawn_signs_come_near_to_all_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(2)
    differences = [chance.gauss(0.4, 1.0) for _ in range(12)]
    exact = paired_test(differences).p_value
    monkeypatch.setattr(intervals, "EXACT", 0)
    drawn = paired_test(differences).p_value
    error = 4 * math.sqrt(exact * (1 - exact) / intervals.DRAWS)
    assert exact > 0.01 and abs(drawn - exact) < error
    assert paired_test(differences).p_value == drawn, "the same data, the same answer"
    assert paired_test([1.0] * 30).p_value == 1 / 10_001


def test_the_tail_of_sign_flips_counts_all_signs() -> None:
    draw = random.Random(4)
    for n in range(9):
        differences = [draw.choice([draw.uniform(-1, 1), 0.0, 0.25]) for _ in range(n)]
        sums = [
            math.fsum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product((1, -1), repeat=n)
        ]
        expected = sum(one >= math.fsum(differences) - 1e-12 for one in sums) / len(sums)
        assert sign_flip_tail(differences) == pytest.approx(expected, abs=1e-12), differences


@pytest.mark.parametrize(("rose", "fell"), [(15, 0), (15, 3), (30, 10), (60, 20)])
def test_the_tail_of_many_sign_flips_is_near_the_binomial(rose: int, fell: int) -> None:
    n = rose + fell
    exact = sum(math.comb(n, k) for k in range(rose, n + 1)) / 2**n
    found = sign_flip_tail([1.0] * rose + [-1.0] * fell + [0.0] * 100)
    assert exact / 3.18 <= found <= 3.18 * exact


def test_the_sign_test_is_the_sign_flip_test_of_signs() -> None:
    for wins, losses in itertools.product(range(8), range(7)):
        if wins + losses:
            expected = intervals.paired_test([1.0] * wins + [-1.0] * losses).p_value
            assert sign_test(wins, losses) == pytest.approx(expected, abs=1e-12)
    # Dixon and Mood 1946, table 1: of 20 signs, 5 or fewer of one kind are significant at 5 %.
    assert sign_test(15, 5) < 0.05 < sign_test(14, 6)
    assert sign_test(5, 15) == sign_test(15, 5)
    assert sign_test(0, 0) == 1.0
    assert 0 < sign_test(4000, 2000) < 1e-100


def test_the_unpaired_test_comes_near_to_all_assignments() -> None:
    before, after = [0.1, 0.4, 0.2, 0.6], [0.5, 0.9, 0.3, 0.8, 0.7]
    together, n = before + after, 9
    observed = abs(sum(after) / 5 - sum(before) / 4)
    extreme = total = 0
    for chosen in itertools.combinations(range(n), 5):
        mine = sum(together[i] for i in chosen)
        extreme += abs(mine / 5 - (sum(together) - mine) / 4) >= observed - 1e-12
        total += 1
    found = unpaired_test(before, after)
    exact = extreme / total
    error = 4 * math.sqrt(exact * (1 - exact) / intervals.DRAWS)
    assert abs(found.p_value - exact) < error and 0.01 < exact < 0.2
    assert found.difference == pytest.approx(0.64 - 0.325)
    with pytest.raises(ValueError, match="empty group"):
        unpaired_test([], [1.0])


def test_the_bootstrap_is_near_the_normal_interval_of_many_values() -> None:
    chance = random.Random(3)
    values = [chance.gauss(2.0, 1.0) for _ in range(400)]
    middle = sum(values) / 400
    half = Z95 * math.sqrt(sum((one - middle) ** 2 for one in values) / 400 / 400)
    low, high = bootstrap(values)
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=0.08 * half)
    few = values[:40]
    assert bootstrap(few) == bootstrap(few) != bootstrap(few, seed=1)


def test_the_bootstrap_of_two_values_is_that_of_their_three_means() -> None:
    """Of 0 and 1 the means 0, 1/2 and 1 are drawn with the chances 1/4, 1/2 and 1/4."""
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap([0.5] * 7) == (0.5, 0.5)


def test_the_mean_of_scenarios_equals_a_numpy_twin() -> None:
    numpy = pytest.importorskip("numpy")
    draw = random.Random(0)
    rewards = [[draw.gauss(0.3, 1) for _ in range(draw.randrange(4))] for _ in range(40)]
    known = [some for some in rewards if some]
    means = numpy.array([numpy.mean(some, dtype=numpy.float64) for some in known])
    found = intervals.mean_of_scenarios(rewards)
    assert found.mean == pytest.approx(numpy.mean(numpy.concatenate(known)), rel=1e-12)
    assert found.ci95 == pytest.approx(Z95 * means.std(ddof=1) / len(means) ** 0.5, rel=1e-12)
    assert (found.rewards, found.scenarios) == (sum(map(len, known)), len(known))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([], (None, None, 0, 0)), ([[], []], (None, None, 0, 0)), ([[0.5, 1.0]], (0.75, None, 2, 1))],
)
def test_without_two_scenarios_there_is_no_interval(
    rewards: list[list[float]], expected: tuple[object, ...]
) -> None:
    assert intervals.mean_of_scenarios(rewards) == expected


@pytest.mark.parametrize("seed", range(5))
def test_best_of_is_the_mean_over_all_subsets(seed: int) -> None:
    chance = random.Random(seed)
    rewards = [chance.choice((chance.uniform(-2, 2), 0.5)) for _ in range(chance.randint(2, 9))]
    for k in range(1, len(rewards) + 1):
        naive = [max(some) for some in itertools.combinations(rewards, k)]
        assert best_of(rewards, k) == pytest.approx(sum(naive) / len(naive), abs=1e-12), seed


@pytest.mark.parametrize("n", [1, 5, 200])
def test_best_of_rewards_of_0_and_1_is_pass_at_k(n: int) -> None:
    """Against the product form of Chen et al. 2021, figure 3."""
    for c in {0, 1, n // 2, n}:
        for k in {1, (n + 1) // 2, n}:
            missed = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0
            assert best_of([1.0] * c + [0.0] * (n - c), k) == pytest.approx(1 - missed, abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_best_of_more_runs_than_there_are_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"got k={k} of 2 rewards, expected 1 to 2"):
        best_of([0.0, 1.0], k)


def test_scenarios_tell_the_best_of_as_many_runs_as_each_has() -> None:
    found = best_of_scenarios([[1.0, 0.0, 0.0], [], [0.0] * 5])
    assert found == pytest.approx({1: 1 / 6, 2: 1 / 3, 3: 1 / 2})
    assert best_of_scenarios([[1.0], [0.0, 1.0]]) == best_of_scenarios([]) == {}


def test_the_rise_of_a_mean_is_welchs_statistic() -> None:
    assert welch((1.0, 2.0, 2), (11.0, 2.0, 2)) == pytest.approx(10 / 2**0.5)
    assert welch((1.0, 0.0, 2), (1.0, 0.0, 2)) == 0.0
    assert welch((1.0, 0.0, 2), (2.0, 0.0, 2)) == math.inf
    assert welch((2.0, 0.0, 2), (1.0, 0.0, 2)) == -math.inf


# --- several reviewers become one verdict ---------------------------------------------------------


UNITS = st.lists(st.lists(st.floats(-10, 10), max_size=5), max_size=8)


def naive_alpha(units: list[list[float]]) -> float | None:
    """The definition, pair by pair."""
    pairable = [unit for unit in units if len(unit) > 1]
    values = [value for unit in pairable for value in unit]
    n = len(values)
    if n == 0:
        return None
    expected = sum((a - b) ** 2 for a, b in permutations(values, 2)) / (n * (n - 1))
    if expected == 0:
        return None
    observed = sum(
        sum((a - b) ** 2 for a, b in permutations(unit, 2)) / (len(unit) - 1) for unit in pairable
    )
    return 1 - observed / n / expected


@given(UNITS)
def test_alpha_is_that_of_its_definition(units: list[list[float]]) -> None:
    spread = [value for unit in units if len(unit) > 1 for value in unit]
    assume(not spread or max(spread) - min(spread) > 1e-3 or max(spread) == min(spread))
    expected, found = naive_alpha(units), krippendorff_alpha(units)
    assert (expected is None) == (found is None)
    if expected is not None:
        assert found == pytest.approx(expected, abs=1e-9)


def test_alpha_of_a_published_example() -> None:
    # Krippendorff (2011), Computing Krippendorff's Alpha-Reliability, section E: interval data.
    a = [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None]
    b = [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3]
    c = [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None]
    d = [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None]
    units = [[float(v) for v in unit if v is not None] for unit in zip(a, b, c, d, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(0.849, abs=5e-4)


def say(id_: str, run: str, value: float | None, who: str | None, at: float = 1.0, **more: Any):
    base: dict[str, Any] = {"source": "page", "kind": "reward", "name": "human_reward"}
    given = {"id": id_, "trajectory": run, "value": value, "reviewer": who, "at": at}
    return Review(**(base | given | more))


def test_a_reviewer_counts_once_and_by_the_latest_word() -> None:
    found = verdicts(
        [
            say("1", "t", 0.0, "ann", at=1),
            say("2", "t", 1.0, "ann", at=2),
            say("3", "t", 0.5, "bob"),
            say("4", "t", 0.9, "bob", name="other"),
            say("5", "u", 1.0, "ann", at=1),
            say("6", "u", None, "ann", at=2),
            say("7", "v", 0.0, None),
            say("8", "v", 0.0, None),
            say("9", "t", 0.25, "ann", call_id="c"),
        ],
        "human_reward",
        min_agreement=-10,
    )
    by = {(one.trajectory, one.call_id): (one.value, one.reviewers) for one in found.all}
    assert by == {("t", None): (0.75, 2), ("v", None): (0.0, 2), ("t", "c"): (0.25, 1)}
    assert found.taken_back == 1


def test_reviewers_who_agree_no_better_than_chance_abstain() -> None:
    reviews = [
        say(f"{run}-{who}", run, value, who)
        for run, ann, bob in (("a", 1, 1), ("b", 0, 0), ("c", 1, 0), ("d", 1, 1))
        for who, value in (("ann", ann), ("bob", bob))
    ]
    reviews.append(say("alone", "e", 1.0, "ann"))
    found = verdicts(reviews, "human_reward")
    assert {one.trajectory for one in found.used} == {"a", "b", "d", "e"}
    [contested] = [one for one in found.all if one.abstains]
    assert (contested.trajectory, contested.value) == ("c", 0.5)
    assert contested.agreement is not None and contested.agreement < 0
    assert len(verdicts(reviews, "human_reward", min_agreement=-10).used) == 5
    with pytest.raises(ConfigError, match="at most 1"):
        verdicts(reviews, "human_reward", min_agreement=1.5)


@pytest.mark.parametrize(
    ("given", "decided"),
    [
        ((1, 0, 1), 1.0),  # the third decides, also between yes and no
        ((0, 1, 0), 0.0),
        ((1, 0, 0.9), 0.95),
        ((0, 0.5, 1), None),  # he stands between the two: nobody has a majority
        ((0, 1, 0, 1), None),
        ((0, 1, 1, 1, 0), 1.0),
        ((1, 0), None),
    ],
)
def test_where_reviewers_disagree_most_of_them_decide(
    given: tuple[float, ...], decided: float | None
) -> None:
    settled = [("a", (1, 1)), ("b", (0, 0)), ("d", (1, 1)), ("e", (0, 0))]
    reviews = [
        say(f"{run}-{who}", run, value, str(who))
        for run, values in [*settled, ("c", given)]
        for who, value in enumerate(values)
    ]
    [found] = [one for one in verdicts(reviews, "human_reward").all if one.trajectory == "c"]
    assert found.agreement is not None and found.agreement <= 0
    assert found.abstains == (decided is None) and found.reviewers == len(given)
    assert found.value == pytest.approx(fmean(given) if decided is None else decided)
