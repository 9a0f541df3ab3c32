"""Statistics of a step, as sums that add up over micro-batches. Torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from langchain_art_server.algorithms.loss.importance_sampling import Importance
from langchain_art_server.algorithms.loss.token_losses import TokenLoss

#: Log-ratios are clamped to this before they are exponentiated for a metric, to stay finite.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossStats:
    """Sums and maxima over trained tokens, so that those of micro-batches can be added.

    μ is the sampler, π_old the learner before the first update, π the learner now.
    """

    tokens: float = 0.0  # trained tokens
    ratio: float = 0.0  # Σ π/π_old
    ratio_max: float = 0.0  # max |π/π_old - 1|
    moved: float = 0.0  # Σ k3 of KL(π_old ‖ π)
    clipped_low: float = 0.0  # tokens where the loss's lower bound acted
    clipped_high: float = 0.0  # tokens where its upper bound acted
    gap: float = 0.0  # Σ |log π_old - log μ|, in nats
    gap_max: float = 0.0  # the largest of them
    kl: float = 0.0  # Σ k3 of KL(μ ‖ π_old)
    importance: float = 0.0  # Σ π_old/μ
    weight: float = 0.0  # Σ of the weights that were used
    weight_squares: float = 0.0  # Σ of their squares
    limited: float = 0.0  # tokens whose weight a bound changed
    guarded: float = 0.0  # tokens of calls that the guard excluded
    kl_reference: float = 0.0  # Σ k3 of KL(π ‖ reference); 0 without one
    entropy: float = 0.0  # Σ -log π_old

    def __add__(self, other: LossStats) -> LossStats:
        """The stats of both sets of tokens together."""
        others = vars(other)
        both = {
            name: max(value, others[name]) if name.endswith("_max") else value + others[name]
            for name, value in vars(self).items()
        }
        return LossStats(**both)

    @property
    def divergence(self) -> float:
        """KL(π_old ‖ π) in nats per token."""
        return self.moved / max(1.0, self.tokens)

    def metrics(self) -> dict[str, float]:
        """Means per token and maxima, by the names under which a job reports them.

        ``importance_ess`` is the effective sample size over the number of tokens,
        ``(Σw)² / (n Σw²)``: 1 if all weights are equal. ``entropy``, in nats, is the Monte Carlo
        estimate over the sampled tokens; in a supervised step it is the cross-entropy.
        """
        n = max(1.0, self.tokens)
        return {
            "ratio_mean": self.ratio / n,
            "ratio_max_dev": self.ratio_max,
            "clip_low_fraction": self.clipped_low / n,
            "clip_high_fraction": self.clipped_high / n,
            "logprob_gap_mean": self.gap / n,
            "logprob_gap_max": self.gap_max,
            "kl": self.kl / n,
            "importance_mean": self.importance / n,
            "importance_ess": self.weight**2 / (n * self.weight_squares or 1.0),
            "importance_limited_fraction": self.limited / n,
            "guarded_fraction": self.guarded / n,
            "kl_reference": self.kl_reference / n,
            "entropy": self.entropy / n,
        }


@torch.no_grad()
def loss_stats(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    reference_T: Tensor | None,
    token_loss: TokenLoss,
    weighed: Importance,
) -> LossStats:
    """Statistics of the bounds, the importance weights and the gap to the sampler.

    Divergences are Schulman's k3 (joschu.net/blog/kl-approx.html): over tokens that p drew, the
    mean of ``q/p - 1 - log(q/p)`` is KL(p ‖ q), and it is never negative.
    """
    if logprobs_T.numel() == 0:
        return LossStats()
    moved_T = _cut(logprobs_T - old_logprobs_T)
    gap_T = old_logprobs_T - sampler_logprobs_T
    near_T = _cut(gap_T)
    away_T = _cut(torch.zeros_like(gap_T) if reference_T is None else reference_T - logprobs_T)
    weights_T = weighed.weights_T.double()
    numbers = torch.stack(
        [
            moved_T.exp().sum(),
            moved_T.expm1().abs().max(),
            divergences(logprobs_T, old_logprobs_T).sum(),
            token_loss.low_T.sum(),
            token_loss.high_T.sum(),
            gap_T.abs().sum(),
            gap_T.abs().max(),
            (near_T.expm1() - near_T).sum(),
            near_T.exp().sum(),
            weights_T.sum(),
            weights_T.square().sum(),
            weighed.limited_T.sum(),
            weighed.guarded_T.sum(),
            (away_T.expm1() - away_T).sum(),
            -old_logprobs_T.double().sum(),
        ]
    )
    return LossStats(float(logprobs_T.numel()), *numbers.tolist())


def divergences(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Estimates k3 of KL(π_old ‖ π), one a token, in nats."""
    moved_T = _cut(logprobs_T - old_logprobs_T)
    return moved_T.expm1() - moved_T


def _cut(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
