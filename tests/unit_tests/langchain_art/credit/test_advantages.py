import math
import statistics
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.credit.batch_plan import overlong_penalty
from langchain_art.credit.credit_assignment import ADVANTAGES, has_zero_variance, pool_advantages
from langchain_art.errors import InvalidRequest

REWARDS = st.lists(st.floats(-100, 100), max_size=12)
KINDS = st.sampled_from(sorted(ADVANTAGES))


def group_advantages(
    rewards_G: list[float], kind: str = "mean", tolerance: float = 1e-6
) -> list[float]:
    """Of runs with one value each; zeros if there is nothing to compare."""
    found = pool_advantages([[reward] for reward in rewards_G], kind, tolerance)
    return [0.0] * len(rewards_G) if found is None else [row_U[0] for row_U in found]


@given(REWARDS, KINDS)
def test_against_the_statistics_module(rewards_G: list[float], kind: str) -> None:
    rewards_G = [abs(r) for r in rewards_G] if kind == "maxrl" else rewards_G
    got_G = group_advantages(rewards_G, kind)
    assert len(got_G) == len(rewards_G)
    assert pool_advantages([rewards_G], kind) is None, "one run, however many values"
    if len(rewards_G) < 2 or max(rewards_G) - min(rewards_G) <= 1e-6:
        assert pool_advantages([[reward] for reward in rewards_G], kind) is None
        return
    mean, size = statistics.fmean(rewards_G), len(rewards_G)
    scale = {
        "mean": 1.0,
        "standardized": statistics.stdev(rewards_G) + 1e-4,
        "leave_one_out": (size - 1) / size,
        "maxrl": mean,
    }[kind]
    assert got_G == pytest.approx([(r - mean) / scale for r in rewards_G], rel=1e-9, abs=1e-9)
    assert math.fsum(got_G) == pytest.approx(0.0, abs=1e-9 * max(1.0, max(map(abs, got_G))))


@given(st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=5), min_size=2, max_size=5), KINDS)
def test_every_run_counts_once_in_a_pool_however_many_values_it_has(
    values_GU: list[list[float]], kind: str
) -> None:
    values_GU = [[abs(v) for v in row_U] for row_U in values_GU]
    got_GU = pool_advantages(values_GU, kind)
    if got_GU is None:
        flat = list(chain(*values_GU))
        assert max(flat) - min(flat) <= 1e-6
        return
    assert [len(row_U) for row_U in got_GU] == [len(row_U) for row_U in values_GU]
    assert math.fsum(statistics.fmean(row_U) for row_U in got_GU) == pytest.approx(0, abs=1e-6)
    twice_GU = pool_advantages([row_U * 2 for row_U in values_GU], kind)
    assert twice_GU is not None
    for once_U, doubled_U in zip(got_GU, twice_GU, strict=True):
        assert doubled_U == pytest.approx(once_U * 2, rel=1e-9, abs=1e-9)


def test_a_pool_with_several_values_for_a_run() -> None:
    # The runs' means are 2 and 0, the pool's is 1; over the four values it would be 1.5.
    assert pool_advantages([[1, 2, 3], [0]]) == [[0, 1, 2], [-1]]
    # Σ mean (v - 1)² = 5/3 + 1, over G - 1 = 1.
    std = math.sqrt(8 / 3) + 1e-4
    got_GU = pool_advantages([[1, 2, 3], [0]], "standardized")
    assert got_GU is not None and list(chain(*got_GU)) == pytest.approx(
        [0, 1 / std, 2 / std, -1 / std], abs=1e-15
    )
    assert pool_advantages([[1, 2, 3], [0]], "leave_one_out") == [[1, 2, 3], [-2]]
    assert pool_advantages([[1, 2, 3], [0]], "maxrl") == [[0, 1, 2], [-1]]


def test_numbers_that_are_none_and_overflow_are_refused_and_large_rewards_are_not() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidRequest, match="finite"):
            group_advantages([1.0, bad])
    with pytest.raises(InvalidRequest, match=r"-0\.5.*maxrl"):
        group_advantages([1.0, -0.5], "maxrl")
    with pytest.raises(InvalidRequest, match="scale the rewards down"):
        group_advantages([1.7e308, -1.7e308, -1.7e308])
    assert group_advantages([1e200, -1e200], "standardized") == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)]
    )


@pytest.mark.parametrize(
    ("values", "tolerance", "zero"),
    [
        ([], 1e-6, True),
        ([0.5, 0.5 + 0.9e-6], 1e-6, True),
        ([0.5, 0.5 + 1.1e-6], 1e-6, False),
    ],
)
def test_the_tolerance_is_an_edge(values: list[float], tolerance: float, zero: bool) -> None:
    assert has_zero_variance(values, tolerance) == zero


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0), (12288, 0), (13312, -0.25), (14336, -0.5), (16384, -1), (99999, -1)],
)
def test_long_runs_lose_up_to_1(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 16384, 4096) == penalty
