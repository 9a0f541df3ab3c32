"""Random trees of calls, and the naive common prefix."""

from __future__ import annotations


def common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count
