from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import InvalidRequest
from langchain_art.wire import LRSchedule
from langchain_art_server.algorithms.loss.lr_schedule import learning_rate


@pytest.mark.parametrize(
    ("given", "steps", "expected"),
    [
        ({}, range(1, 50), [1.0] * 49),
        ({"warmup_steps": 4}, range(1, 7), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"decay_steps": 4, "final_fraction": 0.0}, range(1, 7), [0.75, 0.5, 0.25, 0.0, 0.0, 0.0]),
        ({"warmup_steps": 2, "decay_steps": 12}, (1, 2, 7, 12, 9999), [0.5, 1, 0.55, 0.1, 0.1]),
    ],
)
def test_by_hand(given: dict[str, Any], steps: Sequence[int], expected: list[float]) -> None:
    schedule = LRSchedule(**{"final_fraction": 0.1} | given)
    found = [learning_rate(1e-3, schedule, step) for step in steps]
    assert found == pytest.approx([1e-3 * share for share in expected], rel=1e-12)


@given(st.integers(0, 20), st.integers(1, 20), st.floats(0, 1), st.integers(1, 60))
def test_it_stays_between_its_ends(warmup: int, decay: int, final: float, step: int) -> None:
    schedule = LRSchedule(warmup_steps=warmup, decay_steps=warmup + decay, final_fraction=final)
    now, then = (learning_rate(0.1, schedule, at) for at in (step, step + 1))
    assert 0 <= now <= 0.1 * (1 + 1e-12)
    assert now <= then if step < warmup else now >= then
    if step >= warmup + decay:
        assert now == pytest.approx(0.1 * final, abs=1e-15)


def test_step_zero_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="step=0"):
        learning_rate(0.1, LRSchedule(), 0)
