"""Rows divided among ranks: equal work for each, shared prefixes on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from langchain_art.wire.turn_links import common_prefix_length


def prefix_order(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Rows (indices) in the order of their tokens, and how many the row before does not begin with.

    Rows that begin alike are neighbours in that order.
    """
    order = sorted(range(len(rows)), key=lambda index: (list(rows[index]), index))
    pairs = pairwise([[], *(list(rows[index]) for index in order)])
    return [
        (index, len(row) - common_prefix_length(before, row))
        for index, (before, row) in zip(order, pairs, strict=True)
    ]


def shares(rows: Sequence[Sequence[int]], count: int, *, merged: bool = True) -> list[list[int]]:
    """Divide rows into shares of about the same cost.

    The order of `prefix_order` is cut into shares: only the prefix that the rows at a cut have in
    common is computed twice.

    Example: ``shares([[1, 2, 3], [7, 7, 7], [1, 2, 4]], 2)`` gives ``[[0, 2], [1]]``.

    Args:
        rows: token ids, at least one row.
        count: of shares, at least 1.
        merged: a shared prefix is computed once; False: a row costs its length.

    Returns:
        Indices of rows, ascending in each share. With fewer rows than shares, the last shares are
        empty; the first one never is.
    """
    costs = [
        (index, max(1, new if merged else len(rows[index]))) for index, new in prefix_order(rows)
    ]
    found: list[list[int]] = [[] for _ in range(count)]
    total, done = sum(cost for _, cost in costs), 0
    for index, cost in costs:
        found[int((done + cost / 2) * count / total)].append(index)
        done += cost
    found.sort(key=lambda share: not share)
    return [sorted(share) for share in found]
