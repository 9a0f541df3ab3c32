import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from langchain_art.errors import ArtError
from langchain_art_server.backends.models.adapter_files import WEIGHTS_FILE
from langchain_art_server.backends.peft.adapter_io import ADAM_EPS, adam_betas
from langchain_art_server.jobs.swap_check import MOST_RATES, check_weights

A, B = "layer.lora_A.weight", "layer.lora_B.weight"


def most_of_adam(betas: tuple[float, float]) -> float:
    return (1 - betas[0]) / math.sqrt((1 - betas[1]) * (1 - betas[0] ** 2 / betas[1]))


def naive_adam(gradients: list[float], momentum: float, rate: float = 1.0) -> list[float]:
    """What AdamW adds to one weight in each update, as its paper writes it."""
    (one, two), m, v, moves = adam_betas(momentum), 0.0, 0.0, list[float]()
    for t, gradient in enumerate(gradients, 1):
        m, v = one * m + (1 - one) * gradient, two * v + (1 - two) * gradient**2
        moves.append(rate * (m / (1 - one**t)) / (math.sqrt(v / (1 - two**t)) + ADAM_EPS))
    return moves


MOMENTS = st.floats(0, 0.999)


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=40), MOMENTS)
def test_no_gradients_move_a_weight_further(gradients: list[float], momentum: float) -> None:
    most = most_of_adam(adam_betas(momentum)) * (1 + 1e-9)  # of rounding
    assert max(map(abs, naive_adam(gradients, momentum))) <= most


@given(MOMENTS)
def test_no_momentum_allows_more_than_is_said(momentum: float) -> None:
    assert 2.2 < most_of_adam(adam_betas(momentum)) < 3.17 < MOST_RATES


@pytest.mark.parametrize(("momentum", "said"), [(0.9, 2.35), (0.6, 2.53)])
def test_the_bound_of_the_gradients_that_move_it_furthest_is_near(
    momentum: float, said: float
) -> None:
    one, two = adam_betas(momentum)
    # Equality in Cauchy's and Schwarz's.
    worst = [(one / two) ** -t for t in range(round(10 / (1 - two)))]
    assert naive_adam(worst, momentum)[-1] == pytest.approx(most_of_adam((one, two)), rel=1e-3)
    assert most_of_adam((one, two)) == pytest.approx(said, abs=5e-3)


class Pair:
    def __init__(self, folder: Path) -> None:
        self.parent, self.child = folder / "1", folder / "2"
        self.weights = {A: np.full((2, 8), 0.05, np.float32), B: np.zeros((8, 2), np.float32)}
        for each in (self.parent, self.child):
            each.mkdir()
            save_file(self.weights, each / WEIGHTS_FILE)

    def save(self, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        changed = {name: value.copy() for name, value in self.weights.items()}
        change(changed)
        save_file(changed, self.child / WEIGHTS_FILE)

    def check(self, rate: float = 1e-3, updates: int = 1) -> float:
        return check_weights(self.parent, self.child, rate, updates)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_the_change_is_the_root_mean_square(pair: Pair) -> None:
    assert pair.check(updates=0) == 0.0
    pair.save(lambda found: found[B].__setitem__(slice(None), 2e-3))
    assert pair.check() == pytest.approx(2e-3 / math.sqrt(2), rel=1e-6)
    pair.save(lambda found: found[A].__iadd__(np.float32(4e-9)))  # less than its last digit
    assert pair.check(rate=1e-12) == pytest.approx(4e-9 / math.sqrt(2), rel=0.1)


@pytest.mark.parametrize("updates", [1, 4])
def test_further_than_a_step_can_go_is_refused(pair: Pair, updates: int) -> None:
    inside, outside = (share * 3.5e-3 * updates for share in (0.99, 1.01))
    for name in (A, B):
        pair.weights[name][:] = 0
    save_file(pair.weights, pair.parent / WEIGHTS_FILE)
    pair.save(lambda found: [one.__iadd__(np.float32(inside)) for one in found.values()])
    pair.check(updates=updates)
    pair.save(lambda found: [one.__iadd__(np.float32(outside)) for one in found.values()])
    with pytest.raises(ArtError, match=r"no more than 3\.5 learning rates.*Nothing was published"):
        pair.check(updates=updates)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_number_that_is_none_is_refused_by_the_name_of_its_tensor(
    pair: Pair, value: float
) -> None:
    pair.save(lambda found: found[B].__setitem__((0, 0), value))
    words = f"'{B}' holds numbers that are not finite" if value != 3e38 else "expected at most"
    with pytest.raises(ArtError, match=words):
        pair.check()


def test_other_tensors_and_shapes_are_refused(pair: Pair) -> None:
    pair.save(lambda found: found.__setitem__("other", found.pop(B)))
    with pytest.raises(ArtError, match="other tensors than the parent has"):
        pair.check()
    pair.save(lambda found: found.__setitem__(B, np.zeros((8, 3), np.float32)))
    with pytest.raises(ArtError, match="with 24 numbers, expected the parent's 16"):
        pair.check()
    (pair.child / WEIGHTS_FILE).write_bytes(b"\xff" * 64)
    with pytest.raises(ArtError, match="cannot be read"):
        pair.check()
