"""Rows divided among ranks: equal work for each, shared prefixes on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from langchain_art.wire.prefixes import common_prefix_length


def shares(rows: Sequence[Sequence[int]], count: int, *, merged: bool = True) -> list[list[int]]:
    """Divide rows into shares of about the same cost.

    Rows are sorted by their tokens and cut into contiguous shares, so that rows with a common
    prefix are neighbours. Only the prefix that the rows at a cut share is computed twice.

    Example: ``shares([[1, 2, 3], [7, 7, 7], [1, 2, 4]], 2)`` gives ``[[0, 2], [1]]``.

    Args:
        rows: token ids, at least one row.
        count: of shares, at least 1.
        merged: a shared prefix is computed once; False: a row costs its length.

    Returns:
        Indices of rows, ascending in each share. With fewer rows than shares, the last shares are
        empty; the first one never is.
    """
    order = sorted(range(len(rows)), key=lambda index: (list(rows[index]), index))
    ordered = [list(rows[index]) for index in order]
    costs = [
        max(1, len(row) - common_prefix_length(before, row) * merged)
        for before, row in pairwise([[], *ordered])
    ]
    found: list[list[int]] = [[] for _ in range(count)]
    total, done = sum(costs), 0
    for index, cost in zip(order, costs, strict=True):
        found[int((done + cost / 2) * count / total)].append(index)
        done += cost
    found.sort(key=lambda share: not share)
    return [sorted(share) for share in found]
