import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.errors import InvalidRequest
from langchain_art.wire import LRSchedule
from langchain_art_server.algorithms.loss.lr_schedule import learning_rate


def test_the_worked_example() -> None:
    schedule = LRSchedule(warmup_steps=2, decay_steps=12, final_fraction=0.1)
    got = [learning_rate(1e-3, schedule, step) for step in (1, 2, 7, 12, 13, 10_000)]
    assert got == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4, 1e-4, 1e-4], rel=1e-12)


def test_without_warm_up_and_decay_it_is_constant() -> None:
    assert {learning_rate(0.5, LRSchedule(), step) for step in range(1, 50)} == {0.5}


def test_warm_up_alone_and_decay_alone() -> None:
    warm = LRSchedule(warmup_steps=4)
    assert [learning_rate(1.0, warm, s) for s in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    fall = LRSchedule(decay_steps=4, final_fraction=0.0)
    assert [learning_rate(1.0, fall, s) for s in range(1, 7)] == [0.75, 0.5, 0.25, 0.0, 0.0, 0.0]


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
