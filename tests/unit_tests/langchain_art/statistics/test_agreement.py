"""Several reviewers become one verdict, and disagreement is measured as its source defines it."""

from itertools import permutations
from statistics import fmean
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from langchain_art.errors import ConfigError
from langchain_art.statistics.agreement import krippendorff_alpha, verdicts
from langchain_art.wire import Review

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
