"""Rows of tokens to a forest that holds each shared prefix once. No torch.

With causal attention, a model computes the same for a prefix in every row that begins with it.
The forest is a prefix trie over the rows. Its tokens are laid out in preorder, so that every
subtree, and every run of tokens without a branch (a `Segment`), is one stretch of positions.

Index suffixes: N tokens of the forest, T tokens of one row.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from langchain_art.wire.turn_links import common_prefix_length
from langchain_art_server.algorithms.sequences.prefix_tree import WIDTH, PrefixTree, TreeNode
from langchain_art_server.algorithms.sequences.training_rows import forest_groups

Ints = NDArray[np.int64]


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
    tree = PrefixTree()
    for row, sequence in enumerate(sequences):
        tree.add(row, sequence)
    pieces = _shared(tree.root, token_cost)
    lengths = [len(edge) // WIDTH for edge, _, _ in pieces]
    ends = list(itertools.accumulate(lengths))
    exits = ends.copy()
    for index, (_, _, parent) in reversed([*enumerate(pieces)]):
        if parent >= 0:
            exits[parent] = max(exits[parent], exits[index])
    segments: list[Segment] = []
    rows = [np.arange(0)] * len(sequences)
    for (_, ending, parent), length, end, leave in zip(pieces, lengths, ends, exits, strict=True):
        above = segments[parent] if parent >= 0 else None
        depth = above.depth + above.end - above.start if above else 0
        segments.append(Segment(end - length, end, leave, depth, parent))
        if ending:
            path = _path(segments)
            for row in ending:
                rows[row] = path[: len(sequences[row])]
    starts = [segment.start - segment.depth for segment in segments]
    return Forest(
        token_ids_N=np.frombuffer(b"".join(edge for edge, _, _ in pieces), dtype=np.int64),
        depth_N=np.arange(ends[-1]) - np.repeat(starts, lengths),
        exit_N=np.repeat(exits, lengths),
        rows=rows,
        segments=segments,
    )


def _path(segments: Sequence[Segment]) -> Ints:
    """Positions of the tokens down to the last one of the last segment."""
    index, found = len(segments) - 1, list[Ints]()
    while index >= 0:
        found.append(np.arange(segments[index].start, segments[index].end))
        index = segments[index].parent
    return np.concatenate(found[::-1])


def _shared(root: TreeNode, token_cost: float) -> list[tuple[bytes, list[int], int]]:
    """The tree's nodes in preorder, without those that are cheaper to copy into their children.

    A child alone is part of the node above it: the rows that end between them are its beginnings.
    Rows that end in a node that is copied get the copy of its first child.

    Returns:
        For each its tokens, the rows that end in it, and the index of the one above.
    """
    nodes: list[TreeNode] = []
    todo = [root]
    while todo:
        node = todo.pop()
        while len(node.children) == 1:
            [child] = node.children.values()
            node.edge, node.ends = node.edge + child.edge, node.ends + child.ends
            node.children = child.children
        nodes.append(node)
        todo.extend(node.children.values())
    below: dict[int, int] = {}
    for node in reversed(nodes):
        children = node.children.values()
        below[id(node)] = sum(len(child.edge) + below[id(child)] for child in children)
    found: list[tuple[bytes, list[int], int]] = []
    stack = [(root, b"", list[int](), -1)]
    while stack:
        node, edge, ending, parent = stack.pop()
        edge, ending = edge + node.edge, ending + node.ends
        pieces = len(node.children) - 1
        if edge and (pieces < 0 or token_cost * len(edge) * pieces >= below[id(node)]):
            found.append((edge, ending, parent))
            edge, ending, parent = b"", [], len(found) - 1
        order = sorted(node.children, key=lambda token: int.from_bytes(token, sys.byteorder))
        stack.extend(
            (node.children[first], edge, ending if first == order[0] else [], parent)
            for first in reversed(order)
        )
    return found


def planted(
    sequences: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
    trunk: int,
    token_cost: float = math.inf,
) -> Forest:
    """A forest of each group of rows, one after the other, all below one trunk.

    What rows of different groups share is copied, but for their first `trunk` tokens, which all
    rows have in common, and behind which each has another token.
    """
    tokens = [np.asarray(sequences[0][:trunk], np.int64)]
    depths, exits = [np.arange(trunk)], list[Ints]()
    rows, segments, at = [np.arange(0)] * len(sequences), list[Segment](), trunk
    for group in groups:
        own = grow([sequences[index][trunk:] for index in group], token_cost)
        above = len(segments) + bool(trunk)
        for one in own.segments:
            parent = one.parent + above if one.parent >= 0 else 0 if trunk else -1
            places = (one.start + at, one.end + at, one.exit + at)
            segments.append(Segment(*places, one.depth + trunk, parent))
        for index, row in zip(group, own.rows, strict=True):
            rows[index] = np.concatenate([np.arange(trunk), row + at])
        tokens.append(own.token_ids_N)
        depths.append(own.depth_N + trunk)
        exits.append(own.exit_N + at)
        at += len(own.token_ids_N)
    if trunk:
        segments.insert(0, Segment(0, trunk, at, 0, -1))
        exits.insert(0, np.full(trunk, at))
    columns = [np.concatenate(pieces) for pieces in (tokens, depths, exits)]
    return Forest(*columns, rows=rows, segments=segments)


#: A part may fill this share of the budget, even if the parts above it have left less. One of upper
#: segments alone fills no more, beyond its first: what is below it needs the rest.
LEAST_ROOM = 4


@dataclass(frozen=True)
class Part:
    """Some segments of a forest. Index suffixes: P its tokens, E those above them."""

    parent: int
    """Index of the part above it, -1 for none. All tokens that it attends to are in that part or in
    those above that one."""
    tokens_P: Ints  # positions in the forest, ascending (preorder)
    above_E: Ints  # positions of all ancestors of its tokens that are not among them, ascending


def split(forest: Forest, budget: int) -> list[Part]:
    """Cut a forest into parts, so that few tokens are alive at a time.

    Neighbouring subtrees that fit the budget are put into one part. Of those that do not fit, a
    part takes the upper segments until the rest fits below it. The budget is the most tokens of a
    part and all parts above it. Long rows exceed it: a row's tokens are alive together, and each
    part may have a quarter of the budget whatever is above.

    Returns parts in depth-first order: a part's descendants follow right after it. Every token is
    in exactly one.
    """
    below: list[list[int]] = [[] for _ in forest.segments]
    roots: list[int] = []
    for index, segment in enumerate(forest.segments):
        (below[segment.parent] if segment.parent >= 0 else roots).append(index)
    size = [segment.exit - segment.start for segment in forest.segments]
    own = [segment.end - segment.start for segment in forest.segments]
    parts: list[Part] = []
    stack: list[_Task] = []

    def lay(trees: Sequence[int], parent: int, live: int) -> None:
        """Push tasks for everything in these subtrees."""
        room = max(budget - live, budget // LEAST_ROOM)
        tall = [tree for tree in trees if size[tree] > room]
        wide = [tree for tree in tall if own[tree] > room // 2]
        for tree in wide:
            stack.append(_Task(parent, live, [(tree, False)], below[tree]))
        slim = [tree for tree in tall if own[tree] <= room // 2]
        while slim:
            taken, rest = _upper(slim, size, own, below, room)
            slim = [tree for tree in slim if tree not in taken]
            stack.append(_Task(parent, live, [(tree, False) for tree in taken], rest))
        for group in reversed(_fill([tree for tree in trees if size[tree] <= room], size, room)):
            stack.append(_Task(parent, live, [(tree, True) for tree in group], []))

    lay(roots, -1, 0)
    while stack:
        task = stack.pop()
        parts.append(_part(forest, task))
        lay(task.rest, len(parts) - 1, task.live + len(parts[-1].tokens_P))
    return parts


def most_alive(parts: Sequence[Part]) -> int:
    """Most tokens of a part and all parts above it."""
    alive: list[int] = []
    for part in parts:
        alive.append(len(part.tokens_P) + (alive[part.parent] if part.parent >= 0 else 0))
    return max(alive)


@dataclass(frozen=True)
class PartCosts:
    """Seconds of the forward and backward passes of parts.

    A part takes as long as the slower of the two: the host, which launches as many kernels for few
    tokens as for many, and the device.
    """

    launches: float = 0.0  # of the host for a part
    beside: float = 0.0  # of a part, in which the device has nothing to do
    token: float = 1.0  # of the device for a token

    def of(self, sizes: Sequence[int], slower: tuple[float, float] = (1.0, 1.0)) -> float:
        """Seconds of parts of these sizes; `slower` are factors of the host and the device."""
        host, token = self.launches * slower[0], self.token * slower[1]
        return sum(max(host, token * size) + self.beside for size in sizes)


def lay_out(
    sequences: Sequence[Sequence[int]], token_cost: float, budget: int, costs: PartCosts
) -> tuple[Forest, list[Part]]:
    """The forest of some rows (`grow`) in parts (`split`), as it costs least.

    If parts cost nothing, each shared token is there once. Else parts may be filled with rows in
    the order of their tokens, each with a copy of what its rows share with those of others; what
    all rows share may be a trunk, alive as long as they are.
    """
    forest = grow(sequences, token_cost)
    found = [(forest, split(forest, budget))]
    if len(found[0][1]) > 1 and (costs.launches or costs.beside):
        rows = [list(one) for one in sequences]
        common = min(common_prefix_length(min(rows), max(rows)), min(map(len, rows)) - 1)
        for trunk in sorted({0, common}):
            room = max(budget - trunk, budget // LEAST_ROOM)
            groups = forest_groups([row[trunk:] for row in rows], room)
            forest = planted(rows, groups, trunk, token_cost)
            found.append((forest, split(forest, budget)))

    def cost(one: tuple[Forest, list[Part]]) -> tuple[bool, float]:
        return most_alive(one[1]) > budget, costs.of([len(part.tokens_P) for part in one[1]])

    return min(found, key=cost)


@dataclass(frozen=True)
class _Task:
    parent: int
    live: int  # tokens of the parts above it
    segments: list[tuple[int, bool]]  # each alone, or with all below it
    rest: list[int]  # the subtrees below the part


def _upper(
    trees: list[int], size: list[int], own: list[int], below: list[list[int]], room: int
) -> tuple[list[int], list[int]]:
    """Upper segments of some trees, few of `room`, and the subtrees left below them.

    Repeatedly takes the top of the largest subtree, until all that is left fits beside it.
    """
    heap = [(-size[tree], tree) for tree in trees]
    heapify(heap)
    taken: list[int] = []
    filled = 0
    while heap:
        height, tree = heap[0]
        if -height <= room - filled or (taken and filled + own[tree] > room // LEAST_ROOM):
            break
        heappop(heap)
        taken.append(tree)
        filled += own[tree]
        for child in below[tree]:
            heappush(heap, (-size[child], child))
    return sorted(taken), sorted({tree for _, tree in heap}.difference(trees))


def _fill(trees: list[int], size: list[int], room: int) -> list[list[int]]:
    """Neighbouring subtrees in groups that fit."""
    groups: list[list[int]] = []
    filled = room
    for tree in trees:
        if filled + size[tree] > room:
            groups.append([])
            filled = 0
        groups[-1].append(tree)
        filled += size[tree]
    return groups


def _part(forest: Forest, task: _Task) -> Part:
    own: list[Ints] = []
    above: set[int] = set()
    for index, complete in task.segments:
        segment = forest.segments[index]
        own.append(np.arange(segment.start, segment.exit if complete else segment.end))
        index = segment.parent
        while index >= 0 and index not in above:
            above.add(index)
            index = forest.segments[index].parent
    above -= {index for index, _ in task.segments}
    segments = [forest.segments[index] for index in sorted(above)]
    others = [np.arange(segment.start, segment.end) for segment in segments]
    return Part(task.parent, np.concatenate(own), np.concatenate([np.arange(0), *others]))
