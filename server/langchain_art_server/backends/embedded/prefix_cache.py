"""Prefix caching: keys and values of earlier sequences, found by the longest common prefix.

A sequence is kept as blocks of 16 tokens in a tree: a block's key is its parent block and its exact
token ids, so sequences share their prefixes, and no match rests on a hash alone. Each loaded
adapter has a root of its own, whose number is never used again: a block can not serve another
adapter or version. The least recently used blocks are evicted first; a block is always more
recently used than its children, so only leaves are evicted.

Where layers have states, a sequence goes on only from a place where these were kept: a snapshot,
with the keys and values of the tokens behind its last whole block. Snapshots have half of the
memory, and go with their block.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

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
    #: By the tokens behind the block, the index of the snapshot there.
    snapshots: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` tokens of a sequence: indices of blocks, and of a snapshot, if any."""

    blocks: tuple[int, ...] = ()
    length: int = 0
    snapshot: int = -1


class PrefixCache:
    """Blocks of keys and values, and snapshots, in `budget` bytes, allocated at first use."""

    def __init__(
        self, layout: Layout, *, budget: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._layout, self._device, self._dtype = layout, device, dtype
        block = BLOCK * layout.bytes_per_token(dtype)
        snapshots = budget // 2 // (layout.state_bytes + block) if layout.states else 0
        self.blocks = (budget - snapshots * (layout.state_bytes + block)) // block
        self._pools: list[Tensor] = []
        self._tails: list[Tensor] = []  # the last keys and values of each snapshot, and its states
        self._states: list[Tensor] = []
        self._free_snapshots = list(range(snapshots))
        self._snapshots: OrderedDict[tuple[int, tuple[int, ...]], _Block] = OrderedDict()
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

        Returns the pool indices of its blocks, and the key of the first missing block (None if
        `tokens` has no further whole block).
        """
        path, missing = self._walk(root, tokens, limit)
        return [self._known[key].index for key in path], missing

    def find(self, root: int, tokens: Sequence[int]) -> tuple[Prefix, _Key | None]:
        """The longest prefix that `tokens` may go on from, without their last.

        Returns it, and what to compute for others that begin alike: the key of the next block, or,
        where layers have states, of all tokens but the last; None if there is nothing.
        """
        limit = len(tokens) - 1
        if not self._layout.states:
            indices, missing = self.match(root, tokens, limit)
            return Prefix(tuple(indices), len(indices) * BLOCK), missing
        prefix = self._resume(root, tokens, limit)
        return prefix, None if prefix.length == limit else (root, tuple(tokens[:-1]))

    def _resume(self, root: int, tokens: Sequence[int], limit: int) -> Prefix:
        path = [self._known[key] for key in self._walk(root, tokens, limit)[0]]
        for count in range(len(path), 0, -1):
            block, start = path[count - 1], count * BLOCK
            ahead = tuple(tokens[start : min(start + BLOCK, limit)])
            fits = [tail for tail in block.snapshots if tail == ahead[: len(tail)]]
            if fits:
                tail = max(fits, key=len)
                self._snapshots.move_to_end((block.id, tail))
                blocks = tuple(one.index for one in path[:count])
                return Prefix(blocks, start + len(tail), block.snapshots[tail])
        return Prefix()

    def read(self, prefix: Prefix) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and values of a prefix, per buffer, and the states behind it."""
        states, behind = self.gather(list(prefix.blocks)), prefix.length % BLOCK
        if prefix.snapshot < 0:
            return states, []
        tails = [pool[prefix.snapshot, :, :, :behind] for pool in self._tails]
        states = [torch.cat(both, 2) for both in zip(states, tails, strict=True)]
        return states, [pool[prefix.snapshot] for pool in self._states]

    def gather(self, indices: list[int]) -> list[Tensor]:
        """Gather the blocks' keys and values as ``[entries, H, 16 x blocks, D]``, per buffer."""
        index = torch.tensor(indices, device=self._device)
        states: list[Tensor] = []
        for pool in self._pools:
            blocks = pool[index].permute(1, 2, 0, 3, 4)
            states.append(blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1]))
        self.hit_tokens += len(indices) * BLOCK
        return states

    def insert(
        self,
        root: int,
        tokens: Sequence[int],
        states: Sequence[Tensor],
        nets: Sequence[Tensor] = (),
    ) -> None:
        """Cache the whole blocks of `tokens`, whose keys and values are `states`.

        If layers have states, too, a snapshot of these, `nets`.
        """
        if not self.blocks:
            return
        path, missing = self._walk(root, tokens, len(tokens))
        if missing is not None:
            self._extend(path, root, tokens, states)
        if nets and len(path) == len(tokens) // BLOCK:
            self._snap(self._known[path[-1]], tuple(tokens[len(path) * BLOCK :]), states, nets)

    def _extend(
        self, path: list[_Key], root: int, tokens: Sequence[int], states: Sequence[Tensor]
    ) -> None:
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

    def _snap(
        self, block: _Block, tail: tuple[int, ...], states: Sequence[Tensor], nets: Sequence[Tensor]
    ) -> None:
        """Keep states, and the keys and values of the `tail` behind a block."""
        if tail not in block.snapshots:
            if not self._free_snapshots:
                if not self._snapshots:
                    return
                (_, other), owner = self._snapshots.popitem(last=False)
                self._free_snapshots.append(owner.snapshots.pop(other))
            if not self._states:
                count, device = len(self._free_snapshots), self._device
                self._states = [
                    torch.empty(count, *one.shape, dtype=one.dtype, device=device) for one in nets
                ]
                self._tails = [torch.empty_like(pool[:count]) for pool in self._pools]
            index = block.snapshots[tail] = self._free_snapshots.pop()
            for pool, state in zip(self._states, nets, strict=True):
                pool[index] = state
            for pool, state in zip(self._tails, states, strict=True):
                pool[index, :, :, : len(tail)] = state[:, :, state.shape[2] - len(tail) :]
            self._snapshots[block.id, tail] = block
        self._snapshots.move_to_end((block.id, tail))

    def forget(self, root: int) -> None:
        """Drop every block of an adapter."""
        for key, block in list(self._known.items()):
            if block.root == root:
                self._free.append(self._drop(key))

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
        return None if oldest in pinned else self._drop(oldest)

    def _drop(self, key: _Key) -> int:
        """Take out a block with its snapshots; returns its index."""
        block = self._known.pop(key)
        for tail, index in block.snapshots.items():
            del self._snapshots[block.id, tail]
            self._free_snapshots.append(index)
        return block.index

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

    def find(self, sequence: SequenceState, among: Set[str] | None) -> Prefix | None:
        """Find the cached prefix of a sequence.

        None: what follows is being computed for another sequence, of `among` these clients,
        which becomes its leader. Otherwise that is its own to compute.
        """
        if self._prefixes is None:
            return Prefix()
        prefix, missing = self._prefixes.find(sequence.root, sequence.tokens)
        if missing is not None:
            leader = self._claims.setdefault(missing, sequence)
            if leader is not sequence and (among is None or leader.client in among):
                sequence.leader = leader
                return None
        return prefix

    def fill(self, rows: list[SequenceState], placed: list[tuple[SequenceState, Prefix]]) -> None:
        """Append sequences to the rows, with what is there of their keys, values and states."""
        shared: dict[Prefix, list[int]] = {}
        for sequence, prefix in placed:
            slot = len(rows)
            rows.append(sequence)
            sequence.filled = prefix.length
            if not self._copy_leader(rows, slot):
                shared.setdefault(prefix, []).append(slot)
        if self._prefixes is not None and self._cache is not None:
            for prefix, slots in shared.items():
                states, nets = self._prefixes.read(prefix) if prefix.length else ([], [])
                if states:
                    self._cache.write(slots, states)
                self._cache.write_states(slots, nets)

    def _copy_leader(self, rows: list[SequenceState], slot: int) -> bool:
        """Copy the keys and values of the prefix that a sequence shares with its leader."""
        sequence, cache = rows[slot], self._cache
        leader, sequence.leader = sequence.leader, None
        if leader is None or cache is None or cache.states or leader not in rows:
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
            nets = self._cache.read_states(slot)
            self._prefixes.insert(sequence.root, tokens, states, nets)

    def let_go(self, sequences: list[SequenceState]) -> None:
        """Drop the claims of these sequences: none waits for their blocks any more."""
        self._claims = {key: s for key, s in self._claims.items() if s not in sequences}
