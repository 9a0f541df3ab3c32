"""Prefix caching: keys and values of earlier sequences, found by the longest common prefix.

A sequence is kept as blocks of 16 tokens in a tree: a block's key is its parent block and its exact
token ids, so sequences share their prefixes, and no match rests on a hash alone. Each loaded
adapter has a root of its own, whose number is never used again: a block can not serve another
adapter or version. The least recently used blocks are evicted first; a block is always more
recently used than its children, so only leaves are evicted.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from langchain_art.wire.turn_links import common_prefix_length
from langchain_art_server.backends.embedded.kv_cache import Layout, SlotCache
from langchain_art_server.backends.embedded.token_sampler import SequenceState

BLOCK = 16
_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Block:
    id: int
    index: int
    root: int


class PrefixCache:
    """Blocks of keys and values in one pool of `budget` bytes, allocated at first use."""

    def __init__(
        self, layout: Layout, *, budget: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._layout, self._device, self._dtype = layout, device, dtype
        self.blocks = budget // (BLOCK * layout.bytes_per_token(dtype))
        self._pools: list[Tensor] = []
        self._free: list[int] = []
        self._fresh = 0
        self._known: OrderedDict[_Key, _Block] = OrderedDict()
        self._ids = itertools.count(1)
        self.hit_tokens = 0

    def new_root(self) -> int:
        """A root for a newly loaded adapter."""
        return next(self._ids)

    @property
    def held(self) -> int:
        """Blocks in use."""
        return len(self._known)

    def match(self, root: int, tokens: Sequence[int], limit: int) -> tuple[list[int], _Key | None]:
        """Find the longest cached prefix of `tokens`, of at most `limit` tokens.

        Returns:
            The pool indices of its blocks, and the key of the first missing block (None if `tokens`
            has no further whole block).
        """
        path, missing = self._walk(root, tokens, limit)
        return [self._known[key].index for key in path], missing

    def gather(self, indices: list[int]) -> list[Tensor]:
        """Gather the blocks' keys and values as ``[entries, H, 16 x blocks, D]``, per buffer."""
        index = torch.tensor(indices, device=self._device)
        states: list[Tensor] = []
        for pool in self._pools:
            blocks = pool[index].permute(1, 2, 0, 3, 4)
            states.append(blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1]))
        self.hit_tokens += len(indices) * BLOCK
        return states

    def insert(self, root: int, tokens: Sequence[int], states: Sequence[Tensor]) -> None:
        """Cache the whole blocks of `tokens`, whose keys and values are `states`."""
        if not self.blocks:
            return
        path, missing = self._walk(root, tokens, len(tokens))
        if missing is None:
            return
        pinned, parent = set(path), self._known[path[-1]].id if path else root
        first, indices = len(path), list[int]()
        for start in range(first * BLOCK, len(tokens) - len(tokens) % BLOCK, BLOCK):
            index = self._allocate(pinned)
            if index is None:
                break
            key = (parent, tuple(tokens[start : start + BLOCK]))
            block = self._known[key] = _Block(next(self._ids), index, root)
            indices.append(index)
            path.append(key)
            pinned.add(key)
            parent = block.id
        for key in reversed(path):
            self._known.move_to_end(key)
        if indices:
            self._store(first, indices, states)

    def forget(self, root: int) -> None:
        """Drop every block of an adapter."""
        for key, block in list(self._known.items()):
            if block.root == root:
                del self._known[key]
                self._free.append(block.index)

    def _walk(self, root: int, tokens: Sequence[int], limit: int) -> tuple[list[_Key], _Key | None]:
        path: list[_Key] = []
        parent, missing = root, None
        for start in range(0, limit - limit % BLOCK, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            block = self._known.get(key)
            if block is None:
                missing = key
                break
            path.append(key)
            parent = block.id
        for key in reversed(path):
            self._known.move_to_end(key)
        return path, missing

    def _allocate(self, pinned: set[_Key]) -> int | None:
        if self._free:
            return self._free.pop()
        if self._fresh < self.blocks:
            self._fresh += 1
            return self._fresh - 1
        oldest = next(iter(self._known))
        # Not a block of the prefix that is being added: its children would lose their parent.
        return None if oldest in pinned else self._known.pop(oldest).index

    def _store(self, first: int, indices: list[int], states: Sequence[Tensor]) -> None:
        """Write consecutive blocks, the first of which is the path's `first`, to the pool."""
        if not self._pools:
            # On a CPU, pages of an empty tensor take memory only once they are written.
            self._pools = [
                torch.empty(self.blocks, n, h, BLOCK, d, dtype=self._dtype, device=self._device)
                for n, (h, d) in zip(self._layout.entries, self._layout.shapes, strict=True)
            ]
        index = torch.tensor(indices, device=self._device)
        for pool, state in zip(self._pools, states, strict=True):
            cut = state[:, :, first * BLOCK : (first + len(indices)) * BLOCK]
            blocks = cut.reshape(*cut.shape[:2], len(indices), BLOCK, cut.shape[-1])
            pool[index] = blocks.permute(2, 0, 1, 3, 4)


class SharedPrefixes:
    """Fills the slots of sequences that begin, and keeps what those that end leave behind.

    Without a cache nothing is shared.
    """

    def __init__(self, cache: SlotCache | None, prefixes: PrefixCache | None) -> None:
        self._cache, self._prefixes = cache, prefixes
        #: Blocks of the prefix cache that are being computed, and by which sequence.
        self._claims: dict[tuple[int, tuple[int, ...]], SequenceState] = {}

    def find(self, sequence: SequenceState, among: Set[str] | None) -> list[int] | None:
        """The blocks of the prefix cache that a sequence begins with.

        None: its next block is being computed for another sequence, of `among` these clients,
        which becomes its leader. Otherwise that block is its own to compute.
        """
        if self._prefixes is None:
            return []
        tokens = sequence.tokens
        indices, missing = self._prefixes.match(sequence.root, tokens, len(tokens) - 1)
        if missing is not None:
            leader = self._claims.setdefault(missing, sequence)
            if leader is not sequence and (among is None or leader.client in among):
                sequence.leader = leader
                return None
        return indices

    def fill(
        self, rows: list[SequenceState], placed: list[tuple[SequenceState, list[int]]]
    ) -> None:
        """Append sequences to the rows, with what is there of their keys and values."""
        shared: dict[tuple[int, ...], list[int]] = {}
        for sequence, indices in placed:
            slot = len(rows)
            rows.append(sequence)
            sequence.filled = len(indices) * BLOCK
            if not self._copy_leader(rows, slot) and indices:
                shared.setdefault(tuple(indices), []).append(slot)
        if self._prefixes is not None and self._cache is not None:
            for indices, slots in shared.items():
                self._cache.write(slots, self._prefixes.gather(list(indices)))

    def _copy_leader(self, rows: list[SequenceState], slot: int) -> bool:
        """Copy the keys and values of the prefix that a sequence shares with its leader."""
        sequence, cache = rows[slot], self._cache
        leader, sequence.leader = sequence.leader, None
        if leader is None or cache is None or leader not in rows:
            return False
        mine, theirs = sequence.tokens, leader.tokens
        same = common_prefix_length(mine[:-1], theirs[: leader.filled])
        if same < sequence.filled:
            return False
        sequence.filled = same
        cache.write([slot], cache.read(rows.index(leader), same))
        return True

    def keep(self, slot: int, sequence: SequenceState) -> None:
        """Put what a slot holds into the prefix cache; clear it if that may not be finite."""
        if self._prefixes is None or self._cache is None:
            return
        if sequence.error is not None:
            self._cache.clear(slot)
        elif sequence.filled >= BLOCK:
            tokens = sequence.tokens[: sequence.filled]
            states = self._cache.read(slot, sequence.filled)
            self._prefixes.insert(sequence.root, tokens, states)

    def let_go(self, sequences: list[SequenceState]) -> None:
        """Drop the claims of these sequences: none waits for their blocks any more."""
        self._claims = {key: s for key, s in self._claims.items() if s not in sequences}
