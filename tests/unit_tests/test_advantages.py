from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import InvalidRequest
from langchain_art.wire import TrainConfig
from langchain_art_server.algorithms.advantages import ADVANTAGES, group_advantages, is_flat

REWARDS = st.lists(st.floats(-100, 100), max_size=12)


@pytest.mark.parametrize(
    ("rewards_G", "mean_G", "sample_std"),
    [
        ([1, 0, 1, 0], [0.5, -0.5, 0.5, -0.5], 0.5773502691896257),
        ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25], 0.5),
        ([1, 1, 1, 1], [0, 0, 0, 0], None),
        ([1], [0], None),
        ([], [], None),
    ],
)
def test_vectors(rewards_G: list[float], mean_G: list[float], sample_std: float | None) -> None:
    assert group_advantages(rewards_G, "mean") == pytest.approx(mean_G, abs=1e-15)
    # TRL adds 1e-4 to the sample standard deviation.
    expected_G = [a / (sample_std + 1e-4) if sample_std else 0.0 for a in mean_G]
    assert group_advantages(rewards_G, "standardized") == pytest.approx(expected_G, rel=1e-12)


def test_the_standardized_vectors_of_the_literature() -> None:
    assert group_advantages([1, 0, 1, 0], "standardized") == pytest.approx(
        [0.8660, -0.8660, 0.8660, -0.8660], abs=2e-4
    )
    assert group_advantages([1, 0, 0, 0], "standardized") == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], abs=4e-4
    )


@given(REWARDS, st.sampled_from(sorted(ADVANTAGES)))
def test_against_the_statistics_module(rewards_G: list[float], kind: str) -> None:
    got_G = group_advantages(rewards_G, kind)
    assert len(got_G) == len(rewards_G)
    if len(rewards_G) < 2 or max(rewards_G) - min(rewards_G) <= 1e-6:
        assert got_G == [0.0] * len(rewards_G)
        return
    mean = statistics.fmean(rewards_G)
    scale = statistics.stdev(rewards_G) + 1e-4 if kind == "standardized" else 1.0
    assert got_G == pytest.approx([(r - mean) / scale for r in rewards_G], rel=1e-9, abs=1e-9)
    assert math.fsum(got_G) == pytest.approx(0.0, abs=1e-9)


@given(REWARDS.filter(lambda r: len(r) > 1), st.randoms())
def test_the_order_of_runs_does_not_matter(rewards_G: list[float], random) -> None:
    order = list(range(len(rewards_G)))
    random.shuffle(order)
    plain_G = group_advantages(rewards_G)
    shuffled_G = group_advantages([rewards_G[i] for i in order])
    assert shuffled_G == pytest.approx([plain_G[i] for i in order], abs=1e-12)


def test_a_flat_group_is_exactly_zero_and_the_tolerance_is_an_edge() -> None:
    assert group_advantages([0.1] * 3, "standardized") == [0.0] * 3
    assert group_advantages([0.5, 0.5 + 0.9e-6], "standardized") == [0.0, 0.0]
    assert is_flat([0.5, 0.5 + 0.9e-6])
    assert not is_flat([0.5, 0.5 + 1.1e-6])
    assert not is_flat([0.5, 0.6])
    assert is_flat([0.5, 0.6], tolerance=0.2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    for rewards_G in ([bad], [1.0, bad], [bad, bad]):
        with pytest.raises(InvalidRequest, match="finite"):
            group_advantages(rewards_G)


def test_overflow_is_refused_and_large_rewards_are_not() -> None:
    with pytest.raises(InvalidRequest, match="scale the rewards down"):
        group_advantages([1.7e308, -1.7e308, -1.7e308])
    assert group_advantages([1e200, -1e200], "standardized") == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)]
    )


def test_every_kind_of_the_wire_is_there_and_no_other() -> None:
    offered = TrainConfig.model_json_schema()["properties"]["advantage"]["enum"]
    assert sorted(ADVANTAGES) == sorted(offered)
    with pytest.raises(InvalidRequest, match="rloo"):
        group_advantages([1, 0], "rloo")
