"""The sets of tokens that sampled tokens were drawn from. Numpy, no torch.

A grammar, `top_k` and `top_p` leave a part of the vocabulary at each token; the sampler draws from
what is left, and the learner must renormalise over the same. A set is bytes: a letter, then the
shortest of three forms, in little-endian uint32 where it holds numbers::

    b""                  the whole vocabulary
    b"+" ids             these tokens
    b"-" size, ids       a vocabulary of that size without these tokens
    b"b" bits            bit ``i % 8`` of byte ``i // 8`` is set for token i

Ids ascend, so equal sets of one vocabulary are equal bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from langchain_art_server.algorithms.sequences.prefix_forest import Ints

WHOLE = b""
#: Bytes of the distinct sets of one reply. A nucleus of a thousand tokens at each of a thousand
#: tokens takes as much; more would make the store grow by gigabytes an hour.
MAX_BYTES = 1 << 22
_ID = np.dtype("<u4")
Mask = NDArray[np.bool_]


def of_mask(allowed_V: Mask) -> bytes:
    """The set of the tokens for which `allowed_V` is true."""
    size, count = len(allowed_V), int(np.count_nonzero(allowed_V))
    if count == size:
        return WHOLE
    lengths = {b"+": count * _ID.itemsize, b"-": (size - count + 1) * _ID.itemsize}
    form = min(lengths, key=lambda one: lengths[one])
    if (size + 7) // 8 < lengths[form]:
        return b"b" + np.packbits(allowed_V, bitorder="little").tobytes()
    if form == b"+":
        return form + np.flatnonzero(allowed_V).astype(_ID).tobytes()
    return form + np.append(size, np.flatnonzero(~allowed_V)).astype(_ID).tobytes()


def single(token: int) -> bytes:
    """The set of one token."""
    return b"+" + token.to_bytes(_ID.itemsize, "little")


@lru_cache(maxsize=256)
def of_bits(bits: bytes, size: int) -> bytes:
    """The set of packed bits of a vocabulary of `size`. Kept, as calls of one grammar repeat it."""
    return of_mask(mask_of(b"b" + bits, size))


def mask_of(tokens: bytes, size: int) -> Mask:
    """Mask of the tokens of a vocabulary of `size` that are in the set."""
    allowed_V = np.zeros(size, dtype=bool)
    form, numbers = tokens[:1], tokens[1:]
    if form == WHOLE:
        allowed_V[:] = True
    elif form == b"+":
        allowed_V[np.frombuffer(numbers, _ID)] = True
    elif form == b"-":
        ids = np.frombuffer(numbers, _ID)
        allowed_V[: ids[0]] = True
        allowed_V[ids[1:]] = False
    else:
        bits = np.unpackbits(np.frombuffer(numbers, np.uint8), bitorder="little")[:size]
        allowed_V[: len(bits)] = bits
    return allowed_V


class DrawnFrom:
    """The sets of a reply's tokens, collected while it is sampled."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem  # why they are not known, empty if they are
        self._sets: list[bytes] = []
        self._known: dict[bytes, bytes] = {}
        self._bytes = 0

    def add(self, tokens: bytes) -> None:
        """Add the next token's set."""
        if self.problem:
            return
        known = self._known.setdefault(tokens, tokens)
        self._sets.append(known)
        if known is tokens:
            self._bytes += len(tokens)
        if self._bytes > MAX_BYTES:
            self.problem = (
                f"the tokens that could be drawn take more than {MAX_BYTES >> 20} MiB to record"
            )
            self._sets.clear()
            self._known.clear()

    def packed(self) -> bytes:
        """All of them, see `pack`."""
        return pack(self._sets)


def pack(sets: Sequence[bytes]) -> bytes:
    """One set for each token, compressed, each distinct one once; empty if all are whole."""
    if not any(sets):
        return b""
    numbers = {one: index for index, one in enumerate(dict.fromkeys(sets))}
    lengths = [len(one) for one in numbers]
    head = [len(numbers), *lengths, *(numbers[one] for one in sets)]
    return zlib.compress(b"".join([np.array(head, dtype=_ID).tobytes(), *numbers]), 1)


def unpack(packed: bytes) -> list[bytes]:
    """The sets of `pack`, of which equal ones are one object; none if all are whole."""
    if not packed:
        return []
    data = memoryview(zlib.decompress(packed))
    width = _ID.itemsize
    count = int.from_bytes(data[:width], "little")
    lengths = np.frombuffer(data[width : width * (1 + count)], _ID)
    body = len(data) - int(lengths.sum())
    ends = (body + np.cumsum(lengths)).tolist()
    found = [bytes(data[end - n : end]) for n, end in zip(lengths.tolist(), ends, strict=True)]
    return [found[i] for i in np.frombuffer(data[width * (1 + count) : body], _ID).tolist()]


@dataclass(frozen=True)
class SetColumn:
    """The set of each of M tokens, by its number among `sets`; number 0 is the whole vocabulary."""

    numbers_M: Ints
    sets: Sequence[bytes]

    def at(self, places: Ints | slice) -> SetColumn:
        """The column of some of the tokens."""
        return SetColumn(self.numbers_M[places], self.sets)

    def forbidden(self, part: slice, size: int) -> Mask | None:
        """Tokens of the vocabulary that are not in the sets of some tokens (rows); None: none."""
        used, row_M = np.unique(self.numbers_M[part], return_inverse=True)
        if not used.any():
            return None
        return np.stack([~mask_of(self.sets[number], size) for number in used.tolist()])[row_M]


def column(columns: Sequence[Sequence[bytes]], row_T: Ints, at_T: Ints) -> SetColumn | None:
    """The sets of the terms `at_T` of rows `row_T`; None if all are whole.

    `columns` has one set for each token of each row, or none where all of a row are whole.
    """
    if not any(columns):
        return None
    numbers = {WHOLE: 0}
    lengths = np.array([len(one) for one in columns], dtype=np.int64)
    flat = [numbers.setdefault(one, len(numbers)) for each in columns for one in each]
    starts = np.cumsum(lengths) - lengths
    found = np.zeros(len(row_T), dtype=np.int64)
    there = lengths[row_T] > 0
    found[there] = np.array(flat)[(starts[row_T] + at_T)[there]]
    return SetColumn(found, list(numbers))
