"""Scheduler with continuous batching: calls join the running batch at any step and leave at any.

A step admits waiting sequences, prefills what the prefix cache lacks of their prompts, and then
samples one token for every running sequence. Slots ``0 … ready-1`` are decoded, those behind them
are still prefilled; `rows` lists the sequences in order of their slots. Where layers have states,
the last token of a prompt is left to the first decode step: the states before it are those from
which other calls with this prompt, and it itself if it is sent back, go on.

Clients share it: the client with the fewest rows is admitted first, one that has more than its
share gives slots and memory back, and a step computes all rows or those of some clients
(`client_shares`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set

import torch
from torch import Tensor

from langchain_art.errors import ArtError
from langchain_art_server.backends.chat.fair_queue import FairQueue
from langchain_art_server.backends.embedded.client_shares import ClientShares, HeavyTurns, TurnOf
from langchain_art_server.backends.embedded.model_runner import SerialRunner, SlotRunner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank
from langchain_art_server.backends.embedded.prefix_cache import Prefix, PrefixCache, SharedPrefixes
from langchain_art_server.backends.embedded.token_sampler import (
    Queued,
    SampledTokens,
    SequenceState,
    TokenSampler,
)

log = logging.getLogger(__name__)
PREFILL_TOKENS = 2048  # padded tokens that one prefill pass takes
#: The most that a turn of some clients prefills, and that one of some, and of all, admits (half a
#: millisecond each).
_TURN_PREFILL, _TURN_ADMITS, _STEP_ADMITS = 256, 8, 32
#: Cancelled rows that leave in one step: to keep the prefix of one takes a tenth of a millisecond.
_LEAVE_AT_ONCE = 16
#: Calls that wait are few, if so many times as many rows are decoded meanwhile. A pass over one
#: prompt takes a quarter of such a step longer than its tokens do in a pass with others.
_FEW = 8
#: Tokens that an admitted sequence must have room for, so that it is not preempted at once.
_HEADROOM = 64
_MANY_TIMES = 8  # A client that has so many times another's tokens gives even its only row for them


class Scheduler:
    """Runs sequences to their end, at most `max_batch` at once; one, if the runner has no slots.

    Attributes:
        prefilled: prompt tokens that went through the model.
        preempted: times that a sequence was sent back to wait, because memory was short or another
            client had less.
        stepped: the sequences that the last step sampled a token of.
    """

    def __init__(
        self,
        runner: SlotRunner | SerialRunner,
        bank: AdapterBank,
        prefixes: PrefixCache | None,
        eos: set[int],
        max_batch: int,
    ) -> None:
        self._runner, self._bank, self._eos = runner, bank, eos
        self._max_batch = max_batch if prefixes is not None else 1
        self._waiting: FairQueue[Queued] = FairQueue()
        self._rows: list[SequenceState] = []
        self._ready = 0
        self._held: Counter[str] = Counter()  # rows of each client
        self._shares = ClientShares(time.monotonic, linear=runner.device.type == "cpu")
        self._heavy = HeavyTurns()
        #: Slots from which on ready rows are of light clients, if some have turns of their own.
        self._border = 0
        self._shared = SharedPrefixes(runner.cache, prefixes)
        #: Tokens of a prompt that are left to the first decode step.
        self._left = 1 if runner.cache is not None and runner.cache.layout.states else 0
        self._sampler: TokenSampler | None = None
        self._span = (0, 0)
        self._prefilled = False  # whether the last step computed a prompt
        self._tokens = self._positions = torch.zeros(0, dtype=torch.long)
        #: How far the positions that the model reads are from these; see `Images.shifts`.
        self._shifts: Tensor | None = None
        self.prefilled = self.preempted = 0
        self.stepped: list[SequenceState] = []

    @property
    def shared(self) -> bool:
        """True if several clients have asked lately."""
        return self._shares.shared

    @property
    def busy(self) -> bool:
        """True while a step has something to do."""
        return bool(self._rows or self._waiting)

    @property
    def counts(self) -> tuple[int, int]:
        """Sequences that run, and those that wait."""
        return len(self._rows), len(self._waiting)

    def add(self, queued: Queued) -> None:
        """Queue a call or a sequence; the next step may admit it."""
        self._waiting.put(queued.client, queued)

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Admit, prefill, sample one token each. Returns what ended, cancelled sequences too."""
        cancelled = self._waiting.drop(lambda one: one.cancelled())
        ended = [sequence for one in cancelled if (sequence := one.prepare()) is not None]
        if gone := [s for s in self._rows if s.error or s.cancelled()][:_LEAVE_AT_ONCE]:
            self._remove(gone)
            ended += gone
        self.stepped = []
        present = self._held.keys() | self._waiting.clients
        turn = self._shares.begin(self._rows, self._waiting.clients)
        if turn == "all":
            self._take_turn(turn, None, ended)
        else:
            groups = {"light": self._shares.light, "heavy": present - self._shares.light}
            self._take_turn(turn, groups[turn], ended)
            if not self._shares.computed:  # they wait for slots or memory that the others have
                other = self._shares.pass_on()
                self._take_turn(other, groups[other], ended)
            if not self._shares.computed:
                self._take_turn("all", None, ended)
        if not self.busy:
            self._shares.end()
            if self._runner.cache is not None:
                self._runner.cache.shrink()
        return ended

    def _take_turn(self, turn: TurnOf, among: Set[str] | None, ended: list[SequenceState]) -> None:
        """A step for the rows of some clients; None: for all. Short, if others wait for it."""
        budget = PREFILL_TOKENS if among is None else _TURN_PREFILL
        only_tokens = turn == "heavy" and self._heavy.only_tokens()
        if self._collects():
            budget = 0
        while budget > 0:
            self._admit(among, kept=self._max_batch // 8 if turn == "heavy" else 0)
            pending = self._arrange(among)
            if not pending or (only_tokens and self._border):
                break
            budget -= self._prefill(budget, self._ready + pending, ended)
            if turn == "heavy":
                self._heavy.prefilled = True
                return
            if self._shares.several:
                break
        if not self._rows:
            return
        self._make_room()
        self._arrange(among)
        first, last = self._border if turn == "light" else 0, self._ready
        if turn == "heavy":
            first, last = self._heavy.span(self._border)
        if last > first:
            self._decode(first, last, ended)

    def _collects(self) -> bool:
        """True if this step only decodes: the few calls that wait share a pass with the next.

        Never in two steps in a row, so that a call waits for one step at most.
        """
        last, self._prefilled = self._prefilled, False
        alone = not self._shares.several and len(self._rows) == self._ready
        return last and alone and len(self._waiting) * _FEW <= self._ready

    def _admit(self, among: Set[str] | None, kept: int) -> None:
        """Give waiting sequences slots, with what the prefix cache has of them.

        So many slots are `kept` free for other clients, so that no row must be taken back for one.
        A sequence whose next missing block is being computed for another one waits for that.
        """
        later: list[SequenceState] = []
        placed: list[tuple[SequenceState, Prefix]] = []
        stuck = set[str]()
        most = _STEP_ADMITS if among is None else _TURN_ADMITS
        for _ in range(most if self._shares.several else self._max_batch):
            if kept and len(self._rows) + len(placed) + kept >= self._max_batch:
                break
            queued = self._waiting.take(self._held, self._may_pass(stuck, among))
            sequence = None if queued is None else queued.prepare()
            if queued is None:
                break
            if sequence is None:
                continue
            if not self._fits([*self._rows, *(other for other, _ in placed), sequence]):
                self._place(placed)  # or what is kept of a preempted one might take its blocks
                placed = []
                if not self._preempt_for(sequence):
                    stuck.add(sequence.client)
                self._waiting.put_back(sequence.client, sequence)  # before one that was sent back
                continue
            if (prefix := self._shared.find(sequence, among)) is None:
                later.append(sequence)
                continue
            placed.append((sequence, prefix))
            self._held[sequence.client] += 1
        for sequence in reversed(later):
            self._waiting.put_back(sequence.client, sequence)
        self._place(placed)

    def _may_pass(self, stuck: Set[str], among: Set[str] | None) -> Set[str] | None:
        """Clients whose calls may pass those that find no room: they have no row."""
        if not stuck:
            return among
        others = self._waiting.clients - stuck
        return {one for one in others if not self._held[one] and (among is None or one in among)}

    def _fits(self, sequences: list[SequenceState]) -> bool:
        cache, last = self._runner.cache, sequences[-1]
        if cache is None or len(sequences) > self._max_batch:
            return len(sequences) <= self._max_batch
        room = min(_HEADROOM, last.limit - len(last.out))
        return cache.reserve(len(sequences), max(_longest(sequences), last.length + room))

    def _preempt_for(self, sequence: SequenceState) -> bool:
        """Send back the last row of the client that has most.

        If it still has no less then, or has `_MANY_TIMES` as many tokens.
        """
        if self._held.keys() <= {sequence.client}:
            return False
        full = len(self._rows) >= self._max_batch
        has = self._held if full else self._tokens_held()
        client = max(has, key=has.__getitem__)
        last = self._last_row(client)
        own, other = (1, 1) if full else (sequence.length, last.length)
        own += has[sequence.client]
        if has[client] - other < own and has[client] < _MANY_TIMES * own:
            return False
        self._preempt(last)
        return True

    def _tokens_held(self) -> Counter[str]:
        has = Counter[str]()
        for row in self._rows:
            has[row.client] += row.length
        return has

    def _last_row(self, client: str) -> SequenceState:
        return next(row for row in reversed(self._rows) if row.client == client)

    def _preempt(self, sequence: SequenceState) -> None:
        """Send a row back to wait; it goes on from the prefix cache, or is computed again."""
        self._remove([sequence])
        self.preempted += 1
        self._waiting.put_back(sequence.client, sequence)

    def _place(self, placed: list[tuple[SequenceState, Prefix]]) -> None:
        placed.sort(key=lambda pair: pair[0].length - pair[1].length)
        self._shared.fill(self._rows, placed)

    def _arrange(self, among: Set[str] | None) -> int:
        """Bring the rows of a turn together; returns how many of them wait for prefill.

        Ready rows of light clients come last of the ready ones, and rows of this turn that wait
        first of those.
        """
        count, ready = len(self._rows), self._ready
        if among is None:
            return count - ready
        light = [row.client in self._shares.light for row in self._rows]
        others = [row.client not in among for row in self._rows]
        swaps = [*to_end(light, 0, ready), *to_end(others, ready, count)]
        if swaps:
            rows, moves = self._rows, [pair for a, b in swaps for pair in ((a, b), (b, a))]
            longest = max(rows[slot].filled for slot, _ in moves)
            if self._runner.cache is not None and longest:
                self._runner.cache.move(moves, longest)
            for a, b in swaps:
                rows[a], rows[b] = rows[b], rows[a]
            self._sampler = None
        self._border = ready - sum(light[:ready])
        return count - ready - sum(others[ready:])

    def _prefill(self, budget: int, limit: int, ended: list[SequenceState]) -> int:
        """One forward pass over prompts, of about `budget` padded tokens. Returns its size."""
        batch: list[SequenceState] = []
        width = 0
        limit = limit if self._runner.cache is not None else self._ready + 1
        for sequence in self._rows[self._ready : limit]:
            wide = max(width, sequence.length - self._left - sequence.filled)
            if batch and wide * (len(batch) + 1) > budget:
                break
            batch.append(sequence)
            width = wide
        width = min(width, budget)
        stops = [s.whole(min(s.filled + width, s.length - self._left)) for s in batch]
        feed = [s.tokens[s.filled : stop] for s, stop in zip(batch, stops, strict=True)]
        self._sampler = None

        def compute(first: int, last: int) -> Tensor:
            part = batch[first:last]
            self._bank.route([s.adapter for s in part])
            starts = [s.filled for s in part]
            fed = feed[first:last]
            shifts = [s.shifts_of(s.filled, len(t)) for s, t in zip(part, fed, strict=True)]
            return self._runner.prefill(self._ready + first, starts, fed, shifts)

        logits = torch.zeros(len(batch), 1)
        if width:
            if (computed := self._pass(batch, compute, ended)) is None:
                return width
            logits = computed
        for sequence, tokens in zip(batch, feed, strict=True):
            sequence.filled += len(tokens)
            self.prefilled += len(tokens)
        self._shares.computed = self._prefilled = True
        if batch[0].filled < batch[0].length - self._left:
            return width  # a prompt longer than the budget, in a batch of its own: continued next
        finite: list[bool] = logits.isfinite().all(-1).tolist()
        for slot, sequence in enumerate(batch, self._ready):
            if finite[slot - self._ready]:
                self._shared.keep(slot, sequence)
        self._shared.let_go(batch)
        self._ready += len(batch)
        if self._left:
            return width * len(batch)
        sampler = TokenSampler([s.sampling for s in batch], self._runner.device)
        self._accept(batch, sampler.sample(logits), ended)
        return width * len(batch)

    def _decode(self, first: int, last: int, ended: list[SequenceState]) -> None:
        if self._sampler is None or self._span != (first, last):
            self._gather_state(first, last)
        rows = self._rows[first:last]
        assert self._sampler is not None
        longest = max(s.filled for s in rows)

        def compute(begin: int, end: int) -> Tensor:
            if end - begin < len(rows):
                self._bank.route([s.adapter for s in rows[begin:end]])
            tokens, positions = self._tokens[begin:end], self._positions[begin:end]
            shifts = None if self._shifts is None else self._shifts[begin:end]
            return self._runner.decode(tokens, positions, longest, first + begin, shifts)

        if (logits := self._pass(rows, compute, ended)) is None:
            return
        for sequence in rows:
            sequence.filled += 1
        self._shares.computed = True
        sampled = self._sampler.sample(logits)
        self._tokens, self._positions = sampled.ids, self._positions + 1
        self._accept(rows, sampled, ended)

    def _pass(
        self,
        rows: list[SequenceState],
        compute: Callable[[int, int], Tensor],
        ended: list[SequenceState],
    ) -> Tensor | None:
        """The logits of a part of the rows, ``compute(first, last)``, for all of them.

        None: the pass failed, and the rows for which it fails alone have ended with an error.
        """
        try:
            return compute(0, len(rows))
        except Exception as error:
            torch.zeros((), device=self._runner.device).item()  # raises if the device is lost
            wrong = [row for at, row in enumerate(rows) if len(rows) == 1 or _fails(compute, at)]
            if not wrong:
                raise
            log.exception("The model cannot compute %d of %d calls.", len(wrong), len(rows))
            for row in wrong:
                row.error = ArtError(
                    f"The model cannot compute this call of {row.length} tokens: "
                    f"{type(error).__name__}: {error}"
                )
            self._remove(wrong)
            ended += wrong
            if self._left:  # the states of the others may be those after this pass
                for row in [row for row in rows if row not in wrong]:
                    row.filled = 0
                    self._preempt(row)
            return None

    def _gather_state(self, first: int, last: int) -> None:
        rows, device = self._rows[first:last], self._runner.device
        self._span = (first, last)
        self._tokens = torch.tensor([(s.out or s.prompt)[-1] for s in rows], device=device)
        self._positions = torch.tensor([s.filled for s in rows], device=device)
        behind = [0 if s.shifts is None else int(s.shifts[0, -1]) for s in rows]
        self._shifts = torch.tensor(behind, device=device) if any(behind) else None
        self._sampler = TokenSampler([s.sampling for s in rows], device)
        self._bank.route([s.adapter for s in rows])

    def _make_room(self) -> None:
        """Grow the slots by a token; where memory is short, rows of who has most are sent back."""
        cache = self._runner.cache
        while cache is not None and not cache.reserve(len(self._rows), _longest(self._rows)):
            tokens = self._tokens_held()
            most = {one: (rows, tokens[one]) for one, rows in self._held.items()}
            self._preempt(self._last_row(max(most, key=most.__getitem__)))

    def _accept(
        self, rows: list[SequenceState], sampled: SampledTokens, ended: list[SequenceState]
    ) -> None:
        over: list[SequenceState] = []
        eos = self._eos
        self.stepped += rows
        for sequence, token, logprob in zip(rows, sampled.tokens, sampled.logprobs, strict=True):
            sequence.out.append(token)
            sequence.logprobs.append(logprob)
            processor = sequence.sampling.logits_processor
            if logprob != logprob or (processor and processor.error):
                sequence.error = sequence.failure()
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

    def _remove(self, sequences: list[SequenceState]) -> None:
        """Take sequences out of their slots, keep their prefixes, and close the gaps."""
        for slot, sequence in enumerate(self._rows):
            if sequence in sequences:
                self._shared.keep(slot, sequence)
        self._shared.let_go(sequences)
        self._held -= Counter(sequence.client for sequence in sequences)
        decoding, prefilling = (
            [slot for slot in part if self._rows[slot] not in sequences]
            for part in (range(self._ready), range(self._ready, len(self._rows)))
        )
        order = close_gaps(decoding, 0) + close_gaps(prefilling, len(decoding))
        moves = [(source, target) for target, source in enumerate(order) if source != target]
        if self._runner.cache is not None and moves:
            longest = max(self._rows[slot].filled for slot, _ in moves)
            self._runner.cache.move(moves, longest)
        self._rows = [self._rows[slot] for slot in order]
        self._ready = len(decoding)
        self._sampler = None


def _fails(compute: Callable[[int, int], Tensor], row: int) -> bool:
    try:
        compute(row, row + 1)
    except Exception:  # noqa: BLE001  any of the model's own code
        return True
    return False


def _longest(sequences: list[SequenceState]) -> int:
    return max((sequence.length for sequence in sequences), default=0)


def close_gaps(slots: list[int], start: int) -> list[int]:
    """The slots that go to ``start, start + 1, …``; those that are there already stay."""
    places = range(start, start + len(slots))
    moving = [slot for slot in slots if slot not in places]
    return [place if place in slots else moving.pop() for place in places]


def to_end(chosen: list[bool], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The swaps that bring the chosen slots of a range to its end."""
    border = stop - sum(chosen[start:stop])
    early = (slot for slot in range(start, border) if chosen[slot])
    late = (slot for slot in range(border, stop) if not chosen[slot])
    return zip(early, late, strict=True)
