"""A prefix tree of token sequences: which earlier sequence a prompt extends. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from langchain_art.wire.turn_links import common_prefix_length

WIDTH = array("q").itemsize  # bytes of a token


@dataclass(frozen=True)
class Meeting:
    """Place where a prompt meets the sequences that a `PrefixTree` holds."""

    shared: int  # tokens of the longest prefix that the prompt has in common with any of them
    ends: tuple[int, ...]  # the sequences equal to that prefix, in the order they were added
    passes: int | None  # the newest sequence with that prefix; None if `shared` is 0
    within: tuple[int, ...]
    """The longest sequences that are a prefix of the prompt (equal ones, in the order they were
    added); equal to `ends` unless that is empty."""


@dataclass
class TreeNode:
    """A place in the tree. `edge` holds the tokens that lead to it, as bytes."""

    edge: bytes = b""
    newest: int = -1
    ends: list[int] = field(default_factory=list[int])
    children: dict[bytes, TreeNode] = field(default_factory=dict[bytes, "TreeNode"])


class PrefixTree:
    """Sequences of tokens, each shared prefix stored once.

    Adding or looking up a sequence compares each of its tokens once, as bytes, however many
    sequences there are.

    Example::

        tree = PrefixTree()
        tree.add(0, [1, 2, 3])
        tree.meet([1, 2, 3, 4])    # shared=3, ends=(0,): it extends sequence 0
        tree.meet([1, 2, 9])       # shared=2, ends=(), passes=0: it forks from it
    """

    def __init__(self) -> None:
        self.root = TreeNode()

    def add(self, index: int, tokens: Sequence[int]) -> None:
        """Add sequence number `index`; numbers ascend."""
        node, key, at = self.root, array("q", tokens).tobytes(), 0
        while at < len(key):
            first = key[at : at + WIDTH]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = TreeNode(key[at:])
            else:
                common = _common(child.edge, key[at : at + len(child.edge)])
                if common < len(child.edge):  # put a node into the edge that leads to `child`
                    upper = TreeNode(child.edge[:common], child.newest)
                    child.edge = child.edge[common:]
                    upper.children[child.edge[:WIDTH]] = child
                    child = node.children[first] = upper
            at += len(child.edge)
            child.newest = index
            node = child
        node.ends.append(index)

    def meet(self, prompt: Sequence[int]) -> Meeting:
        """Compare a prompt with every sequence that was added."""
        node, key, at = self.root, array("q", prompt).tobytes(), 0
        within: tuple[int, ...] = ()
        while True:
            if node.ends:
                within = tuple(node.ends)
            child = node.children.get(key[at : at + WIDTH]) if at < len(key) else None
            if child is None:
                passes = node.newest if at else None
                return Meeting(at // WIDTH, tuple(node.ends), passes, within)
            common = _common(child.edge, key[at : at + len(child.edge)])
            at += common
            if common < len(child.edge):
                return Meeting(at // WIDTH, (), child.newest, within)
            node = child


def _common(one: bytes, other: bytes) -> int:
    """Bytes of the common prefix, in whole tokens."""
    return common_prefix_length(one, other) // WIDTH * WIDTH
