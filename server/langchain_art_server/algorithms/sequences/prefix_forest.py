"""Rows of tokens to a forest that holds each shared prefix once. No torch.

With causal attention, a model computes the same for a prefix in every row that begins with it.
The forest is a prefix trie over the rows. Its tokens are laid out in preorder, so that every
subtree, and every run of tokens without a branch (a `Segment`), is one stretch of positions.

Index suffixes: N tokens of the forest, T tokens of one row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from langchain_art.wire.prefixes import common_prefix_length

Ints = NDArray[np.int64]
#: Bytes of a token in a key.
WIDTH = 4


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `end` of the forest, each the only child of the one before it."""

    start: int  # position of its first token
    end: int  # one past its last token; its subtrees follow there
    exit: int  # one past the last token below it
    depth: int  # how many tokens stand before its first one, in any row through it
    parent: int  # index of the segment above it, -1 for the first of a tree


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
    """

    token_ids_N: Ints
    depth_N: Ints  # the tokens' positions in their rows, from 0
    exit_N: Ints  # for each token, one past the last position below it
    rows: list[Ints]  # for each row, in the order given, the positions of its tokens (T)
    segments: list[Segment]  # in preorder; together they are all positions


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

    But for `Forest.rows`, the order of the sequences does not change the result.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    keys = [array.astype(">u4").tobytes() for array in arrays]  # bytes sort as the tokens do
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    shared = _shared(_trie([keys[i] for i in order]), token_cost)
    lengths = [branch.end - start for branch, start, _ in shared]
    ends = list(itertools.accumulate(lengths))
    exits = ends.copy()
    for index in reversed(range(len(shared))):
        if (parent := shared[index][2]) >= 0:
            exits[parent] = max(exits[parent], exits[index])
    segments = [
        Segment(end - length, end, leave, start, parent)
        for (_, start, parent), length, end, leave in zip(shared, lengths, ends, exits, strict=True)
    ]
    rows: list[Ints] = [np.empty(len(array), dtype=np.int64) for array in arrays]
    for (branch, _, _), segment in zip(shared, segments, strict=True):
        for i in order[branch.first : branch.last + 1]:
            places = rows[i][segment.depth : branch.end]  # shorter if the row ends in it
            places[:] = np.arange(segment.start, segment.start + len(places))
    starts = [segment.start - segment.depth for segment in segments]
    return Forest(
        token_ids_N=np.concatenate(
            [arrays[order[branch.last]][start : branch.end] for branch, start, _ in shared]
        ),
        depth_N=np.arange(ends[-1]) - np.repeat(starts, lengths),
        exit_N=np.repeat(exits, lengths),
        rows=rows,
        segments=segments,
    )


@dataclass
class _Branch:
    """Tokens `start` to `end` of the ordered rows `first` to `last`, which all share them.

    Rows that are prefixes of others end within the node, or above it. They come first in the
    order, and belong to the first child of the node in which they end.
    """

    start: int
    end: int
    first: int
    last: int
    children: list[_Branch] = field(default_factory=list["_Branch"])
    below: int = 0  # tokens of all nodes below it


def _trie(keys: list[bytes]) -> list[_Branch]:
    """The roots of the radix trie of rows in lexicographic order, as bytes.

    `path` leads from the root to the end of the previous row. The next row leaves it at the depth
    of their longest common prefix.
    """
    roots: list[_Branch] = []
    path: list[_Branch] = []
    for row, key in enumerate(keys):
        length = len(key) // WIDTH
        common = common_prefix_length(keys[row - 1], key) // WIDTH if row else 0
        while path and path[-1].start >= common:
            path.pop().last = row - 1
        if not path:
            path.append(_Branch(0, length, row, row))
            roots.append(path[0])
            continue
        top = path[-1]
        if top.end == common and not top.children:
            top.end = length  # the row before is a prefix of this one
            continue
        if top.end > common:
            rest = _Branch(common, top.end, top.first, row - 1, top.children)
            top.end, top.children = common, [rest]
        below = _Branch(common, length, row, row)
        top.children.append(below)
        path.append(below)
    for node in path:
        node.last = len(keys) - 1
    return roots


def _shared(roots: list[_Branch], token_cost: float) -> list[tuple[_Branch, int, int]]:
    """The trie's nodes in preorder, without those that are cheaper to copy into their children.

    Returns:
        For each its first token, the copied ones above it included, and the index of the one above.
    """
    nodes: list[_Branch] = []
    todo = list(roots)
    while todo:
        nodes.append(todo.pop())
        todo.extend(nodes[-1].children)
    for node in reversed(nodes):
        node.below = sum(child.end - child.start + child.below for child in node.children)
    found: list[tuple[_Branch, int, int]] = []
    stack = [(root, root.start, -1) for root in reversed(roots)]
    while stack:
        node, start, parent = stack.pop()
        children = node.children
        saved = token_cost * (node.end - start) * (len(children) - 1) if children else math.inf
        if saved >= node.below:
            found.append((node, start, parent))
            start, parent = node.end, len(found) - 1
        stack.extend((child, start, parent) for child in reversed(children))
    return found
