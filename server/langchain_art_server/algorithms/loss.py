"""The policy loss: torch and nothing else, pure functions of tensors.

Index suffixes: T trained or masked tokens of a micro-batch laid end to end, V vocabulary.
Logprobs are in nats, under softmax(logits / temperature).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Elements of logits that are upcast at once: bounds the extra memory to 64 MiB in float32.
CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Logprob of each target under softmax(logits / temperature), lean in memory.

    ``logprob_t = z_t[target_t] - log Σ_v exp z_t[v]`` with ``z = logits / temperature``. Computed
    in float32 (float64 for float64 logits) by chunks of tokens, forward and backward; only the
    logits themselves and one number per token are kept for the backward pass, no log-softmax.

    Args:
        logits_TV: raw scores, any floating dtype.
        targets_T: int64 token ids in 0 … V-1.
        temperature: above 0; one number, or one per token (T).

    Returns:
        (T), float32 or float64, differentiable once with respect to `logits_TV`.
    """
    dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    temperature_T = torch.as_tensor(temperature, dtype=dtype, device=logits_TV.device)
    return _TokenLogprobs.apply(logits_TV, targets_T, temperature_T.expand(len(targets_T)))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature_T: Tensor) -> Tensor:
        dtype = temperature_T.dtype
        lse_T = torch.empty(len(targets_T), dtype=dtype, device=logits_TV.device)
        target_T = torch.empty_like(lse_T)
        for part in _chunks(logits_TV):
            z_TV = logits_TV[part].to(dtype) / temperature_T[part, None]
            lse_T[part] = z_TV.logsumexp(-1)
            target_T[part] = z_TV.gather(-1, targets_T[part, None]).squeeze(-1)
        ctx.save_for_backward(logits_TV, targets_T, temperature_T, lse_T)
        return target_T - lse_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's doing
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        # d logprob_t / d logits_t[v] = (1[v = target_t] - softmax(z_t)[v]) / temperature_t
        (grad_T,) = grads
        logits_TV, targets_T, temperature_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for part in _chunks(logits_TV):
            scale_T1 = (grad_T[part] / temperature_T[part])[:, None]
            z_TV = logits_TV[part].to(lse_T.dtype) / temperature_T[part, None]
            g_TV = z_TV.sub_(lse_T[part, None]).exp_().mul_(-scale_T1)
            index_T1 = targets_T[part, None]
            g_TV.scatter_(-1, index_T1, g_TV.gather(-1, index_T1) + scale_T1)
            grad_TV[part] = g_TV.to(logits_TV.dtype)
        return grad_TV, None, None


def _chunks(logits_TV: Tensor) -> list[slice]:
    tokens, vocab = logits_TV.shape
    size = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, tokens, size)]


def clipped_loss(
    logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    clip_low: float,
    clip_high: float,
    denominator: int,
) -> Tensor:
    """PPO's clipped surrogate, token-level over a whole optimizer step.

    ``L = -(1/N) Σ_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)`` over tokens with
    mask 1, ``r_t = exp(logprob_t - sampler_logprob_t)``. The clipped objective is PPO's (arXiv
    1707.06347, eq. 7); the separate upper bound ("clip-higher") and the sum over all tokens of the
    step over their count N are DAPO's (arXiv 2503.14476, eq. 8). The ratio is taken against the
    sampler that drew the token, so it also corrects for tokens that are a version old.

    `denominator` comes from outside, so the losses of micro-batches add up to the loss of the
    batch, whatever the split. Example, one token and N = 1: r 1.5 and A +1 at (0.2, 0.28) gives
    -1.28; r 0.5 and A -1 gives +0.8.

    Args:
        logprobs_T: the learner's, in nats; carries the gradient.
        sampler_logprobs_T: those recorded when the tokens were drawn.
        advantages_T: one per token, without a unit.
        mask_T: true where the token is trained; whatever the others hold is ignored, even NaN.
        clip_low: the ratio's distance below 1 at which a negative advantage stops pushing.
        clip_high: the distance above 1 at which a positive advantage stops pushing.
        denominator: N, all trained tokens of the optimizer step.

    Returns:
        A scalar, to be minimised.
    """
    mask_T = mask_T.bool()
    zero = torch.zeros_like(logprobs_T)
    advantages_T = torch.where(mask_T, advantages_T.to(logprobs_T.dtype), zero)
    ratio_T = torch.where(mask_T, logprobs_T - sampler_logprobs_T, zero).exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).sum() / denominator


@dataclass(frozen=True)
class LossStats:
    """Sums and maxima over trained tokens, so that those of micro-batches can be added.

    Attributes:
        tokens: trained tokens.
        ratio: Σ r.
        ratio_max_dev: max |r - 1|.
        clipped_low: tokens with A < 0 and r < 1 - clip_low: the clip took their gradient.
        clipped_high: tokens with A > 0 and r > 1 + clip_high.
        gap: Σ |logprob - sampler_logprob|, in nats.
        gap_max: the largest of them.
        kl: Σ k3 of KL(sampler || learner).
    """

    tokens: float = 0.0
    ratio: float = 0.0
    ratio_max_dev: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    kl: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        """The stats of both sets of tokens together."""
        return LossStats(
            tokens=self.tokens + other.tokens,
            ratio=self.ratio + other.ratio,
            ratio_max_dev=max(self.ratio_max_dev, other.ratio_max_dev),
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            gap=self.gap + other.gap,
            gap_max=max(self.gap_max, other.gap_max),
            kl=self.kl + other.kl,
        )

    def metrics(self) -> dict[str, float]:
        """Means per token and maxima, by the names under which a job reports them."""
        n = max(1.0, self.tokens)
        return {
            "ratio_mean": self.ratio / n,
            "ratio_max_dev": self.ratio_max_dev,
            "clip_low_fraction": self.clipped_low / n,
            "clip_high_fraction": self.clipped_high / n,
            "logprob_gap_mean": self.gap / n,
            "logprob_gap_max": self.gap_max,
            "kl": self.kl / n,
        }


@torch.no_grad()
def loss_stats(
    logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossStats:
    """What the clip did, and how far learner and sampler are apart.

    `kl` is Schulman's k3, ``r - 1 - log r`` with r = learner / sampler: over tokens that the
    sampler drew, its mean is KL(sampler || learner), and it is never negative
    (joschu.net/blog/kl-approx.html). Arguments as for `clipped_loss`.
    """
    keep_T = mask_T.bool()
    log_ratio_T = (logprobs_T - sampler_logprobs_T)[keep_T]
    if log_ratio_T.numel() == 0:
        return LossStats()
    advantages_T = advantages_T[keep_T]
    ratio_T = log_ratio_T.exp()
    numbers = torch.stack(
        [
            ratio_T.sum(),
            (ratio_T - 1).abs().max(),
            ((advantages_T < 0) & (ratio_T < 1 - clip_low)).sum(),
            ((advantages_T > 0) & (ratio_T > 1 + clip_high)).sum(),
            log_ratio_T.abs().sum(),
            log_ratio_T.abs().max(),
            (log_ratio_T.expm1() - log_ratio_T).sum(),
        ]
    )
    return LossStats(float(log_ratio_T.numel()), *numbers.tolist())
