"""Rows dealt out to ranks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from langchain_art_server.algorithms.sequences.training_rows import shares

ROWS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=20)


@given(ROWS, st.integers(1, 6), st.booleans())
def test_each_row_is_dealt_out_once_and_the_first_share_has_some(
    rows: list[list[int]], count: int, merged: bool
) -> None:
    found = shares(rows, count, merged=merged)
    assert len(found) == count and found[0]
    assert sorted(index for share in found for index in share) == list(range(len(rows)))
    assert all(share == sorted(share) for share in found)
    filled = [bool(share) for share in found]
    assert filled == sorted(filled, reverse=True)


def forest_tokens(rows: list[list[int]]) -> int:
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def test_groups_stay_together_and_ranks_have_as_much_to_do() -> None:
    rng = random.Random(0)
    rows: list[list[int]] = []
    for _ in range(16):
        prompt = [9] * 20 + [rng.randrange(1000) for _ in range(200)]
        rows += [prompt + [rng.randrange(1000) for _ in range(50)] for _ in range(8)]
    rng.shuffle(rows)
    whole = forest_tokens(rows)
    for count in (2, 4):
        costs = [forest_tokens([rows[i] for i in share]) for share in shares(rows, count)]
        assert sum(costs) <= whole + (count - 1) * 270  # one common beginning for each cut
        assert max(costs) <= 1.1 * whole / count


def test_without_a_forest_rows_cost_what_they_are_long() -> None:
    rows = [[1] * 9 + [n] for n in range(8)] + [[2 + n] * 10 for n in range(8)]
    assert [len(share) for share in shares(rows, 2, merged=False)] == [8, 8]
    assert [len(share) for share in shares(rows, 2)] == [11, 5]
