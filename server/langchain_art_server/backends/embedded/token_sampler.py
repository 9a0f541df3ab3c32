"""Samples the next token of every row at once, with its logprob.

Logprobs are log-softmax(logits / temperature) over the tokens that can be drawn: those that the
grammar allows, of these the `top_k` most probable, of these the nucleus of `top_p`. Greedy rows
have those of temperature 1, without `top_k` and `top_p`, which change nothing there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from langchain_art.errors import ArtError, InvalidRequest
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.algorithms.sequences.token_sets import DrawnFrom, of_mask
from langchain_art_server.backends.base import FinishReason, Sampling
from langchain_art_server.backends.chat.guided_decoding import GrammarLogitsProcessor
from langchain_art_server.backends.chat.output_processor import truncates
from langchain_art_server.backends.embedded.multi_lora import RoutedAdapter


class Queued(Protocol):
    """Item of the scheduler's queue: a call, or a sequence that was sent back to wait."""

    client: str  # that asked
    cancelled: Callable[[], bool]  # asked at every step

    def prepare(self) -> SequenceState | None:
        """The sequence, when there is room for it; None: there is none, and the caller knows."""
        ...


@dataclass(eq=False)
class SequenceState:
    """One reply while it is sampled."""

    prompt: list[int]  # token ids of the prompt
    limit: int  # most tokens of the reply, at least 1
    sampling: SamplingState  # how they are sampled
    client: str = ""  # whose call it is; clients share the engine
    adapter: RoutedAdapter | None = None  # whose weights; None for the base model
    base_root: int = 0  # of the prefix cache's blocks of the base model; each tenant has its own
    on_token: Callable[[int], bool] | None = None
    """Gets each token that does not end the reply; True ends it (a stop string)."""
    cancelled: Callable[[], bool] = bool  # asked at every step
    shifts: Ints | None = None  # of the prompt's images; see `Images.shifts`
    out: list[int] = field(default_factory=list[int])
    """Token ids of the reply so far, with their `logprobs` and, if asked for, `top` logprobs."""
    logprobs: list[float] = field(default_factory=list[float])
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    finish: FinishReason | None = None  # why it ended; None if it runs or was cancelled
    error: Exception | None = None  # why it leaves without a reply
    filled: int = 0  # tokens whose keys and values are in the KV cache
    leader: SequenceState | None = None
    """A running sequence with the same prefix, whose prefill this one waits for."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and reply so far."""
        return self.prompt + self.out if self.out else self.prompt

    @property
    def length(self) -> int:
        """Length of `tokens`."""
        return len(self.prompt) + len(self.out)

    @property
    def root(self) -> int:
        """Root of the prefix cache's blocks that it may use."""
        return self.adapter.root if self.adapter else self.base_root

    def shifts_of(self, start: int, count: int) -> Ints | None:
        """The shifts (4, count) of some tokens; those behind the prompt have its last."""
        if self.shifts is None:
            return None
        return self.shifts[:, np.minimum(np.arange(start, start + count), len(self.prompt))]

    def whole(self, stop: int) -> int:
        """The first place from `stop` on that is not between tokens that attend to each other."""
        if self.shifts is None or not 0 < stop < len(self.prompt):
            return stop
        return stop + int(self.shifts[3, stop - 1])

    def prepare(self) -> SequenceState:
        """See `Queued`."""
        return self

    def failure(self) -> ArtError:
        """Error for which a token could not be sampled."""
        processor = self.sampling.logits_processor
        if processor and processor.error:
            return InvalidRequest(
                "The schema allows no reply: its grammar has no next token "
                f"({processor.error.splitlines()[0][:200]})",
                param="response_format",
            )
        return ArtError(
            "The model gave logits that are not finite. Its weights, or the adapter's, have "
            "diverged; go back to an earlier version."
        )


@dataclass
class SamplingState:
    """Settings and state of one sequence's sampling. `rng` gives one uniform number per token.

    `drawn_from` gets the set of each token, if a grammar, `top_k` or `top_p` leaves a part only.
    """

    sampling: Sampling
    rng: random.Random
    logits_processor: GrammarLogitsProcessor | None = None
    drawn_from: DrawnFrom = field(default_factory=DrawnFrom)


@dataclass
class SampledTokens:
    """One sampled token per row; `ids` are `tokens` as a tensor on the model's device."""

    tokens: list[int]
    logprobs: list[float]  # NaN where a row's logits were NaN
    ids: Tensor
    #: Row -> the most probable ``(token id, logprob)``, for rows that asked for them.
    top: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


class TokenSampler:
    """Samples for a fixed list of rows; made again whenever the rows change."""

    def __init__(self, states: Sequence[SamplingState], device: torch.device) -> None:
        self._rngs = [state.rng for state in states]
        self._device = device
        # Sums over a large vocabulary need float64; Apple's GPUs have none.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        temperatures = [state.sampling.temperature for state in states]
        # Divided, not multiplied by the inverse: the learner divides too.
        self._scales = torch.tensor([[t or 1.0] for t in temperatures], device=device)
        self._greedy: Tensor | None = None
        if 0.0 in temperatures:
            self._greedy = torch.tensor([t == 0.0 for t in temperatures], device=device)
        cut = [i for i, state in enumerate(states) if truncates(state.sampling)]
        self._cut_states = [states[i] for i in cut]
        self._cut = torch.tensor(cut, device=device) if cut else None
        self._top_p = torch.tensor([[states[i].sampling.top_p] for i in cut], device=device)
        self._top_k = torch.tensor(
            [[states[i].sampling.top_k or 1 << 30] for i in cut], device=device
        )
        self._constrained = [
            (i, state, state.logits_processor)
            for i, state in enumerate(states)
            if state.logits_processor
        ]
        self._top = [(i, n) for i, s in enumerate(states) if (n := s.sampling.top_logprobs)]

    def sample(self, logits: Tensor) -> SampledTokens:
        """Sample from float32 logits ``[rows, vocab]``, which may be overwritten."""
        for row, state, processor in self._constrained:
            allowed = processor.apply(logits[row])
            if state.sampling.temperature > 0 and not truncates(state.sampling):
                state.drawn_from.add(allowed)
        logprobs = logits.div_(self._scales).log_softmax(-1)
        weights = logprobs.exp()
        if self._cut is not None:
            kept = self._truncate(weights[self._cut]) > 0
            left = logits[self._cut].masked_fill_(~kept, float("-inf")).log_softmax(-1)
            logprobs[self._cut], weights[self._cut] = left, left.exp()
            for state, one in zip(self._cut_states, kept.cpu().numpy(), strict=True):
                state.drawn_from.add(of_mask(one))
        ids, total = self._invert(weights)
        # Not quite 0: the softmax adds up a large vocabulary in float32.
        log_total = total.log()
        if self._greedy is not None:
            ids = torch.where(self._greedy, logits.argmax(-1), ids)
        picked = logprobs.gather(1, ids.unsqueeze(1)).to(self._wide) - log_total
        picked = picked.squeeze(1).clamp_(max=0.0)
        tokens, values = torch.stack([ids.to(self._wide), picked]).tolist()
        sampled = SampledTokens([int(token) for token in tokens], values, ids)
        if self._top:
            self._add_top(sampled, logprobs, log_total)
        return sampled

    def _invert(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The first token at which the summed weight exceeds a uniform number; the whole sum."""
        uniforms = torch.tensor(
            [rng.random() for rng in self._rngs], dtype=self._wide, device=self._device
        )
        sums = weights.cumsum(-1, dtype=self._wide)
        total = sums[:, -1:]
        # Below the total: rounding could else select a token without probability.
        target = torch.minimum(
            uniforms.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total))
        )
        found = torch.searchsorted(sums, target, right=True).squeeze(1)
        return found.clamp_(max=weights.shape[1] - 1), total

    def _truncate(self, weights: Tensor) -> Tensor:
        """Zero what `top_k`, and then `top_p` of the rest, leaves out."""
        ordered, order = weights.sort(descending=True, stable=True)
        ranks = torch.arange(weights.shape[1], device=self._device)
        ordered = ordered * (ranks < self._top_k)
        before = ordered.cumsum(-1, dtype=self._wide) - ordered
        share = before / ordered.sum(-1, keepdim=True, dtype=self._wide)
        keep = (share < self._top_p) & (ordered > 0)
        keep[:, 0] = True
        return torch.zeros_like(weights).scatter_(1, order, ordered * keep)

    def _add_top(self, sampled: SampledTokens, logprobs: Tensor, log_total: Tensor) -> None:
        rows = [row for row, _ in self._top]
        most = min(max(n for _, n in self._top), logprobs.shape[1])
        values, ids = logprobs[rows].topk(most, dim=-1)
        values = (values.to(self._wide) - log_total[rows]).clamp_(max=0.0)
        for (row, n), value, token in zip(self._top, values.tolist(), ids.tolist(), strict=True):
            pairs = list(zip(token[:n], value[:n], strict=True))
            sampled.top[row] = [(t, v) for t, v in pairs if v > float("-inf")]
