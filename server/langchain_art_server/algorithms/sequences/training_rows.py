"""Packing: the calls of one run into rows of tokens, and rows into micro-batches. No torch.

Each sampled token is trained exactly once; where a later prompt repeats it, it is context. Only
token ids are compared: a call extends a row if its prompt begins with exactly the row's tokens, so
text that was rendered or tokenised differently opens another row.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

from langchain_art.errors import InvalidRequest
from langchain_art.wire.turn_links import common_prefix_length
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS

LOGPROB_SLACK = 1e-6  # A logprob may be this far above 0: rounding of a sampler's log-softmax
ASIDE = 16  # A row may leave its neighbours if no more than one of so many of its tokens is copied


@dataclass(frozen=True)
class Row:
    """One sequence for the learner: context and sampled tokens of one or more calls, in order.

    A worked example. Call 1 has the prompt ``[1, 2]`` and the reply ``[3, 4]``, call 2 the prompt
    ``[1, 2, 3, 4, 5]`` and the reply ``[6]``. The advantage of both is 0.5, the weight of each
    token 0.2::

        Row(token_ids=[1, 2, 3, 4, 5, 6], mask=[0, 0, 1, 1, 0, 1],
            logprobs=[0, 0, -0.1, -0.2, 0, -0.3], advantages=[0, 0, .5, .5, 0, .5],
            temperature=1.0, weights=[0, 0, .2, .2, 0, .2], calls=[-1, -1, 0, 0, -1, 1])

    Each list has one entry per token. `mask` is 1 for trained tokens. `logprobs` are the sampler's.
    `weights` are factors in the loss, which is a sum; if empty, each of the N trained tokens of a
    step weighs 1/N. `calls` is the number of the row's call that sampled the token, -1 for context;
    if empty, all trained tokens of the row are one call's. `drawn_from` are the sets of tokens that
    they were drawn from (`token_sets`); if empty, all were drawn from the whole vocabulary.
    `images` are those whose ids (`image_tokens`) are among the tokens, by SHA-256.
    """

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    advantages: list[float]
    temperature: float = 1.0
    weights: list[float] = field(default_factory=list[float])
    calls: list[int] = field(default_factory=list[int])
    drawn_from: list[bytes] = field(default_factory=list[bytes])
    images: dict[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(frozen=True)
class SampledCall:
    """One model call to train: ``SampledCall("chatcmpl-a", [1, 2], [3, 4], [-0.1, -0.2])``."""

    call_id: str  # the completion's id, once per run
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]  # the sampled reply
    logprobs: Sequence[float]  # the sampler's, one per token of `token_ids`, in nats
    temperature: float = 1.0  # of the distribution that was sampled
    advantage: float | Sequence[float] = 0.0  # of all of its tokens, or of each
    weight: float | None = None  # of each of its tokens in the loss; None: equal for the whole step
    drawn_from: Sequence[bytes] = ()  # the set of each token (`token_sets`); empty: all are whole
    images: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # of the prompt


@dataclass
class _OpenRow:
    """A row that may still grow. `key` holds its tokens as bytes, for fast prefix comparison."""

    row: Row
    key: bytes = b""
    calls: int = 0

    def extend(self, call: SampledCall) -> None:
        row = self.row
        context = call.prompt_token_ids[len(row.token_ids) :]
        before, sampled = [0.0] * len(context), len(call.token_ids)
        row.token_ids.extend([*context, *call.token_ids])
        row.mask.extend([0] * len(context) + [1] * sampled)
        row.logprobs.extend([*before, *_at_most_zero(call.logprobs)])
        given = call.advantage
        row.advantages.extend(before)
        row.advantages.extend(given if isinstance(given, Sequence) else [given] * sampled)
        if call.weight is not None:
            row.weights.extend(before + [call.weight] * sampled)
        row.calls.extend([-1] * len(context) + [self.calls] * sampled)
        if call.drawn_from or row.drawn_from:
            row.drawn_from.extend([b""] * (len(row.token_ids) - sampled - len(row.drawn_from)))
            row.drawn_from.extend(call.drawn_from or [b""] * sampled)
        row.images.update(call.images)
        self.calls += 1
        self.key = array("q", row.token_ids).tobytes()


def rows_of_run(calls: Iterable[SampledCall]) -> list[Row]:
    """Lay the trained calls of one run into as few rows as their tokens allow.

    A call extends the open row whose tokens are the longest prefix of its prompt; every open row
    of the run is compared, since parallel nodes interleave. If none fits (a branch, a rewritten
    history, another temperature) it opens a row, with its whole prompt as context. The caller
    excludes calls that are not trained; a later prompt that holds their replies has them as
    context.

    The calls are in the order in which they were made, the rows in that in which they were opened.
    Their tokens with mask 1 are the sampled tokens of the calls, each once.

    Raises InvalidRequest: a call's tokens, logprobs or temperature are invalid, a call occurs
    twice, an advantage or a weight is not finite, or only some calls have a weight.
    """
    open_rows: list[_OpenRow] = []
    seen: set[str] = set()
    for call in calls:
        if call.call_id in seen:
            raise InvalidRequest(f"call {call.call_id!r} occurs twice in one run", param="calls")
        seen.add(call.call_id)
        if call.token_ids:
            _check_call(call)
            _row_for(call, open_rows).extend(call)
    rows = [found.row for found in open_rows]
    if any(row.weights and len(row.weights) < len(row.mask) for row in rows):
        raise InvalidRequest("got calls with and calls without a weight in one row", param="calls")
    return rows


def microbatches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Micro-batches of rows of similar length that, padded to their longest, fit a budget.

    Longest first, so that memory runs out in the first micro-batch or in none. A row longer than
    the budget goes alone. Example: ``microbatches([3, 9, 4], 10)`` gives ``[[1], [2, 0]]``, the
    indices of rows whose lengths are 3, 9 and 4 tokens, in micro-batches of at most 10 padded
    tokens (rows times the longest).
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def check_rows(rows: Sequence[Row], vocab_size: int, *, trained: bool = True) -> None:
    """Refuse rows if there are none, or one is invalid, or (with `trained`) no token is trained.

    Raises InvalidRequest: naming the first row that is wrong, and why.
    """
    if not rows:
        raise InvalidRequest("got no rows, expected at least one", param="rows")
    for index, row in enumerate(rows):
        if problem := _problem(row, vocab_size):
            raise InvalidRequest(f"row {index}: {problem}", param="rows")
    if trained and not any(map(any, (row.mask for row in rows))):
        raise InvalidRequest(
            f"got {len(rows)} rows without a single trained token (mask 1), nothing to learn from",
            param="rows",
        )


def _row_for(call: SampledCall, open_rows: list[_OpenRow]) -> _OpenRow:
    prompt = array("q", call.prompt_token_ids).tobytes()
    fits = [
        found
        for found in open_rows
        if found.row.temperature == call.temperature and prompt.startswith(found.key)
    ]
    if not fits:
        fits = [_OpenRow(Row([], [], [], [], call.temperature))]
        open_rows += fits
    return max(fits, key=lambda found: len(found.key))


def _check_call(call: SampledCall) -> None:
    problem = None
    if not call.prompt_token_ids:
        problem = "got an empty prompt, expected at least one token before the reply"
    elif len(call.token_ids) != len(call.logprobs):
        problem = (
            f"got {len(call.token_ids)} tokens and {len(call.logprobs)} logprobs, expected as many"
        )
    elif len(call.drawn_from) not in (0, len(call.token_ids)):
        problem = (
            f"got {len(call.token_ids)} tokens and {len(call.drawn_from)} sets of tokens that they "
            "were drawn from, expected as many or none"
        )
    elif min(chain(call.prompt_token_ids, call.token_ids)) < 0:
        problem = "got a negative token id"
    elif wrong := _no_logprobs(call.logprobs):
        problem = f"got the logprob {wrong[0]!r}, expected a finite number of at most 0"
    elif not (math.isfinite(call.temperature) and call.temperature > 0):
        problem = f"got temperature={call.temperature!r}, expected a finite number above 0"
    elif isinstance(call.advantage, Sequence) and len(call.advantage) != len(call.token_ids):
        problem = (
            f"got {len(call.advantage)} advantages for {len(call.token_ids)} sampled tokens, "
            "expected one for all, or one for each"
        )
    elif not (_all_finite(call.advantage) and math.isfinite(call.weight or 0.0)):
        problem = (
            f"got advantage={call.advantage!r} and weight={call.weight!r}, expected finite numbers"
        )
    if problem:
        raise InvalidRequest(f"call {call.call_id!r}: {problem}", param="calls")


def _all_finite(advantage: float | Sequence[float]) -> bool:
    return all(map(math.isfinite, advantage if isinstance(advantage, Sequence) else (advantage,)))


def _at_most_zero(logprobs: Sequence[float]) -> Sequence[float]:
    return logprobs if max(logprobs) <= 0.0 else [min(0.0, value) for value in logprobs]


def _no_logprobs(values: Sequence[float]) -> list[float]:
    """Logprobs that are not finite, or above 0. A sum is finite only if all are: it takes less."""
    if math.isfinite(sum(values)) and max(values) <= LOGPROB_SLACK:
        return []
    return [one for one in values if not (math.isfinite(one) and one <= LOGPROB_SLACK)]


def _problem(row: Row, vocab_size: int) -> str | None:
    length = len(row.token_ids)
    if length == 0:
        return "got no tokens, expected at least one"
    others = [len(row.mask), len(row.logprobs), len(row.advantages)]
    if others != [length] * 3:
        return f"got {length} tokens and {others} masks, logprobs and advantages, expected as many"
    others = [len(row.weights), len(row.calls), len(row.drawn_from)]
    if not set(others) <= {0, length}:
        return f"got {length} tokens and {others} weights, calls and sets, expected as many or none"
    texts = [one for one in row.token_ids if one < IMAGE_IDS] if row.images else row.token_ids
    low, high = min(texts, default=0), max(texts, default=0)
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        return (
            f"got token id {worst}, expected 0 to {vocab_size - 1}; these tokens are not of the "
            "learner's model"
        )
    if not set(row.mask) <= {0, 1}:
        return f"got the mask values {sorted(set(row.mask))}, expected 0 and 1"
    if row.mask[0]:
        return "its first token is trained, expected at least one token of context before it"
    if not all(map(math.isfinite, chain(row.logprobs, row.advantages, row.weights))):
        return "got a logprob, an advantage or a weight that is not finite"
    if not (math.isfinite(row.temperature) and row.temperature > 0):
        return f"got temperature={row.temperature!r}, expected a finite number above 0"
    return None


def prefix_order(rows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Rows (indices) in the order of their tokens, and how many the row before does not begin with.

    Rows that begin alike are neighbours in that order.
    """
    order = sorted(range(len(rows)), key=lambda index: (list(rows[index]), index))
    pairs = pairwise([[], *(list(rows[index]) for index in order)])
    return [
        (index, len(row) - common_prefix_length(before, row))
        for index, (before, row) in zip(order, pairs, strict=True)
    ]


def forest_groups(rows: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Group rows (token ids), in the order of their tokens, so that distinct tokens fit a budget.

    If that makes fewer groups, a later row follows where the next one does not fit: the one that
    leaves least of the budget, and of which few tokens are copied (`ASIDE`). A row longer than the
    budget goes alone. Example: rows of the tokens 1 2 3, 7 7 7 and 1 2 4 and a budget of 4 give
    ``[[0, 2], [1]]``, indices of rows.
    """
    order = prefix_order(rows)
    return min(
        _filled(rows, order, budget, aside=False), _filled(rows, order, budget, aside=True), key=len
    )


def _filled(
    rows: Sequence[Sequence[int]], order: list[tuple[int, int]], budget: int, *, aside: bool
) -> list[list[int]]:
    groups: list[list[int]] = []
    # Each row with the number of tokens that it shares with the one before.
    rest = [(index, len(rows[index]) - new) for index, new in order]
    while rest:
        groups.append([rest[0][0]])
        room = budget - len(rows[rest.pop(0)[0]])
        while rest:
            at, new = 0, len(rows[rest[0][0]]) - rest[0][1]
            if new > room:
                others = _others(rows, rest, room) if aside else ()
                at, new = max(others, key=lambda one: one[1], default=(0, 0))
                if not at:
                    break
                rest[at + 1 : at + 2] = [(i, min(n, rest[at][1])) for i, n in rest[at + 1 : at + 2]]
            groups[-1].append(rest.pop(at)[0])
            room -= new
    return groups


def _others(
    rows: Sequence[Sequence[int]], rest: Sequence[tuple[int, int]], room: int
) -> Iterator[tuple[int, int]]:
    """Places of later rows that fit, and their tokens that the rows before all do not have."""
    shared = list(accumulate((shared for _, shared in rest), min))
    for at in range(1, len(rest)):
        length = len(rows[rest[at][0]])
        copied = max(one for _, one in rest[at : at + 2]) - shared[at]
        if length - shared[at] <= room and copied * ASIDE <= length:
            yield at, length - shared[at]


def shares(rows: Sequence[Sequence[int]], count: int, *, merged: bool = True) -> list[list[int]]:
    """Divide rows into shares of about the same cost.

    The order of `prefix_order` is cut into shares: only the prefix that the rows at a cut have in
    common is computed twice.

    Example: ``shares([[1, 2, 3], [7, 7, 7], [1, 2, 4]], 2)`` gives ``[[0, 2], [1]]``.

    Args:
        rows: token ids, at least one row.
        count: of shares, at least 1.
        merged: a shared prefix is computed once; False: a row costs its length.

    Returns:
        Indices of rows, ascending in each share. With fewer rows than shares, the last shares are
        empty; the first one never is.
    """
    costs = [
        (index, max(1, new if merged else len(rows[index]))) for index, new in prefix_order(rows)
    ]
    found: list[list[int]] = [[] for _ in range(count)]
    total, done = sum(cost for _, cost in costs), 0
    for index, cost in costs:
        found[int((done + cost / 2) * count / total)].append(index)
        done += cost
    found.sort(key=lambda share: not share)
    return [sorted(share) for share in found]
