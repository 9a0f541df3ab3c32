import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art_server.algorithms.sequences.prefix_forest import (
    Forest,
    Part,
    PartCosts,
    grow,
    lay_out,
    most_alive,
    split,
)
from langchain_art_server.algorithms.sequences.prefix_tree import Meeting, PrefixTree
from tests.support.call_trees import common
from tests.support.soak import count


@st.composite
def sequences(draw: st.DrawFn) -> list[list[int]]:
    """Rows over few ids; many fork from an earlier one, are a beginning of it, or equal it."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 9))):
        start: list[int] = []
        if rows and draw(st.booleans()):
            parent = draw(st.sampled_from(rows))
            start = parent[: draw(st.integers(0, len(parent)))]
        ids = st.integers(0, 2) | st.sampled_from([255, 256, 70_000])
        rows.append(start + draw(st.lists(ids, min_size=0 if start else 1, max_size=8)))
    return rows


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[: end + 1]) for row in rows for end in range(len(row))}


def test_the_worked_example() -> None:
    forest = grow([[7, 8, 5], [7, 8, 6, 4], [3]])
    assert forest.token_ids_N.tolist() == [3, 7, 8, 5, 6, 4]
    assert forest.depth_N.tolist() == [0, 0, 1, 2, 2, 3]
    assert forest.exit_N.tolist() == [1, 6, 6, 4, 6, 6]
    assert [row.tolist() for row in forest.rows] == [[1, 2, 3], [1, 2, 4, 5], [0]]
    assert [(s.start, s.end, s.parent) for s in forest.segments] == [
        *[(0, 1, -1), (1, 3, -1), (3, 4, 1), (4, 6, 1)]
    ]


@pytest.mark.parametrize(("token_cost", "tokens"), [(1.0, 24), (9.9, 24), (10.0, 22), (99.0, 22)])
def test_a_beginning_is_shared_where_that_saves_more_than_it_costs(
    token_cost: float, tokens: int
) -> None:
    """Two tokens before two rows of ten more: saved 2 * token_cost, paid 20 pieces."""
    rows = [[1, 2, *[mark] * 10] for mark in (3, 4)]
    assert len(grow(rows, token_cost).token_ids_N) == tokens


def test_thousands_of_rows_and_a_deep_trie_take_no_recursion() -> None:
    deep = [[1] * n + [2] for n in range(1, 1100)]
    forest = grow(deep)
    assert len(forest.token_ids_N) == 1099 + 1099
    assert len(split(forest, 100)) > 10
    wide = grow([[1, 2, n] for n in range(3000)])
    assert len(wide.token_ids_N) == 3002


def check_rows(forest: Forest, rows: list[list[int]]) -> None:
    at = np.arange(len(forest.token_ids_N))
    for row, places in zip(rows, forest.rows, strict=True):
        assert forest.token_ids_N[places].tolist() == row
        assert forest.depth_N[places].tolist() == list(range(len(row)))
        for seen, place in enumerate(places.tolist()):
            ancestors = at[(at <= place) & (place < forest.exit_N)]
            assert ancestors.tolist() == places[: seen + 1].tolist()
    assert set(np.concatenate(forest.rows).tolist()) == set(at.tolist())


def check_parts(forest: Forest, parts: list[Part]) -> None:
    size = len(forest.token_ids_N)
    at = np.arange(size)
    assert sorted(np.concatenate([p.tokens_P for p in parts]).tolist()) == list(range(size))
    chain: list[int] = []
    alive: list[int] = []
    for index, part in enumerate(parts):
        while chain and chain[-1] != part.parent:
            chain.pop()
        assert part.parent == (chain[-1] if chain else -1)
        own = set(part.tokens_P.tolist())
        needed = {k for q in own for k in at[(at <= q) & (q < forest.exit_N)].tolist()} - own
        assert part.above_E.tolist() == sorted(needed)
        assert part.tokens_P.tolist() == sorted(own)
        there = [parts[i].tokens_P for i in chain]
        assert needed <= {int(k) for tokens in there for k in tokens}
        alive.append(len(own) + sum(map(len, there)))
        chain.append(index)
    assert most_alive(parts) == max(alive)


@pytest.mark.soak
@settings(max_examples=count(50, 150))
@given(sequences(), st.integers(1, 60), st.sampled_from([math.inf, 5.0, 1.0, 0.0]))
def test_rows_are_read_from_parts_and_copies_and_see_themselves_alone(
    rows: list[list[int]], budget: int, token_cost: float
) -> None:
    grown, size = grow(rows, token_cost), len(prefixes(rows))
    nested = split(grown, budget)
    check_rows(grown, rows)
    check_parts(grown, nested)
    if token_cost == 0:  # nothing is shared but by rows that are beginnings of others
        known = {tuple(row) for row in rows}
        whole = [r for r in known if not any(o != r and o[: len(r)] == r for o in known)]
        size = sum(map(len, whole))
    found = len(grown.token_ids_N)
    assert found == size if token_cost in (0.0, math.inf) else found >= size
    other = grow(rows[::-1], token_cost)  # the order of the rows does not matter
    assert other.token_ids_N.tolist() == grown.token_ids_N.tolist()
    assert other.segments == grown.segments
    for costs in (PartCosts(9.0, 1.0, 1.0), PartCosts(0.0, 50.0, 1.0)):
        forest, parts = lay_out(rows, token_cost, budget, costs)
        check_parts(forest, parts)
        check_rows(forest, rows)
        sizes = [[len(part.tokens_P) for part in some] for some in (parts, nested)]
        if most_alive(nested) <= budget:
            assert most_alive(parts) <= budget and costs.of(sizes[0]) <= costs.of(sizes[1])
    assert [p.tokens_P.tolist() for p in lay_out(rows, token_cost, budget, PartCosts())[1]] == [
        p.tokens_P.tolist() for p in nested
    ]


def scenarios(count: int, runs: int, shared: int, asked: int, own: int) -> list[list[int]]:
    """Runs that share a beginning, and a longer one in their scenario."""
    rng = random.Random(0)

    def some(length: int) -> list[int]:
        return [rng.randrange(4000) for _ in range(length)]

    start = some(shared)
    openings = [start + some(asked) for _ in range(count)]
    return [opening + some(own) for opening in openings for _ in range(runs)]


def test_the_openings_of_all_scenarios_are_not_alive_together() -> None:
    """They took half of the budget, so that each run was a part: 32 x 8 runs of 2,300 tokens."""
    rows = scenarios(32, 8, 900, 100, 2300)
    parts = split(grow(rows), 8513)
    assert max(len(part.tokens_P) for part in parts if part.parent == -1) <= 8513 // 4
    assert most_alive(parts) <= 8513 and len(parts) <= 135
    forest, parts = lay_out(rows, math.inf, 8513, PartCosts(0.154, 0.107, 72e-6))
    runs = len(rows) // 3 + 1  # three of them fit beside the trunk
    assert most_alive(parts) <= 8513 and len(parts) <= runs + 1
    assert len(forest.token_ids_N) <= 900 + 32 * 800 * 23 + 100 * (32 + runs)


@pytest.mark.parametrize("context", [2048, 16384])
def test_the_forest_costs_no_more_than_rows(context: int) -> None:
    """Eight runs that share a quarter, in parts of what an H200 holds: by its fitted times."""
    costs = PartCosts(0.154, 0.107, 72e-6)
    rows = scenarios(1, 8, context // 4, 0, context * 3 // 4)
    for budget in (8513, 11_200, 16_384):
        _, parts = lay_out(rows, math.inf, budget, costs)
        each = max(1, budget // context)
        of_rows = [context * min(each, 8 - at) for at in range(0, 8, each)]
        assert costs.of([len(part.tokens_P) for part in parts]) < costs.of(of_rows)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def naive(sequences: list[list[int]], prompt: list[int]) -> Meeting:
    shared = [common(one, prompt) for one in sequences]
    longest = max(shared, default=0)
    inside = [i for i, one in enumerate(sequences) if shared[i] == len(one)]
    deepest = max((len(sequences[i]) for i in inside), default=0)
    return Meeting(
        shared=longest,
        ends=tuple(i for i in inside if len(sequences[i]) == longest),
        passes=max(i for i, s in enumerate(shared) if s == longest) if longest else None,
        within=tuple(i for i in inside if len(sequences[i]) == deepest),
    )


@pytest.mark.soak
@settings(max_examples=count(70, 200))
@given(st.lists(TOKENS, max_size=9), TOKENS)
def test_a_prompt_meets_what_a_naive_comparison_finds(
    sequences: list[list[int]], prompt: list[int]
) -> None:
    tree = PrefixTree()
    for index, sequence in enumerate(sequences):
        tree.add(index, sequence)
    assert tree.meet(prompt) == naive(sequences, prompt)


def test_a_long_run_costs_its_tokens_and_not_their_square() -> None:
    def seconds(turns: int) -> float:
        tree, tokens, begun = PrefixTree(), list[int](), time.process_time()
        for turn in range(turns):
            tokens += range(turn, turn + 100)
            assert tree.meet(tokens).shared == 100 * turn
            tree.add(turn, tokens)
        return time.process_time() - begun

    # Tokens grow with the square of the turns (each prompt repeats what went before): 16 times as
    # many for 4 times the turns. Comparing every pair of turns would take 64 times as long.
    few, many = (min(seconds(turns) for _ in range(3)) for turns in (50, 200))
    assert many / few < 32
