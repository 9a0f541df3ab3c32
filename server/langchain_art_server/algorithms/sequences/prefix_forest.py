"""Rows of tokens to a forest that holds each shared prefix once. No torch.

With causal attention, a model computes the same for a prefix in every row that begins with it.
The forest is a prefix trie over the rows. Its tokens are laid out in preorder, so that every
subtree, and every run of tokens without a branch (a `Segment`), is one stretch of positions.

Index suffixes: N tokens of the forest, T tokens of one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `end` of the forest, each the only child of the one before it.

    Attributes:
        start: position of its first token.
        end: one past its last token; its subtrees follow there.
        exit: one past the last token below it.
        depth: how many tokens stand before its first one, in any row through it.
        parent: index of the segment above it, -1 for the first of a tree.
    """

    start: int
    end: int
    exit: int
    depth: int
    parent: int


@dataclass(frozen=True)
class Forest:
    """Distinct tokens of some rows, in preorder.

    A worked example, the rows ``[7, 8, 5]``, ``[7, 8, 6, 4]`` and ``[3]``, the tokens in the order
    of their ids::

        position   0  1  2  3  4  5
        token_ids  3  7  8  5  6  4
        depth      0  0  1  2  2  3      position of the token in its rows
        exit       1  6  6  4  6  6      one past the last token below it
        rows       [1 2 3]  [1 2 4 5]  [0]

    Token k is q itself or before it in its row exactly if ``k <= q < exit[k]``: that one array is
    the whole attention mask.

    Attributes:
        token_ids_N: the tokens.
        depth_N: their positions in their rows, from 0.
        exit_N: for each token, one past the last position below it.
        rows: for each row, in the order given, the positions of its tokens (T).
        segments: in preorder; together they are all positions.
    """

    token_ids_N: Ints
    depth_N: Ints
    exit_N: Ints
    rows: list[Ints]
    segments: list[Segment]


def grow(sequences: Sequence[Sequence[int]], token_cost: float = math.inf) -> Forest:
    """The forest of some rows.

    Sharing has a cost: every token below a shared prefix attends to it as a separate piece, at a
    cost that hardly depends on the piece's length. Where long rows diverge early that is more than
    it saves, and each child gets a copy of the prefix. A prefix of p tokens with m children and d
    tokens below it is shared if ``token_cost * p * (m - 1) >= d``.

    Args:
        sequences: token ids of the rows, each with at least one token, none negative.
        token_cost: cost of one more token in the model, over the cost of attending to one more
            piece. ``inf`` shares every prefix, 0 only rows that are prefixes of others.

    Returns:
        The forest; but for `rows`, the order of the sequences does not change it.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    keys = [array.astype(">u4").tobytes() for array in arrays]  # bytes sort as the tokens do
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    ordered = [arrays[i] for i in order]
    seeds = _seeds(_trie(ordered), token_cost)
    segments: list[Segment] = []
    pieces: list[Ints] = []
    places: list[Ints] = [np.empty(len(array), dtype=np.int64) for array in ordered]
    exits = [0] * len(seeds)
    position = 0
    for index, seed in enumerate(seeds):
        pieces.append(ordered[seed.last][seed.start : seed.end])
        for row in range(seed.first, seed.last + 1):
            end = min(seed.end, len(ordered[row]))
            places[row][seed.start : end] = np.arange(position, position + end - seed.start)
        position += seed.end - seed.start
        above = index
        while above >= 0:  # each ancestor's subtree reaches at least to here
            exits[above] = position
            above = seeds[above].parent
    position = 0
    for seed, leave in zip(seeds, exits, strict=True):
        end = position + seed.end - seed.start
        segments.append(Segment(position, end, leave, seed.start, seed.parent))
        position = end
    lengths = [segment.end - segment.start for segment in segments]
    starts = np.array([segment.start - segment.depth for segment in segments], dtype=np.int64)
    rows: list[Ints] = [places[0]] * len(order)
    for i, place in zip(order, places, strict=True):
        rows[i] = place
    return Forest(
        token_ids_N=np.concatenate(pieces),
        depth_N=np.arange(position) - np.repeat(starts, lengths),
        exit_N=np.repeat(np.array(exits, dtype=np.int64), lengths),
        rows=rows,
        segments=segments,
    )


@dataclass
class _Node:
    """Tokens `start` to `end` of the ordered rows `first` to `last`, which all share them.

    Rows that are prefixes of others end within the node, or above it. They come first in the
    order, and belong to the first child of the node in which they end.
    """

    start: int
    end: int
    first: int
    last: int
    children: list[_Node] = field(default_factory=list["_Node"])


def _trie(ordered: list[Ints]) -> list[_Node]:
    """The radix trie of rows in lexicographic order; its roots.

    `path` leads from the root to the end of the previous row. The next row leaves it at the depth
    of their longest common prefix.
    """
    roots: list[_Node] = []
    path: list[_Node] = []
    for row, tokens in enumerate(ordered):
        common = _common(ordered[row - 1], tokens) if row else 0
        while path and path[-1].start >= common:
            path.pop().last = row - 1
        if not path:
            path.append(_Node(0, len(tokens), row, row))
            roots.append(path[0])
            continue
        top = path[-1]
        if top.end == common and not top.children:
            top.end = len(tokens)  # the row before is a prefix of this one
            continue
        if top.end > common:
            rest = _Node(common, top.end, top.first, row - 1, top.children)
            top.end, top.children = common, [rest]
        below = _Node(common, len(tokens), row, row)
        top.children.append(below)
        path.append(below)
    for node in path:
        node.last = len(ordered) - 1
    return roots


@dataclass(frozen=True)
class _Seed:
    """A segment to make: tokens `start` to `end` of the ordered rows `first` to `last`."""

    start: int
    end: int
    first: int
    last: int
    parent: int


def _seeds(roots: list[_Node], token_cost: float) -> list[_Seed]:
    """The trie's nodes in preorder, without those that are cheaper to copy into their children."""
    below = _tokens_below(roots)
    seeds: list[_Seed] = []
    stack = [(root, root.start, -1) for root in reversed(roots)]
    while stack:
        node, start, parent = stack.pop()
        children = node.children
        saved = token_cost * (node.end - start) * (len(children) - 1) if children else math.inf
        if saved >= below[id(node)]:
            seeds.append(_Seed(start, node.end, node.first, node.last, parent))
            start, parent = node.end, len(seeds) - 1
        stack.extend((child, start, parent) for child in reversed(children))
    return seeds


def _tokens_below(roots: list[_Node]) -> dict[int, int]:
    found: dict[int, int] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if not ready:
            stack.append((node, True))
            stack.extend((child, False) for child in node.children)
            continue
        found[id(node)] = sum(c.end - c.start + found[id(c)] for c in node.children)
    return found


def _common(one: Ints, other: Ints) -> int:
    """How many tokens two rows have in common from the start."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
