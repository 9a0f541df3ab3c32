"""Rows as columns of terms: for a training step, its diagnosis, or logprobs; its trust region.

Child side only.

Index suffixes: T terms as in `logprob_scoring`, N all terms of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.loss.logprob_gap import TEMPERATURES, Suspect, suspects_of
from langchain_art_server.algorithms.loss.objective import StepLoss, TrainedTokens
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    Packing,
    Scorer,
    number_dtype,
)

#: `probe` adds rows until they have this many trained tokens.
PROBE_TOKENS = 512


@dataclass(frozen=True)
class TrainingBatch:
    """The rows of a step, their micro-batches, and the loss of their tokens."""

    rows: Sequence[Row]
    packing: Packing
    loss: StepLoss


def step_tokens(
    rows: Sequence[Row], counted: CountedTokens, base: PreTrainedModel
) -> TrainedTokens:
    """The columns of rows at their trained tokens, on the device of the model.

    Where a row has no weights, its tokens weigh one over the number of all tokens.
    """
    number = number_dtype(base)

    def tensor(columns: list[list[float]]) -> Tensor:
        return torch.from_numpy(counted.column(columns)).to(base.device, dtype=number)

    equal = 1.0 / max(1, len(counted.row_T))
    return TrainedTokens(
        sampler_logprobs=tensor([row.logprobs for row in rows]),
        advantages=tensor([row.advantages for row in rows]),
        weights=tensor([row.weights or [equal] * len(row.mask) for row in rows]),
        calls=torch.from_numpy(counted.call_T).to(base.device),
    )


@torch.no_grad()
def sweep_logprobs(packing: Packing, scorer: Scorer, terms: int) -> Tensor:
    """Logprobs of all terms of a packing (N), in nats."""
    base = scorer.base
    found_N = torch.zeros(terms, dtype=number_dtype(base), device=base.device)

    def note(logprobs_T: Tensor, terms_T: Tensor) -> None:
        found_N[terms_T] = logprobs_T

    packing.sweep(scorer, note)
    return found_N


def probe(
    batch: TrainingBatch, base: PreTrainedModel, score: Callable[[Sequence[Row], bool], Tensor]
) -> list[Suspect]:
    """Try the usual faults on the rows where learner and sampler are furthest apart.

    `batch` is that of the first update; on one of several ranks it may have no rows. `score` takes
    rows, and whether to use the base model, to the logprobs of their trained tokens (T).
    """
    rows, loss = batch.rows, batch.loss
    gaps_N = (loss.old_logprobs_N - loss.tokens.sampler_logprobs).abs().cpu().numpy()
    gaps = np.bincount(CountedTokens.of(rows).row_T, weights=gaps_N, minlength=len(rows))
    chosen: list[Row] = []
    for index in np.argsort(-gaps, kind="stable").tolist():
        if sum(sum(row.mask) for row in chosen) < PROBE_TOKENS:
            chosen.append(rows[index])
    # Rows that differ in temperature alone are one row of the forest.
    heated = [replace(row, temperature=t) for t in TEMPERATURES for row in chosen]
    own_T = score(chosen, False)
    found = step_tokens(chosen, CountedTokens.of(chosen), base)
    heated_T = score(heated, False).reshape(len(TEMPERATURES), len(own_T))
    return suspects_of(
        own_T=own_T,
        base_T=score(chosen, True),
        at_temperatures=dict(zip(TEMPERATURES, heated_T, strict=True)),
        sampler_logprobs_T=found.sampler_logprobs,
        calls_T=found.calls,
        recorded=[row.temperature for row in chosen],
    )


def require_finite(loss: float, norm: float, gap: float, dtype: torch.dtype) -> None:
    """Raise ArtError if the loss or the gradient's norm is not finite.

    Args:
        loss: of one optimizer step.
        norm: of its gradient.
        gap: nats between learner and sampler on the token where they differ most.
        dtype: of the base.
    """
    half = "" if dtype != torch.float16 else "float16 ends at 65504: if so, serve in float32. "
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ArtError(
            f"The step was refused: got loss={loss} and gradient norm={norm}, expected "
            "finite numbers. Learner and sampler are up to "
            f"{gap:.4g} nats apart on one token: if that is large, they do not "
            f"run the same model or adapter. {half}Nothing was published."
        )


#: Where in the region a step ends that went beyond it, as a share of the bound: KL divergence is
#: only nearly quadratic in the weights.
_AIM = 0.9
#: Most times that a step is shortened; if it still is too long then, nothing of it is kept. From
#: the third time on at least by half: where the policy is near a collapse, divergence can fall
#: more slowly than the distance.
_MOST_CUTS, _HALF = 8, 0.5


class TrustRegion:
    """Bounds KL(π_old ‖ π) of a step, in nats per token.

    Further updates on the same runs end once the bound is passed, as PPO's implementations do with
    `target_kl` (Spinning Up, Stable-Baselines3). What went beyond is taken back along the straight
    line to the parent's weights: near them the divergence is quadratic in the distance, so that
    the step times ``√(bound / divergence)`` is on the bound (TRPO, arXiv 1502.05477, appendix C,
    which searches along that line, too).

    Args:
        parameters: what is trained; at the parent's values now.
        bound: largest divergence.
        changed: called whenever the parameters were changed, before anything is measured.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], bound: float, changed: Callable[[], None]
    ) -> None:
        self._parameters, self._bound, self._changed = list(parameters), bound, changed
        self._parents = [one.detach().clone() for one in self._parameters]

    @torch.no_grad()
    def shorten(self, moved: float, measure: Callable[[], float]) -> tuple[float, float]:
        """Shorten the step until it is within the bound.

        Args:
            moved: the divergence now.
            measure: computes it anew, for the parameters as they are.

        Returns:
            The divergence at the end, and which share of the step was kept.
        """
        kept = 1.0
        ends = [one.detach().clone() for one in self._parameters] if moved > self._bound else []
        for cut in range(_MOST_CUTS):
            if moved <= self._bound:
                return moved, kept
            share = math.sqrt(_AIM * self._bound / moved)
            kept *= min(share, _HALF) if cut > 1 else share
            self._go(kept, ends)
            moved = measure()
        if moved <= self._bound:
            return moved, kept
        self._go(0.0, ends)
        return 0.0, 0.0

    def _go(self, share: float, ends: list[torch.Tensor]) -> None:
        for one, parent, end in zip(self._parameters, self._parents, ends, strict=True):
            one.copy_(parent + share * (end - parent))
        self._changed()
