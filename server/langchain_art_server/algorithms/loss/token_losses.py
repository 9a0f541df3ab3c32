"""Logits to logprobs, and logprobs to a loss for each token: pure functions of tensors.

Index suffixes: T trained tokens of a micro-batch laid end to end, V vocabulary. Logprobs are in
nats, under softmax(logits / temperature).

Published losses that are not implemented: SAPO (arXiv 2511.20347), a smooth gate in place of the
clip of `clip_loss`, which no ratio reaches with one optimizer step per batch; VESPO (2602.10693),
weights for sequences far off policy, which the guard of `importance_sampling` excludes; OPSM
(2512.02556), which drops calls far off policy with negative advantages, where the guard drops all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from langchain_art_server.algorithms.loss.segments import call_means

#: Weight of the squared log-ratio in `dppo_tv_loss`.
DPPO_TAU = 1e-3

#: Elements of logits that are upcast at once: bounds the extra memory to 64 MiB in float32.
CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Logprob of each target under softmax(logits / temperature), in little memory.

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
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator changes the type
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


class TokenLoss(NamedTuple):
    """A loss for each token, not yet weighted or summed, and where its bounds acted.

    Attributes:
        loss_T: carries the gradient.
        low_T: true where the lower bound acted.
        high_T: true where the upper bound acted.
    """

    loss_T: Tensor
    low_T: Tensor
    high_T: Tensor


def clip_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate with a bound of its own for each side, and dual clip.

    ``l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprob - old)`` (arXiv
    1707.06347, eq. 7; the two bounds: DAPO, arXiv 2503.14476). With dual clip, ``l`` is at most
    ``-dual_clip A`` where A < 0 (arXiv 1912.09729). Where a bound holds there is no gradient.

    Example at (0.2, 0.28): r 1.5 and A +1 gives -1.28, r 0.5 and A -1 gives 0.8; r 5 and A -1 gives
    5, with a dual clip of 3 it gives 3.

    Args:
        logprobs_T: the learner's, in nats; carries the gradient.
        old_logprobs_T: the learner's before the first update on this batch.
        advantages_T: one per token, without a unit.
        clip_low: distance below 1 of the ratio below which a negative advantage has no gradient.
        clip_high: distance above 1 of the ratio above which a positive advantage has no gradient.
        dual_clip: ratio above which a negative advantage has no gradient, above 1; None: none.
    """
    ratio_T = (logprobs_T - old_logprobs_T).exp()
    return _clipped(ratio_T, advantages_T, clip_low, clip_high, dual_clip)


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    calls_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """GSPO (arXiv 2507.18071, eq. 5 to 7): the clipped surrogate with one ratio for a whole call.

    ``s = exp(mean over the call's tokens of (logprob - old))`` takes the place of each token's
    ratio. It varies less than a token's: the paper clips it at 3e-4 and 4e-4.

    Args:
        logprobs_T: as for `clip_loss`.
        old_logprobs_T: as for `clip_loss`.
        advantages_T: as for `clip_loss`.
        calls_T: integers, equal for the tokens of one call; a call's tokens are all here.
        clip_low: as for `clip_loss`.
        clip_high: as for `clip_loss`.
    """
    ratio_T = call_means(logprobs_T - old_logprobs_T, calls_T).exp()
    return _clipped(ratio_T, advantages_T, clip_low, clip_high, None)


def cispo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """CISPO (arXiv 2506.13585, eq. 4 and 5): the weight is clipped, the gradient never.

    ``l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob``, ``sg`` stopping the gradient.
    With ``clip_low=1`` there is no lower bound, as in the paper.

    Args:
        logprobs_T: as for `clip_loss`.
        old_logprobs_T: as for `clip_loss`.
        advantages_T: as for `clip_loss`.
        clip_low: distance of the weight's lower bound from 1.
        clip_high: distance of its upper bound from 1.
    """
    ratio_T = (logprobs_T.detach() - old_logprobs_T).exp()
    low, high = 1 - clip_low, 1 + clip_high
    loss_T = -ratio_T.clamp(low, high) * advantages_T * logprobs_T
    return TokenLoss(loss_T, ratio_T < low, ratio_T > high)


def dppo_tv_loss(
    logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """DPPO with total variation (arXiv 2602.04879): bounds the change of a token's probability.

    With π the learner's probability and μ the sampler's, ``l = -(π/μ) A``, but 0 where
    ``A > 0 and π - μ > clip_high`` or ``A < 0 and π - μ < -clip_low``; everywhere plus
    ``1e-3 log²(π/μ)`` (arXiv 2602.02276). A bound on the ratio is tight for rare tokens and
    loose for frequent ones; here π .9 and μ .6 with A > 0 is left out, π .02 and μ .001 is not.

    Args:
        logprobs_T: as for `clip_loss`.
        sampler_logprobs_T: recorded when the tokens were drawn; the ratio is against these, so
            it takes no importance sampling.
        advantages_T: as for `clip_loss`.
        clip_low: 0 … 1, in probability.
        clip_high: 0 … 1, in probability.
    """
    log_ratio_T = logprobs_T - sampler_logprobs_T
    moved_T = logprobs_T.detach().exp() - sampler_logprobs_T.exp()
    low_T = (advantages_T < 0) & (moved_T < -clip_low)
    high_T = (advantages_T > 0) & (moved_T > clip_high)
    kept_T = ~(low_T | high_T)
    # Masked before the exponential: a ratio that overflows must not reach the gradient as 0 * inf.
    ratio_T = torch.where(kept_T, log_ratio_T, torch.zeros_like(log_ratio_T)).exp() * kept_T
    return TokenLoss(-ratio_T * advantages_T + DPPO_TAU * log_ratio_T.square(), low_T, high_T)


def sft_loss(logprobs_T: Tensor) -> TokenLoss:
    """Supervised fine-tuning: ``l = -logprob``, the negative log-likelihood, in nats.

    With weights of ``1/N`` the step's loss is the mean over its N tokens.

    Args:
        logprobs_T: as for `clip_loss`.
    """
    nowhere_T = torch.zeros_like(logprobs_T, dtype=torch.bool)
    return TokenLoss(-logprobs_T, nowhere_T, nowhere_T)


def _clipped(
    ratio_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    low, high = 1 - clip_low, 1 + clip_high
    plain_T = ratio_T * advantages_T
    loss_T = -torch.minimum(plain_T, ratio_T.clamp(low, high) * advantages_T)
    low_T = (advantages_T < 0) & (ratio_T < low)
    high_T = (advantages_T > 0) & (ratio_T > high)
    if dual_clip is not None:
        dual_T = (advantages_T < 0) & (ratio_T > dual_clip)
        loss_T = torch.where(dual_T, -dual_clip * advantages_T, loss_T)
        high_T = high_T | dual_T
    return TokenLoss(loss_T, low_T, high_T)
