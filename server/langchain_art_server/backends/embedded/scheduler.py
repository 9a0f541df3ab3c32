"""Scheduler with continuous batching: calls join the running batch at any step and leave at any.

A step admits waiting sequences, prefills what the prefix cache lacks of their prompts, and then
samples one token for every running sequence. Slots ``0 … ready-1`` are decoded, those behind them
are still prefilled; `rows` lists the sequences in order of their slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from langchain_art.errors import ArtError, InvalidRequest
from langchain_art.wire.prefixes import common_prefix_length
from langchain_art_server.backends.base import FinishReason
from langchain_art_server.backends.embedded.model_runner import SerialRunner, SlotRunner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank, RoutedAdapter
from langchain_art_server.backends.embedded.prefix_cache import BLOCK, PrefixCache
from langchain_art_server.backends.embedded.token_sampler import (
    SampledTokens,
    SamplingState,
    TokenSampler,
)

#: Padded tokens that one prefill pass takes.
PREFILL_TOKENS = 2048
#: Tokens that an admitted sequence must have room for, so that it is not preempted at once.
_HEADROOM = 64


@dataclass(eq=False)
class SequenceState:
    """One reply while it is sampled.

    Attributes:
        prompt: token ids of the prompt.
        limit: most tokens of the reply, at least 1.
        sampling: how they are sampled.
        adapter: whose weights; None for the base model.
        on_token: gets each token that does not end the reply; True ends it (a stop string).
        cancelled: asked at every step.
        out: token ids of the reply so far, with their `logprobs` and, if asked for, `top` logprobs.
        finish: why it ended; None if it runs, was cancelled or has an `error`.
        filled: tokens whose keys and values are in the KV cache.
        leader: a running sequence with the same prefix, whose prefill this one waits for.
    """

    prompt: list[int]
    limit: int
    sampling: SamplingState
    adapter: RoutedAdapter | None = None
    on_token: Callable[[int], bool] | None = None
    cancelled: Callable[[], bool] = bool
    out: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    finish: FinishReason | None = None
    error: ArtError | None = None
    filled: int = 0
    leader: SequenceState | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and reply so far."""
        return self.prompt + self.out if self.out else self.prompt


class Scheduler:
    """Runs sequences to their end, at most `max_batch` at once; one, if the runner has no slots.

    Attributes:
        prefilled: prompt tokens that went through the model.
        preempted: times that a sequence was sent back to wait because memory was short.
    """

    def __init__(
        self,
        runner: SlotRunner | SerialRunner,
        bank: AdapterBank,
        prefixes: PrefixCache | None,
        eos: set[int],
        max_batch: int,
    ) -> None:
        self._runner, self._bank, self._prefixes, self._eos = runner, bank, prefixes, eos
        self._max_batch = max_batch if prefixes is not None else 1
        self._waiting: deque[SequenceState] = deque()
        self._rows: list[SequenceState] = []
        self._ready = 0
        #: Blocks of the prefix cache that are being computed, and by which sequence.
        self._claims: dict[tuple[int, tuple[int, ...]], SequenceState] = {}
        self._sampler: TokenSampler | None = None
        self._tokens = self._positions = torch.zeros(0, dtype=torch.long)
        self.prefilled = self.preempted = 0

    @property
    def busy(self) -> bool:
        """True while a step has something to do."""
        return bool(self._rows or self._waiting)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence; the next step may admit it."""
        self._waiting.append(sequence)

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Admit, prefill, sample one token each. Returns what ended, cancelled sequences too."""
        ended = [s for s in self._waiting if s.cancelled()]
        for sequence in ended:
            self._waiting.remove(sequence)
        if gone := [s for s in self._rows if s.cancelled()]:
            self._remove(gone)
            ended += gone
        budget = PREFILL_TOKENS
        while budget > 0:
            self._admit()
            if self._ready == len(self._rows):
                break
            budget -= self._prefill(budget, ended)
        if self._ready:
            self._decode(ended)
        if not self.busy and self._runner.cache is not None:
            self._runner.cache.shrink()
        return ended

    # --- admission ------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting sequences slots, with what the prefix cache has of them.

        One whose next missing block is being computed for another sequence waits for that.
        """
        later: list[SequenceState] = []
        placed: list[tuple[SequenceState, list[int]]] = []
        while self._waiting and len(self._rows) + len(placed) < self._max_batch:
            sequence = self._waiting.popleft()
            tokens, indices, missing = sequence.tokens, list[int](), None
            if self._prefixes is not None:
                indices, missing = self._prefixes.match(_root(sequence), tokens, len(tokens) - 1)
                leader = self._claims.get(missing) if missing else None
                if leader is not None:
                    sequence.leader = leader
                    later.append(sequence)
                    continue
            if not self._fits([*self._rows, *(other for other, _ in placed), sequence]):
                self._waiting.appendleft(sequence)
                break
            if missing:
                self._claims[missing] = sequence
            placed.append((sequence, indices))
        self._waiting.extendleft(reversed(later))
        placed.sort(key=lambda pair: len(pair[0].tokens) - len(pair[1]) * BLOCK)
        self._place(placed)

    def _fits(self, sequences: list[SequenceState]) -> bool:
        cache, last = self._runner.cache, sequences[-1]
        if cache is None:
            return True
        room = min(_HEADROOM, last.limit - len(last.out))
        return cache.reserve(len(sequences), max(_longest(sequences), _longest([last]) + room))

    def _place(self, placed: list[tuple[SequenceState, list[int]]]) -> None:
        shared: dict[tuple[int, ...], list[int]] = {}
        for sequence, indices in placed:
            slot = len(self._rows)
            self._rows.append(sequence)
            sequence.filled = len(indices) * BLOCK
            if not self._copy_leader(sequence, slot) and indices:
                shared.setdefault(tuple(indices), []).append(slot)
        cache = self._runner.cache
        if self._prefixes is not None and cache is not None:
            for indices, slots in shared.items():
                cache.write(slots, self._prefixes.gather(list(indices)))

    def _copy_leader(self, sequence: SequenceState, slot: int) -> bool:
        """Copy the keys and values of the prefix that a sequence shares with its leader."""
        leader, sequence.leader = sequence.leader, None
        cache = self._runner.cache
        if leader is None or cache is None or leader not in self._rows:
            return False
        mine, theirs = sequence.tokens, leader.tokens
        same = common_prefix_length(mine[:-1], theirs[: leader.filled])
        if same < sequence.filled:
            return False
        sequence.filled = same
        cache.write([slot], cache.read(self._rows.index(leader), same))
        return True

    # --- computing ------------------------------------------------------------------------------

    def _prefill(self, budget: int, ended: list[SequenceState]) -> int:
        """One forward pass over prompts, of about `budget` padded tokens. Returns its size."""
        batch: list[SequenceState] = []
        width = 0
        limit = len(self._rows) if self._runner.cache is not None else self._ready + 1
        for sequence in self._rows[self._ready : limit]:
            wide = max(width, len(sequence.tokens) - sequence.filled)
            if batch and wide * (len(batch) + 1) > budget:
                break
            batch.append(sequence)
            width = wide
        width = min(width, budget)
        feed = [s.tokens[s.filled : s.filled + width] for s in batch]
        self._bank.route([s.adapter for s in batch])
        self._sampler = None
        logits = self._runner.prefill(self._ready, [s.filled for s in batch], feed)
        for sequence, tokens in zip(batch, feed, strict=True):
            sequence.filled += len(tokens)
            self.prefilled += len(tokens)
        if batch[0].filled < len(batch[0].tokens):
            return width  # a prompt longer than the budget, in a batch of its own: continued next
        finite: list[bool] = logits.isfinite().all(-1).tolist()
        for slot, sequence in enumerate(batch, self._ready):
            if finite[slot - self._ready]:
                self._keep_prefix(slot, sequence)
        self._claims = {key: s for key, s in self._claims.items() if s not in batch}
        self._ready += len(batch)
        sampler = TokenSampler([s.sampling for s in batch], self._runner.device)
        self._accept(batch, sampler.sample(logits), ended)
        return width * len(batch)

    def _decode(self, ended: list[SequenceState]) -> None:
        if self._sampler is None or not self._make_room():
            self._make_room()
            self._gather_state()
        rows = self._rows[: self._ready]
        assert self._sampler is not None
        longest = max(s.filled for s in rows)
        logits = self._runner.decode(self._tokens, self._positions, longest)
        for sequence in rows:
            sequence.filled += 1
        sampled = self._sampler.sample(logits)
        self._tokens, self._positions = sampled.ids, self._positions + 1
        self._accept(rows, sampled, ended)

    def _gather_state(self) -> None:
        rows, device = self._rows[: self._ready], self._runner.device
        self._tokens = torch.tensor([s.out[-1] for s in rows], device=device)
        self._positions = torch.tensor([s.filled for s in rows], device=device)
        self._sampler = TokenSampler([s.sampling for s in rows], device)
        self._bank.route([s.adapter for s in rows])

    def _make_room(self) -> bool:
        """Grow the slots by a token; False if that preempted the newest sequences."""
        cache, count = self._runner.cache, len(self._rows)
        while cache is not None and not cache.reserve(len(self._rows), _longest(self._rows)):
            newest = self._rows[-1]
            self._remove([newest])
            self.preempted += 1
            self._waiting.appendleft(newest)
        return len(self._rows) == count

    def _accept(
        self, rows: list[SequenceState], sampled: SampledTokens, ended: list[SequenceState]
    ) -> None:
        """Append the sampled tokens; take out the sequences that ended."""
        over: list[SequenceState] = []
        eos = self._eos
        for sequence, token, logprob in zip(rows, sampled.tokens, sampled.logprobs, strict=True):
            sequence.out.append(token)
            sequence.logprobs.append(logprob)
            processor = sequence.sampling.logits_processor
            if logprob != logprob or (processor and processor.error):
                sequence.error = _failure(sequence)
            elif token in eos or (sequence.on_token is not None and sequence.on_token(token)):
                sequence.finish = "stop"
            elif len(sequence.out) >= sequence.limit:
                sequence.finish = "length"
            else:
                if processor:
                    processor.advance(token)
                continue
            over.append(sequence)
        for row, top in sampled.top.items():
            rows[row].top.append(top)
        if over:
            self._remove(over)
            ended += over

    # --- leaving --------------------------------------------------------------------------------

    def _remove(self, sequences: list[SequenceState]) -> None:
        """Take sequences out of their slots, keep their prefixes, and close the gaps."""
        for slot, sequence in enumerate(self._rows):
            if sequence in sequences:
                self._keep_prefix(slot, sequence)
        self._claims = {key: s for key, s in self._claims.items() if s not in sequences}
        decoding, prefilling = (
            [slot for slot in part if self._rows[slot] not in sequences]
            for part in (range(self._ready), range(self._ready, len(self._rows)))
        )
        order = _close_gaps(decoding, 0) + _close_gaps(prefilling, len(decoding))
        moves = [(source, target) for target, source in enumerate(order) if source != target]
        if self._runner.cache is not None and moves:
            longest = max(self._rows[slot].filled for slot, _ in moves)
            self._runner.cache.move(moves, longest)
        self._rows = [self._rows[slot] for slot in order]
        self._ready = len(decoding)
        self._sampler = None

    def _keep_prefix(self, slot: int, sequence: SequenceState) -> None:
        cache = self._runner.cache
        if self._prefixes is None or cache is None:
            return
        if sequence.error is not None:
            cache.clear(slot)
        elif sequence.filled >= BLOCK:
            tokens = sequence.tokens[: sequence.filled]
            self._prefixes.insert(_root(sequence), tokens, cache.read(slot, sequence.filled))


def _close_gaps(slots: list[int], start: int) -> list[int]:
    """The slots that go to ``start, start + 1, …``; those that are there already stay."""
    places = range(start, start + len(slots))
    moving = [slot for slot in slots if slot not in places]
    return [place if place in slots else moving.pop() for place in places]


def _longest(sequences: list[SequenceState]) -> int:
    return max(len(sequence.prompt) + len(sequence.out) for sequence in sequences)


def _root(sequence: SequenceState) -> int:
    return sequence.adapter.root if sequence.adapter else 0


def _failure(sequence: SequenceState) -> ArtError:
    processor = sequence.sampling.logits_processor
    if processor and processor.error:
        return InvalidRequest(
            "The schema allows no reply: its grammar has no next token "
            f"({processor.error.splitlines()[0][:200]})",
            param="response_format",
        )
    return ArtError(
        "The model gave logits that are not finite. Its weights, or the adapter's, have diverged; "
        "go back to an earlier version."
    )
