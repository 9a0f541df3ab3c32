from collections.abc import Sequence
from typing import Any

import pytest

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
