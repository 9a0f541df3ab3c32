"""Prefixes that sequences share: by the prefix cache, or from each other's slots."""

from __future__ import annotations

from collections.abc import Set

from langchain_art.wire.turn_links import common_prefix_length
from langchain_art_server.backends.embedded.kv_cache import SlotCache
from langchain_art_server.backends.embedded.prefix_cache import BLOCK, PrefixCache
from langchain_art_server.backends.embedded.sequence import SequenceState


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
