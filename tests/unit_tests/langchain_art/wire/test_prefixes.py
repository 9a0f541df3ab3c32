"""`wire.prefixes`: the longest common prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art.wire.prefixes import common_prefix_length

few = st.lists(st.integers(0, 1), max_size=12)


@given(few, few)
def test_it_is_the_longest_prefix_that_both_have(one: list[int], other: list[int]) -> None:
    length = common_prefix_length(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_text_bytes_and_tuples() -> None:
    assert common_prefix_length("system: a", "system: b") == 8
    assert common_prefix_length(b"\x01\x02", b"\x01\x02\x03") == 2
    assert common_prefix_length((), (1,)) == 0


def test_sequences_of_two_types_are_refused() -> None:
    with pytest.raises(TypeError, match="got list and tuple"):
        common_prefix_length([1], (1,))  # pyright: ignore[reportArgumentType]
