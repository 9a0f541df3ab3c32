"""Drawing the next token of every row at once, with the logprobs of what was drawn.

Recorded logprobs are log-softmax(logits / temperature) over the whole vocabulary (temperature 1 for
greedy rows; over what the grammar allows for constrained rows), whatever `top_k` and `top_p` cut.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from langchain_art_server.backends.base import Sampling
from langchain_art_server.backends.chat.guided_decoding import Constraint


@dataclass
class Draw:
    """How one row's tokens are drawn. `rng` gives one uniform number per token."""

    sampling: Sampling
    rng: random.Random
    constraint: Constraint | None = None


@dataclass
class Chosen:
    """What was drawn, one entry per row.

    Attributes:
        tokens: token ids.
        logprobs: theirs; NaN where a row's logits were not numbers.
        top: row -> the most probable ``(token id, logprob)``, for rows that asked.
        ids: `tokens` as a tensor on the model's device.
    """

    tokens: list[int]
    logprobs: list[float]
    ids: Tensor
    top: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


class Chooser:
    """Draws for a fixed list of rows; made again whenever the rows change."""

    def __init__(self, draws: Sequence[Draw], device: torch.device) -> None:
        self._rngs = [draw.rng for draw in draws]
        self._device = device
        # Sums over a large vocabulary need float64; Apple's GPUs have none.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        temperatures = [draw.sampling.temperature for draw in draws]
        self._scales: Tensor | None = None
        if any(t not in (0.0, 1.0) for t in temperatures):
            # Divided by, not multiplied with the inverse: the learner divides too.
            self._scales = torch.tensor([[t or 1.0] for t in temperatures], device=device)
        self._greedy: Tensor | None = None
        if 0.0 in temperatures:
            self._greedy = torch.tensor([t == 0.0 for t in temperatures], device=device)
        cut = [i for i, d in enumerate(draws) if d.sampling.top_p < 1.0 or d.sampling.top_k > 0]
        self._cut = torch.tensor(cut, device=device) if cut else None
        self._top_p = torch.tensor([[draws[i].sampling.top_p] for i in cut], device=device)
        self._top_k = torch.tensor(
            [[draws[i].sampling.top_k or 1 << 30] for i in cut], device=device
        )
        self._constraints = [(i, d.constraint) for i, d in enumerate(draws) if d.constraint]
        self._top = [(i, d.sampling.top_logprobs) for i, d in enumerate(draws)]
        self._top = [(i, n) for i, n in self._top if n]

    def choose(self, logits: Tensor) -> Chosen:
        """Draw from float32 logits ``[rows, vocab]``, which may be overwritten."""
        for row, constraint in self._constraints:
            constraint.mask(logits[row])
        logprobs = (logits if self._scales is None else logits / self._scales).log_softmax(-1)
        weights = logprobs.exp()
        if self._cut is not None:
            weights[self._cut] = self._truncate(weights[self._cut])
        ids = self._invert(weights)
        if self._greedy is not None:
            ids = torch.where(self._greedy, logits.argmax(-1), ids)
        picked = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
        tokens, values = torch.stack([ids.to(self._wide), picked.to(self._wide)]).tolist()
        chosen = Chosen([int(token) for token in tokens], values, ids)
        if self._top:
            self._add_top(chosen, logprobs)
        return chosen

    def _invert(self, weights: Tensor) -> Tensor:
        """The first token at which the summed probability exceeds a uniform number."""
        uniforms = torch.tensor(
            [rng.random() for rng in self._rngs], dtype=self._wide, device=self._device
        )
        sums = weights.cumsum(-1, dtype=self._wide)
        total = sums[:, -1:]
        # Rounding must not reach the total: the token found there may have no probability.
        target = torch.minimum(
            uniforms.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total))
        )
        found = torch.searchsorted(sums, target, right=True).squeeze(1)
        return found.clamp_(max=weights.shape[1] - 1)

    def _truncate(self, weights: Tensor) -> Tensor:
        """Zero what `top_k`, then `top_p` (of what `top_k` left) leaves out."""
        ordered, order = weights.sort(descending=True, stable=True)
        ranks = torch.arange(weights.shape[1], device=self._device)
        ordered = ordered * (ranks < self._top_k)
        before = ordered.cumsum(-1, dtype=self._wide) - ordered
        share = before / ordered.sum(-1, keepdim=True, dtype=self._wide)
        keep = (share < self._top_p) & (ordered > 0)
        keep[:, 0] = True
        return torch.zeros_like(weights).scatter_(1, order, ordered * keep)

    def _add_top(self, chosen: Chosen, logprobs: Tensor) -> None:
        rows = [row for row, _ in self._top]
        most = min(max(n for _, n in self._top), logprobs.shape[1])
        values, ids = logprobs[rows].topk(most, dim=-1)
        for (row, n), value, token in zip(self._top, values.tolist(), ids.tolist(), strict=True):
            pairs = list(zip(token[:n], value[:n], strict=True))
            chosen.top[row] = [(t, v) for t, v in pairs if v > float("-inf")]
