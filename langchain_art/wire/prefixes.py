"""The longest common prefix of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

S = TypeVar("S", bound=Sequence[object])


def common_prefix_length(one: S, other: S) -> int:
    """Number of items that two sequences have in common from the start.

    Slices are compared by bisection, so that equal stretches are compared in C. For numbers packed
    into bytes, divide the result by their width (rounding down).

    Example: ``common_prefix_length([1, 2, 3], [1, 2, 9, 3])`` is 2. Raises TypeError if the types
    differ: their slices would never be equal.
    """
    if type(one) is not type(other):
        raise TypeError(f"got {type(one).__name__} and {type(other).__name__}, expected one type")
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high - 1:  # the first `low` items are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
