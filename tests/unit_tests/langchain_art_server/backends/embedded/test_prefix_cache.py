"""The prefix cache against its definition: what is found is right, and what is kept fits."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from langchain_art_server.backends.embedded.kv_cache import Layout
from langchain_art_server.backends.embedded.prefix_cache import BLOCK, PrefixCache

LAYOUT = Layout(shapes=((2, 3),), entries=(4,), places={0: ((0, 0), (0, 1)), 1: ((0, 2), (0, 3))})
BLOCK_BYTES = BLOCK * LAYOUT.bytes_per_token(torch.float32)


def cache(blocks: int) -> PrefixCache:
    budget = blocks * BLOCK_BYTES
    return PrefixCache(LAYOUT, budget=budget, device=torch.device("cpu"), dtype=torch.float32)


NETS = ((2,), torch.float32, 3), ((1, 2), torch.float32, 1)
HYBRID = Layout(LAYOUT.shapes, LAYOUT.entries, LAYOUT.places, NETS)
SNAPSHOT_BYTES = HYBRID.state_bytes + BLOCK_BYTES


def nets(root: int, tokens: list[int]) -> list[torch.Tensor]:
    """As a recurrent state: a number of all tokens."""
    number = float(hash((root, *tokens)) % 9973)
    return [torch.full((3, 2), number), torch.full((1, 1, 2), -number)]


def states(root: int, tokens: list[int]) -> list[torch.Tensor]:
    """Numbers that depend on everything before a token, as keys and values do."""
    sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0) + 1000 * root
    return [sums.view(1, 1, -1, 1) + torch.arange(24.0).view(4, 2, 1, 3) / 100]


def spell(blocks: list[int]) -> list[int]:
    """A sequence of blocks, each of which is one number."""
    return [number for number in blocks for _ in range(BLOCK)]


_sequences = st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=6))


@given(steps=st.lists(_sequences, max_size=25), blocks=st.integers(0, 9))
def test_whatever_is_found_is_the_sequences_own(
    steps: list[tuple[int, list[int]]], blocks: int
) -> None:
    prefixes = cache(blocks)
    roots = (0, prefixes.new_root())
    for which, numbers in steps:
        root = roots[which]
        tokens = [*spell(numbers), 7]
        found, missing = prefixes.match(root, tokens, len(tokens))
        assert (missing is None) == (len(found) == len(numbers))
        if found:
            got = prefixes.gather(found)[0]
            assert torch.equal(got, states(root, tokens)[0][:, :, : len(found) * BLOCK])
        prefixes.insert(root, tokens, states(root, tokens))
        assert prefixes.held <= blocks
        again, _ = prefixes.match(root, tokens, len(tokens))
        assert len(again) == min(len(numbers), blocks), "the newest is kept, from its beginning"


def test_the_least_recently_used_goes_first() -> None:
    prefixes = cache(3)
    for number in (1, 2, 3):
        prefixes.insert(0, spell([number]), states(0, spell([number])))
    prefixes.match(0, spell([1]), BLOCK)
    prefixes.insert(0, spell([4]), states(0, spell([4])))
    kept = [number for number in (1, 2, 3, 4) if prefixes.match(0, spell([number]), BLOCK)[0]]
    assert kept == [1, 3, 4]


def test_forgetting_a_root_leaves_the_others() -> None:
    prefixes = cache(4)
    one, two = prefixes.new_root(), prefixes.new_root()
    for root in (one, two):
        prefixes.insert(root, spell([1, 2]), states(root, spell([1, 2])))
    prefixes.forget(one)
    assert prefixes.match(one, spell([1, 2]), 2 * BLOCK)[0] == []
    assert len(prefixes.match(two, spell([1, 2]), 2 * BLOCK)[0]) == 2
    prefixes.insert(two, spell([3, 3]), states(two, spell([3, 3])))
    assert prefixes.held == 4


_tokens = st.lists(st.integers(0, 1), max_size=70)


@given(steps=st.lists(st.tuples(st.integers(0, 1), _tokens), max_size=25), room=st.integers(0, 6))
def test_a_sequence_goes_on_only_where_its_states_were_kept(
    steps: list[tuple[int, list[int]]], room: int
) -> None:
    budget = 2 * room * SNAPSHOT_BYTES
    prefixes = PrefixCache(HYBRID, budget=budget, device=torch.device("cpu"), dtype=torch.float32)
    roots = [0, prefixes.new_root()]
    for which, drawn in steps:
        root, tokens = roots[which], [*spell([1]), *drawn]
        prefixes.insert(root, tokens, states(root, tokens), nets(root, tokens))
        assert prefixes.held <= prefixes.blocks
        assert len(prefixes._snapshots) + len(prefixes._free_snapshots) == room
        assert {name[0] for name in prefixes._snapshots} <= {b.id for b in prefixes._known.values()}
        if prefixes.blocks * BLOCK >= len(tokens) and room:
            assert prefixes.find(root, [*tokens, 7])[0].length == len(tokens), "the newest is kept"
        prefix, missing = prefixes.find(root, [*tokens[: len(tokens) // 2], 1, 1])
        assert (missing is None) == (prefix.length == len(tokens) // 2 + 1)
        if prefix.length:
            known = [*tokens[: len(tokens) // 2], 1][: prefix.length]
            kv, found = prefixes.read(prefix)
            assert torch.equal(kv[0], states(root, known)[0])
            assert all(map(torch.equal, found, nets(root, known)))
    prefixes.forget(roots[1])
    assert prefixes.find(roots[1], [*spell([1]), 1, 1])[0].length == 0
