"""Rows as columns of terms: for a training step, its diagnosis, or logprobs; its trust region.

Child side only.

Index suffixes: T terms as in `logprob_scoring`, N all terms of a step, W windows of a sample, K the
terms of a window.
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
from langchain_art_server.algorithms.loss.loss_stats import divergences
from langchain_art_server.algorithms.loss.objective import StepLoss, TrainedTokens
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    Packing,
    Progress,
    Scorer,
    number_dtype,
)
from langchain_art_server.backends.peft.packer import Packer

LOGPROB_TOKENS = 4096  # most tokens alive at once in a forward pass without a backward pass
PROBE_TOKENS = 512  # `probe` adds rows until they have this many trained tokens


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
def sweep_logprobs(
    packing: Packing, scorer: Scorer, terms: int, progress: Progress | None = None
) -> Tensor:
    """Logprobs of all terms of a packing (N), in nats."""
    base = scorer.base
    found_N = torch.zeros(terms, dtype=number_dtype(base), device=base.device)

    def note(logprobs_T: Tensor, terms_T: Tensor) -> None:
        found_N[terms_T] = logprobs_T

    packing.sweep(scorer, note, progress)
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
    """Raise ArtError if an update's loss or its gradient's norm is not finite.

    `gap` is in nats, between learner and sampler on the token where they differ most.
    """
    half = "" if dtype != torch.float16 else "float16 ends at 65504: if so, serve in float32. "
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ArtError(
            f"The step was refused: got loss={loss} and gradient norm={norm}, expected "
            "finite numbers. Learner and sampler are up to "
            f"{gap:.4g} nats apart on one token: if that is large, they do not "
            f"run the same model or adapter. {half}Nothing was published."
        )


WHOLE = 8192  # most trained tokens of a step whose divergence is measured on all of them
#: Of more, on a share of them, so few at least and so many at most, in windows of neighbours.
SHARE, FEWEST, MOST = 1 / 24, 2560, 8192
#: One for so many rows, whose context goes through the model; fewest and most of them.
ROWS_A_WINDOW, FEWEST_WINDOWS, MOST_WINDOWS = 4, 8, 32


def windows(terms: int, rows: int, seed: Sequence[int], share: int = 1) -> Ints:
    """A sample of terms (W, K), in which each is equally often, on average over seeds.

    A window begins at a random place of each of W equal stretches. Terms of a run, and runs of a
    scenario, are neighbours: so it is a sample of all scenarios, of runs and of places in them.
    There are `terms`, at least one, of so many rows. `share` is of how many samples that are put
    together this is one.
    """
    every = min(max(rows // ROWS_A_WINDOW, FEWEST_WINDOWS), MOST_WINDOWS)
    length = min(max(int(terms * share * SHARE), FEWEST), MOST) // every
    count = max(2, every // share)
    rng = np.random.default_rng(seed)
    starts_W = ((np.arange(count) + rng.random(count)) * terms / count).astype(np.int64)
    return (starts_W[:, None] + np.arange(length)) % terms


@dataclass(frozen=True)
class Watched:
    """The terms of a batch by which a step's divergence is measured: all, or a sample."""

    packing: Packing
    old_logprobs_T: Tensor
    stand_for: int  # so many terms
    sample_WK: Tensor | None = None  # indices of T; None: all are taken

    def moved(self, scorer: Scorer, progress: Progress | None = None) -> dict[str, float]:
        """Sums over the terms that it stands for; those of ranks add up to those of the step.

        `variance` is that of `moved`, the sum of k3 of KL(π_old ‖ π), by how far windows differ. It
        is rather too large: stretches differ by more than two samples of one stretch.
        """
        logprobs_T = sweep_logprobs(self.packing, scorer, len(self.old_logprobs_T), progress)
        moved_T, terms = divergences(logprobs_T, self.old_logprobs_T), self.stand_for
        found = {"terms": float(terms), "moved": 0.0, "variance": 0.0}
        if self.sample_WK is None:
            return found | {"moved": moved_T.sum().item()}
        mean_W = moved_T[self.sample_WK].mean(1)
        variance = terms**2 * mean_W.var().item() / len(mean_W)
        return found | {"moved": terms * mean_W.mean().item(), "variance": variance}


def watch(
    batch: TrainingBatch, packer: Packer, all_rows: int, seed: Sequence[int], share: int
) -> Watched:
    """A sample of a batch whose first update was visited; see `windows`."""
    rows, old_N = batch.rows, batch.loss.old_logprobs_N
    sample_WK = windows(len(old_N), all_rows, seed, share) if rows else np.zeros((0, 0), np.int64)
    terms, sample = np.unique(sample_WK, return_inverse=True)
    counted = CountedTokens.of(rows)
    chosen, row_T = np.unique(counted.row_T[terms], return_inverse=True)
    call_T = np.unique(counted.call_T[terms], return_inverse=True)[1]
    some = CountedTokens(row_T, counted.at_T[terms], call_T)
    packing = packer.pack([rows[index] for index in chosen.tolist()], some, LOGPROB_TOKENS)
    device = old_N.device
    places_T, sample_WK = (
        torch.from_numpy(x).to(device) for x in (terms, sample.reshape(sample_WK.shape))
    )
    return Watched(packing, old_N[places_T], len(old_N), sample_WK if rows else None)


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

    The parameters that are trained have the parent's values now; `changed` is called whenever they
    were changed, before anything is measured.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], bound: float, changed: Callable[[], None]
    ) -> None:
        self._parameters, self._bound, self._changed = list(parameters), bound, changed
        self._parents = [one.detach().clone() for one in self._parameters]

    @torch.no_grad()
    def shorten(self, moved: float, measure: Callable[[], float]) -> tuple[float, float]:
        """Shorten the step until it is within the bound.

        `moved` is the divergence now, which `measure` computes anew for the parameters as they are.
        Returns the divergence at the end, and which share of the step was kept.
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
