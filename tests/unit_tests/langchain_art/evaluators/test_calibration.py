"""Agreement with people: against a naive twin, scipy's figures, and what intervals promise."""

import io
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from langchain_art.errors import ArtError, ConfigError
from langchain_art.evaluators import agreement, agreement_table, calibrate
from langchain_art.wire import Trajectory, TrajectoryGroup
from tests.support.judges.groups import Says, group, no_verdict, run

Pair = tuple[float, float]
PAIRS = st.lists(
    st.tuples(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6)), min_size=2, max_size=12
)


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def naive_kendall(groups: list[list[Pair]]) -> float | None:
    alike = ours = theirs = 0
    for pairs in groups:
        for (a, b), (c, d) in itertools.combinations(pairs, 2):
            alike += sign(a - c) * sign(b - d)
            ours += a != c
            theirs += b != d
    return alike / math.sqrt(ours * theirs) if ours and theirs else None


def naive_spearman(groups: list[list[Pair]]) -> float | None:
    def ranks(values: list[float]) -> list[float]:
        return [
            sum(other < value for other in values) + (1 + values.count(value)) / 2
            for value in values
        ]

    top = left = right = 0.0
    for pairs in groups:
        x, y = ranks([p[0] for p in pairs]), ranks([p[1] for p in pairs])
        mx, my = sum(x) / len(x), sum(y) / len(y)
        top += sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
        left += sum((a - mx) ** 2 for a in x)
        right += sum((b - my) ** 2 for b in y)
    return top / math.sqrt(left * right) if left and right else None


@given(st.lists(PAIRS, min_size=1, max_size=4))
def test_several_groups_equal_the_naive_sums(groups: list[list[Pair]]) -> None:
    found = agreement(groups, resamples=3)
    for value, expected in (
        (found.kendall.value, naive_kendall(groups)),
        (found.spearman.value, naive_spearman(groups)),
    ):
        assert value == (None if expected is None else pytest.approx(expected, abs=1e-9))


def noisy(rng: random.Random, groups: int, size: int, noise: float) -> list[list[Pair]]:
    truths = [[rng.random() for _ in range(size)] for _ in range(groups)]
    return [[(t + rng.gauss(0, noise), t) for t in truth] for truth in truths]


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    exact = agreement(noisy(rng, 3000, 4, 0.3), resamples=1).kendall.value
    assert exact is not None
    held = 0
    for seed in range(100):
        found = agreement(noisy(rng, 40, 4, 0.3), resamples=200, seed=seed).kendall
        assert found.low is not None and found.high is not None
        held += found.low <= exact <= found.high
    assert 86 <= held <= 100  # 95 expected; at 0.95 fewer than 86 come once in ten thousand


def test_one_group_s_interval_resamples_its_runs_and_has_a_seed() -> None:
    pairs = noisy(random.Random(1), 1, 40, 0.3)
    found = agreement(pairs, seed=5)
    assert found == agreement(pairs, seed=5)
    assert found.spearman != agreement(pairs, seed=6).spearman
    low, value, high = found.spearman.low, found.spearman.value, found.spearman.high
    assert low is not None and value is not None and high is not None
    assert -1 <= low < value < high <= 1
    wide = agreement(pairs, seed=5, confidence=0.99).spearman
    assert wide.low is not None and wide.low < low


def test_an_interval_leaves_half_of_the_rest_on_either_side() -> None:
    pairs = noisy(random.Random(2), 60, 4, 0.3)
    widths: list[float] = []
    for confidence in (0.95, 0.6827):
        found = agreement(pairs, confidence=confidence, resamples=4000).kendall
        assert found.low is not None and found.high is not None
        widths.append(found.high - found.low)
    assert widths[0] / widths[1] == pytest.approx(1.96, rel=0.1)  # as of a normal distribution


def test_without_variance_nothing_is_claimed() -> None:
    found = agreement([[(0.5, 1.0), (0.5, 2.0)], [(0.5, 3.0)]])
    assert found.kendall.value is None and found.kendall.low is None
    assert str(found.kendall) == "undefined"
    assert (found.runs, found.groups, found.excluded) == (2, 1, 1)


@pytest.mark.parametrize(
    ("pairs", "options", "words"),
    [
        ([(1.0, 1.0)], {}, "none with two runs"),
        ([(math.nan, 1.0), (1.0, 2.0)], {}, "not finite"),
        ([(1.0, 1.0), (2.0, 2.0)], {"confidence": 1.0}, "confidence=1.0"),
        ([(1.0, 1.0), (2.0, 2.0)], {"resamples": 0}, "resamples=0"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    pairs: list[Pair], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        agreement([pairs], **options)


def rated(id: str, *scores: float | None) -> TrajectoryGroup:
    runs = [
        run(f"{id}-{n}", reward=score, scores={} if score is None else {"human": score})
        for n, score in enumerate(scores)
    ]
    return group(*runs, id=id)


async def test_a_judge_is_compared_without_seeing_what_people_said() -> None:
    seen: list[Trajectory] = []

    def length(shown: TrajectoryGroup) -> list[float]:
        seen.extend(shown.trajectories)
        if shown.id == "odd":
            raise no_verdict()
        return [float(n) for n, _ in enumerate(shown.trajectories)]

    groups = [rated("a", 0.1, 0.2, 0.3), rated("b", 0.3, 0.2, None), rated("odd", 0.1, 0.2)]
    found = await calibrate(length, groups)
    assert all(one.reward is None and not one.scores for one in seen)
    assert found.kendall.value == pytest.approx((3 - 1) / 4)
    assert (found.runs, found.groups, found.excluded, found.unjudged) == (5, 2, 3, 1)
    by_id = {one.id: 1.0 - n for g in groups for n, one in enumerate(g.trajectories)}
    assert (await calibrate(length, groups, by_id)).kendall.value == -1.0
    by_function = await calibrate(length, groups, lambda one: float(one.id[-1]))
    assert by_function.kendall.value == 1.0
    console = Console(file=io.StringIO(), width=160)
    console.print(agreement_table({"length": found}))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "length" in shown and "+0.500" in shown and "3 runs, 1 groups" in shown
    with pytest.raises(ArtError, match="no verdict"):
        await calibrate(Says("judge", error=no_verdict()), groups)
