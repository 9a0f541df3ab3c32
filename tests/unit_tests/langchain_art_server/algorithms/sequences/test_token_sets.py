"""Sets of tokens are what they were made of, in the shortest form, each once in a reply."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art_server.algorithms.sequences import token_sets
from langchain_art_server.algorithms.sequences.token_sets import (
    WHOLE,
    DrawnFrom,
    mask_of,
    of_bits,
    of_mask,
    pack,
    single,
    unpack,
)

masks = st.one_of(
    st.lists(st.booleans(), min_size=1, max_size=300),
    st.tuples(st.integers(200, 400), st.integers(0, 199), st.booleans()).map(
        lambda case: [(v == case[1]) == case[2] for v in range(case[0])]
    ),
).map(lambda mask: np.array(mask))


@given(masks)
def test_a_set_is_what_it_was_made_of(mask: np.ndarray) -> None:
    made = of_mask(mask)
    size, count = len(mask), int(mask.sum())
    assert mask_of(made, size).tolist() == mask.tolist()
    assert of_bits(np.packbits(mask, bitorder="little").tobytes() + b"\0", size) == made
    assert len(made) <= 1 + min((size + 7) // 8, 4 * count, 4 * (size - count + 1))
    assert (made == WHOLE) == (count == size)
    if count == 1:
        assert made == single(int(mask.argmax())) or size < 25
    # A learner whose vocabulary is padded draws no more tokens than the sampler did.
    more = mask_of(made, size + 9).tolist()
    assert made == WHOLE or more == [*mask.tolist(), *[False] * 9]


@given(st.lists(st.sampled_from([b"", b"+1234", b"+5678", b"b\x07"]), max_size=40))
def test_the_sets_of_a_reply_come_back_each_once(sets: list[bytes]) -> None:
    packed = pack(sets)
    found = unpack(packed)
    assert found == (sets if any(sets) else []) and (packed == b"") == (not any(sets))
    assert len({id(one) for one in found}) == len(set(found))
    assert len(packed) <= 100 + 2 * len(sets) + sum(map(len, set(sets)))


def test_too_many_sets_are_a_problem_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sets, "MAX_BYTES", 40)
    drawn = DrawnFrom()
    for token in [1, 2, 2, 2, 3]:
        drawn.add(single(token))
    assert drawn.problem == "" and unpack(drawn.packed())[2] == single(2)
    for token in range(20):
        drawn.add(single(token))
    assert "to record" in drawn.problem and drawn.packed() == b""
