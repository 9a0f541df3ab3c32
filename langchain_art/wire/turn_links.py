"""Links between model calls: which call continues which, and which were superseded.

The client decides this while a graph runs (`tracing`), the server from the records of calls that
were tagged with a trajectory's id (`jobs.trajectory_assembly`). Both number calls by their start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

_ROOT = 0
#: Parameters of a call that say how its answer is drawn and sent, not what is asked.
DRAWING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stream", "stream_options"),
    *("timeout", "extra_headers", "extra_query", "user", "store", "service_tier", "metadata"),
    "art",
}


class PromptPosition(NamedTuple):
    """End of a prompt in a `ConversationTree`, and what it continues."""

    node: int
    """Equal for equal prompts."""
    known: int
    """Number of its first messages that are the prompt and reply of an earlier call; 0: none."""
    continues: tuple[int, ...]
    """The calls with exactly these messages, in the order in which they were answered."""


class ConversationTree:
    """A prefix tree of conversations, each a sequence of hashable messages.

    A lookup costs one dictionary access per message of the prompt, however many calls there are;
    of a prompt that begins with the one before, one per message after it.

    Example::

        tree = ConversationTree()
        first = tree.locate(["system", "user"])
        tree.add_reply(first, "reply", call=0)
        tree.locate(["system", "user", "reply", "tool result"])    # known=3, continues=(0,)
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, Hashable], int] = {}
        self._ends: defaultdict[int, list[int]] = defaultdict(list)
        #: The latest prompt, and the nodes of its messages.
        self._latest: tuple[list[Hashable], list[int]] = [], []

    def locate(self, prompt: Iterable[Hashable]) -> PromptPosition:
        """Add a prompt, and find the longest earlier conversation that it begins with."""
        messages, (before, nodes) = list(prompt), self._latest
        nodes = nodes.copy() if messages[: len(before)] == before else []
        node = nodes[-1] if nodes else _ROOT
        steps, ends = self._steps, self._ends
        for message in messages[len(nodes) :]:
            node = steps.setdefault((node, message), len(steps) + 1)
            nodes.append(node)
        self._latest = messages, nodes
        for known in range(len(nodes), 0, -1):
            if nodes[known - 1] in ends:
                return PromptPosition(node, known, tuple(ends[nodes[known - 1]]))
        return PromptPosition(node, 0, ())

    def add_reply(self, prompt: PromptPosition, reply: Hashable, call: int) -> None:
        """Add the conversation that a call's reply makes of its prompt; later prompts find it."""
        node = self._steps.setdefault((prompt.node, reply), len(self._steps) + 1)
        self._ends[node].append(call)


def nearest_call(
    namespace: str, calls: Iterable[tuple[int, str]], extra_choices: Container[int] = ()
) -> int | None:
    """The call that a prompt continues, of several whose conversations are equal.

    The nearest in the graph (the same task, else one in the same subgraph run or branch), then
    one that is no extra choice (a second or later one of a request, ``n`` > 1), then the latest.
    """

    def rank(call: tuple[int, str]) -> tuple[bool, bool, bool, int]:
        number, other = call
        around = other.rpartition("|")[0] == namespace.rpartition("|")[0]
        return other == namespace, around, number not in extra_choices, number

    return max(calls, key=rank, default=(None, ""))[0]


def unused_choices(choices: Sequence[int], used: Container[int]) -> list[int]:
    """The choices of one request that do not count: the unused; if none is used, all but the first.

    `used` are the calls that a later prompt continues, or that a node returned.
    """
    kept = [choice for choice in choices if choice in used] or choices[:1]
    return [choice for choice in choices if choice not in kept]


def superseded_attempts(attempts: Iterable[tuple[Hashable, float]]) -> set[int]:
    """Positions of the calls whose task was attempted again: only a task's last attempt counts.

    `attempts` holds each call's task (None: unknown, the call counts) and attempt of it, from 1.
    """
    given = list(attempts)
    last: dict[Hashable, float] = {}
    for task, attempt in given:
        last[task] = max(attempt, last.get(task, attempt))
    return {
        position
        for position, (task, attempt) in enumerate(given)
        if task is not None and attempt < last[task]
    }


S = TypeVar("S", bound=Sequence[object])


def common_prefix_length(one: S, other: S) -> int:
    """Number of items that two sequences have in common from the start.

    Slices are compared by bisection, so that equal stretches are compared in C. For numbers packed
    into bytes, divide the result by their width (rounding down).

    Example: ``common_prefix_length([1, 2, 3], [1, 2, 9, 3])`` is 2. Raises TypeError if the types
    differ: their slices would never be equal.
    """
    if type(one) is not type(other):
        raise TypeError(f"got {type(one).__name__} and {type(other).__name__}, expected one type")
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high - 1:  # the first `low` items are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
