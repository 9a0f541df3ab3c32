"""A forest in parts that go through the model one at a time. No torch.

A part is some segments of a forest. The tokens above them that are not of the part belong to parts
before it, whose keys and values it attends to; so every token goes through the model once, whatever
the budget. Gradients flow up the other way: a part's backward pass comes after those of the parts
below it. Walked depth first, only the parts from a root down to the current one are alive at a
time, and their tokens are what the budget bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from langchain_art_server.algorithms.sequences.prefix_forest import Forest, Ints

#: A part may fill this share of the budget, even if the parts above it have left less.
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
    part takes the upper segments until the rest fits below it.

    Args:
        forest: to cut.
        budget: most tokens of a part and all parts above it. Long rows exceed it: a row's tokens
            are alive together, and each part may have a quarter of the budget whatever is above.

    Returns:
        Parts in depth-first order: a part's descendants follow right after it. Every token is in
        exactly one.
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
class _Task:
    """A part to make."""

    parent: int
    live: int  # tokens of the parts above it
    segments: list[tuple[int, bool]]  # each alone, or with all below it
    rest: list[int]  # the subtrees below the part


def _upper(
    trees: list[int], size: list[int], own: list[int], below: list[list[int]], room: int
) -> tuple[list[int], list[int]]:
    """Upper segments of some trees, at most half of `room`, and the subtrees left below them.

    Repeatedly takes the top of the largest subtree, until all that is left fits beside it.
    """
    heap = [(-size[tree], tree) for tree in trees]
    heapify(heap)
    taken: list[int] = []
    filled = 0
    while heap:
        height, tree = heap[0]
        if -height <= room - filled or filled + own[tree] > room // 2:
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
