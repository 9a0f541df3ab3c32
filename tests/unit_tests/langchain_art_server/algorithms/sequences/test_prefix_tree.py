"""The tree of prefixes against a naive comparison of every pair."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art_server.algorithms.sequences.prefix_tree import Meeting, PrefixTree
from tests.support.call_trees import common
from tests.support.soak import count

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
