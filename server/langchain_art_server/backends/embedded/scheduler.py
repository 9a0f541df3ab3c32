"""Continuous batching: calls join the running batch at every step and leave it when they end.

A step admits waiting calls, computes what the prefix cache lacks of their prompts, and then draws
one token for every running call. Slots ``0 … ready-1`` are decoded, those behind them are still
being filled; `rows` lists the jobs in order of their slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from langchain_art.errors import ArtError
from langchain_art_server.backends.base import FinishReason
from langchain_art_server.backends.embedded.model_runner import SerialRunner, SlotRunner
from langchain_art_server.backends.embedded.multi_lora import AdapterBank, LoadedAdapter
from langchain_art_server.backends.embedded.prefix_cache import BLOCK, PrefixCache
from langchain_art_server.backends.embedded.token_sampler import Chooser, Chosen, Draw

#: Padded tokens that one forward pass of prompts takes.
PREFILL_TOKENS = 2048
#: Tokens that an admitted call must have room for, so that it is not sent back at once.
_HEADROOM = 64


@dataclass(eq=False)
class Job:
    """One call while it is sampled.

    Attributes:
        prompt: token ids that the model is shown.
        limit: tokens that may be drawn, at least 1.
        draw: how they are drawn.
        adapter: whose weights; None for the base model.
        watch: gets each token that does not end the reply; True ends it (a stop string).
        cancelled: asked at every step.
    """

    prompt: list[int]
    limit: int
    draw: Draw
    adapter: LoadedAdapter | None = None
    watch: Callable[[int], bool] | None = None
    cancelled: Callable[[], bool] = bool
    out: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    finish: FinishReason | None = None
    error: ArtError | None = None
    filled: int = 0
    leader: Job | None = None

    @property
    def tokens(self) -> list[int]:
        """Everything that the next token depends on."""
        return self.prompt + self.out if self.out else self.prompt


class Engine:
    """Runs jobs to their end.

    Args:
        runner: computes logits.
        bank: the adapters.
        prefixes: the prefix cache; None if the runner has no slots.
        eos: token ids that end a reply.
        max_batch: jobs that run at once.
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
        self._waiting: deque[Job] = deque()
        self._rows: list[Job] = []
        self._ready = 0
        self._claims: dict[tuple[int, tuple[int, ...]], Job] = {}
        self._chooser: Chooser | None = None
        self._tokens = self._positions = torch.zeros(0, dtype=torch.long)
        self.prefilled = 0
        """Prompt tokens that went through the model."""
        self.preempted = 0
        """Times that a job was sent back to wait because memory was short."""

    @property
    def busy(self) -> bool:
        """True while a step has something to do."""
        return bool(self._rows or self._waiting)

    def add(self, job: Job) -> None:
        """Queue a job; the next step may admit it."""
        self._waiting.append(job)

    @torch.inference_mode()
    def step(self) -> list[Job]:
        """Admit, prefill, draw one token each. Returns the jobs that ended, cancelled ones too."""
        ended = [job for job in self._waiting if job.cancelled()]
        for job in ended:
            self._waiting.remove(job)
        if gone := [job for job in self._rows if job.cancelled()]:
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
        """Give waiting jobs slots, with what the prefix cache has of them.

        A job whose next unknown block is just being computed for another waits for that.
        """
        later: list[Job] = []
        placed: list[tuple[Job, list[int]]] = []
        while self._waiting and len(self._rows) + len(placed) < self._max_batch:
            job = self._waiting.popleft()
            tokens, indices, missing = job.tokens, list[int](), None
            if self._prefixes is not None:
                indices, missing = self._prefixes.match(_root(job), tokens, len(tokens) - 1)
                leader = self._claims.get(missing) if missing else None
                if leader is not None:
                    job.leader = leader
                    later.append(job)
                    continue
            if not self._fits([*self._rows, *(other for other, _ in placed), job]):
                self._waiting.appendleft(job)
                break
            if missing:
                self._claims[missing] = job
            placed.append((job, indices))
        self._waiting.extendleft(reversed(later))
        placed.sort(key=lambda pair: len(pair[0].tokens) - len(pair[1]) * BLOCK)
        self._place(placed)

    def _fits(self, jobs: list[Job]) -> bool:
        cache, last = self._runner.cache, jobs[-1]
        if cache is None:
            return True
        room = min(_HEADROOM, last.limit - len(last.out))
        return cache.reserve(len(jobs), max(_longest(jobs), _longest([last]) + room))

    def _place(self, placed: list[tuple[Job, list[int]]]) -> None:
        shared: dict[tuple[int, ...], list[int]] = {}
        for job, indices in placed:
            slot = len(self._rows)
            self._rows.append(job)
            job.filled = len(indices) * BLOCK
            if not self._copy_leader(job, slot) and indices:
                shared.setdefault(tuple(indices), []).append(slot)
        cache = self._runner.cache
        if self._prefixes is not None and cache is not None:
            for indices, slots in shared.items():
                cache.write(slots, self._prefixes.gather(list(indices)))

    def _copy_leader(self, job: Job, slot: int) -> bool:
        """Take over what `job` has in common with the running job it waited for, to the token."""
        leader, job.leader = job.leader, None
        cache = self._runner.cache
        if leader is None or cache is None or leader not in self._rows:
            return False
        mine, theirs = job.tokens, leader.tokens
        most = min(len(mine) - 1, leader.filled)
        same = job.filled
        if mine[:same] != theirs[:same]:
            return False
        while same < most and mine[same] == theirs[same]:
            same += 1
        job.filled = same
        cache.write([slot], cache.read(self._rows.index(leader), same))
        return True

    # --- computing ------------------------------------------------------------------------------

    def _prefill(self, budget: int, ended: list[Job]) -> int:
        """One forward pass over prompts, of about `budget` padded tokens. Returns its size."""
        batch: list[Job] = []
        width = 0
        limit = len(self._rows) if self._runner.cache is not None else self._ready + 1
        for job in self._rows[self._ready : limit]:
            wide = max(width, len(job.tokens) - job.filled)
            if batch and wide * (len(batch) + 1) > budget:
                break
            batch.append(job)
            width = wide
        width = min(width, budget)
        feed = [job.tokens[job.filled : job.filled + width] for job in batch]
        self._bank.route([job.adapter for job in batch])
        self._chooser = None
        logits = self._runner.prefill(self._ready, [job.filled for job in batch], feed)
        for job, tokens in zip(batch, feed, strict=True):
            job.filled += len(tokens)
            self.prefilled += len(tokens)
        if batch[0].filled < len(batch[0].tokens):
            return width  # a prompt longer than the budget: it is alone, and goes on next time
        finite: list[bool] = logits.isfinite().all(-1).tolist()
        for slot, job in enumerate(batch, self._ready):
            if finite[slot - self._ready]:
                self._keep_prefix(slot, job)
        self._claims = {key: job for key, job in self._claims.items() if job not in batch}
        self._ready += len(batch)
        chosen = Chooser([job.draw for job in batch], self._runner.device).choose(logits)
        self._accept(batch, chosen, ended)
        return width * len(batch)

    def _decode(self, ended: list[Job]) -> None:
        if self._chooser is None or not self._make_room():
            self._make_room()
            self._gather_state()
        rows = self._rows[: self._ready]
        assert self._chooser is not None
        longest = max(job.filled for job in rows)
        logits = self._runner.decode(self._tokens, self._positions, longest)
        for job in rows:
            job.filled += 1
        chosen = self._chooser.choose(logits)
        self._tokens, self._positions = chosen.ids, self._positions + 1
        self._accept(rows, chosen, ended)

    def _gather_state(self) -> None:
        rows, device = self._rows[: self._ready], self._runner.device
        self._tokens = torch.tensor([job.out[-1] for job in rows], device=device)
        self._positions = torch.tensor([job.filled for job in rows], device=device)
        self._chooser = Chooser([job.draw for job in rows], device)
        self._bank.route([job.adapter for job in rows])

    def _make_room(self) -> bool:
        """Grow the slots by a token; while memory is short, send the newest jobs back to wait.

        Returns:
            True if no job had to go.
        """
        cache = self._runner.cache
        if cache is None:
            return True
        stayed = True
        while True:
            if cache.reserve(len(self._rows), _longest(self._rows)):
                return stayed
            stayed = False
            newest = self._rows[-1]
            self._remove([newest])
            self.preempted += 1
            self._waiting.appendleft(newest)

    def _accept(self, rows: list[Job], chosen: Chosen, ended: list[Job]) -> None:
        """Append what was drawn; take out the jobs that are over."""
        over: list[Job] = []
        eos = self._eos
        for job, token, logprob in zip(rows, chosen.tokens, chosen.logprobs, strict=True):
            job.out.append(token)
            job.logprobs.append(logprob)
            constraint = job.draw.constraint
            if logprob != logprob or (constraint and constraint.error):
                job.error = _failure(job)
            elif token in eos or (job.watch is not None and job.watch(token)):
                job.finish = "stop"
            elif len(job.out) >= job.limit:
                job.finish = "length"
            else:
                if constraint:
                    constraint.consume(token)
                continue
            over.append(job)
        for row, top in chosen.top.items():
            rows[row].top.append(top)
        if over:
            self._remove(over)
            ended += over

    # --- leaving --------------------------------------------------------------------------------

    def _remove(self, jobs: list[Job]) -> None:
        """Take jobs out of their slots, keep their prefixes, and close the gaps."""
        for slot, job in enumerate(self._rows):
            if job in jobs:
                self._keep_prefix(slot, job)
        self._claims = {key: job for key, job in self._claims.items() if job not in jobs}
        decoding = [s for s in range(self._ready) if self._rows[s] not in jobs]
        filling = [s for s in range(self._ready, len(self._rows)) if self._rows[s] not in jobs]
        sources, targets = list[int](), list[int]()
        order: list[int] = []
        for kept in (decoding, filling):
            start, end = len(order), len(order) + len(kept)
            stay = {slot for slot in kept if start <= slot < end}
            moving = [slot for slot in kept if slot not in stay]
            for target in range(start, end):
                source = target if target in stay else moving.pop()
                order.append(source)
                if source != target:
                    sources.append(source)
                    targets.append(target)
        if self._runner.cache is not None and sources:
            longest = max(self._rows[slot].filled for slot in sources)
            self._runner.cache.move(sources, targets, longest)
        self._rows = [self._rows[slot] for slot in order]
        self._ready = len(decoding)
        self._chooser = None

    def _keep_prefix(self, slot: int, job: Job) -> None:
        cache = self._runner.cache
        if self._prefixes is None or cache is None:
            return
        if job.error is not None:
            cache.clear(slot)
        elif job.filled >= BLOCK:
            tokens = job.tokens[: job.filled]
            self._prefixes.insert(_root(job), tokens, cache.read(slot, job.filled))


def _longest(jobs: list[Job]) -> int:
    return max(len(job.prompt) + len(job.out) for job in jobs)


def _root(job: Job) -> int:
    return job.adapter.root if job.adapter else 0


def _failure(job: Job) -> ArtError:
    constraint = job.draw.constraint
    if constraint and constraint.error:
        return ArtError(f"The grammar of this reply has no way on: {constraint.error[:200]}")
    return ArtError(
        "The model gave logits that are not finite. Its weights, or the adapter's, have diverged; "
        "go back to an earlier version."
    )
