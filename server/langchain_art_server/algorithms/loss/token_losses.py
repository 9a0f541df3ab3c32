"""Logits to logprobs, and logprobs to a loss and a KL penalty for each token: pure functions.

Index suffixes: T trained tokens of a micro-batch laid end to end, V vocabulary. Logprobs are in
nats, under softmax(logits / temperature).

Published losses that are not implemented: SAPO (arXiv 2511.20347), a smooth gate in place of the
clip of `clip_loss`, which no ratio reaches with one optimizer step per batch; VESPO (2602.10693),
weights for sequences far off policy, which the guard of `importance_sampling` excludes; OPSM
(2512.02556), which drops calls far off policy with negative advantages, where the guard drops all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

DPPO_TAU = 1e-3  # weight of the squared log-ratio in `dppo_tv_loss`

#: Elements of logits that are upcast at once: bounds the extra memory to 64 MiB in float32.
CHUNK_ELEMENTS = 1 << 24
Forbidden: TypeAlias = Callable[[slice, int], NDArray[Any] | None]
"""Takes some of T tokens and the size of the vocabulary; gives a row of each one's tokens that it
was not drawn from, or None if each was drawn from all (`token_sets.SetColumn.forbidden`)."""


def token_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float | Tensor = 1.0,
    forbidden: Forbidden | None = None,
) -> Tensor:
    """Logprob of each target under softmax(logits / temperature), in little memory.

    ``logprob_t = z_t[target_t] - log Σ_v exp z_t[v]`` with ``z = logits / temperature``. Computed
    in float32 (float64 for float64 logits) by chunks of tokens, forward and backward; only the
    logits themselves and one number per token are kept for the backward pass, no log-softmax.

    Args:
        logits_TV: raw scores, any floating dtype; differentiable once.
        targets_T: int64 token ids in 0 … V-1.
        temperature: above 0; one number, or one per token (T).
        forbidden: tokens that the softmax of a token leaves out, since it was not drawn from them,
            and to whose logits there is no gradient; None: the whole vocabulary is left in.
    """
    dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    temperature_T = torch.as_tensor(temperature, dtype=dtype, device=logits_TV.device)
    temperature_T = temperature_T.expand(len(targets_T))
    return _TokenLogprobs.apply(logits_TV, targets_T, temperature_T, forbidden)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature_T: Tensor,
        forbidden: Forbidden | None,
    ) -> Tensor:
        dtype = temperature_T.dtype
        lse_T = torch.empty(len(targets_T), dtype=dtype, device=logits_TV.device)
        target_T = torch.empty_like(lse_T)
        for part in _chunks(logits_TV):
            z_TV = _scaled(logits_TV, temperature_T, forbidden, part)
            lse_T[part] = z_TV.logsumexp(-1)
            target_T[part] = z_TV.gather(-1, targets_T[part, None]).squeeze(-1)
        ctx.save_for_backward(logits_TV, targets_T, temperature_T, lse_T)
        ctx.forbidden = forbidden
        return target_T - lse_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator changes the type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        # d logprob_t / d logits_t[v] = (1[v = target_t] - softmax(z_t)[v]) / temperature_t
        (grad_T,) = grads
        logits_TV, targets_T, temperature_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for part in _chunks(logits_TV):
            scale_T1 = (grad_T[part] / temperature_T[part])[:, None]
            z_TV = _scaled(logits_TV, temperature_T, ctx.forbidden, part)
            g_TV = z_TV.sub_(lse_T[part, None]).exp_().mul_(-scale_T1)
            index_T1 = targets_T[part, None]
            g_TV.scatter_(-1, index_T1, g_TV.gather(-1, index_T1) + scale_T1)
            grad_TV[part] = g_TV.to(logits_TV.dtype)
        return grad_TV, None, None, None


def _scaled(
    logits_TV: Tensor, temperature_T: Tensor, forbidden: Forbidden | None, part: slice
) -> Tensor:
    """Logits of some tokens over their temperature, -inf where a token was not drawn from."""
    z_TV = logits_TV[part].to(temperature_T.dtype) / temperature_T[part, None]
    if forbidden is not None:
        forbidden_TV = forbidden(part, logits_TV.shape[1])
        if forbidden_TV is not None:
            z_TV.masked_fill_(torch.from_numpy(forbidden_TV).to(z_TV.device), float("-inf"))
    return z_TV


def _chunks(logits_TV: Tensor) -> list[slice]:
    tokens, vocab = logits_TV.shape
    size = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, start + size) for start in range(0, tokens, size)]


class TokenLoss(NamedTuple):
    """A loss for each token, not yet weighted or summed, and where its bounds acted."""

    loss_T: Tensor  # carries the gradient
    low_T: Tensor  # true where the lower bound acted
    high_T: Tensor  # true where the upper bound acted


def call_sums(values_T: Tensor, calls_T: Tensor) -> Tensor:
    """Sum over the tokens of each token's call (equal integers). Differentiable."""
    calls_S, index_T = calls_T.unique(return_inverse=True)
    sums_S = values_T.new_zeros(len(calls_S)).index_add(0, index_T, values_T)
    return sums_S.index_select(0, index_T)


def call_means(values_T: Tensor, calls_T: Tensor) -> Tensor:
    """Mean over the tokens of each token's call; as `call_sums`.

    Example: values ``[1, 3, 5]`` of the calls ``[7, 7, 4]`` give ``[2, 2, 5]``.
    """
    return call_sums(values_T, calls_T) / call_sums(torch.ones_like(values_T), calls_T)


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


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    calls_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """GSPO (arXiv 2507.18071, eq. 5 to 7): `clip_loss` with one ratio for all tokens of a call.

    ``s = exp(mean over the call's tokens of (logprob - old))`` takes the place of each token's
    ratio. It varies less than a token's: the paper clips it at 3e-4 and 4e-4. All tokens of a call
    must be here.
    """
    log_ratio_T = call_means(logprobs_T - old_logprobs_T, calls_T)
    zeros_T = torch.zeros_like(log_ratio_T)
    return clip_loss(log_ratio_T, zeros_T, advantages_T, clip_low, clip_high)


def cispo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """CISPO (arXiv 2506.13585, eq. 4 and 5): the weight is clipped, the gradient never.

    ``l = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob``, ``sg`` stopping the gradient; the
    tensors as for `clip_loss`. With ``clip_low=1`` there is no lower bound, as in the paper.
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
    loose for frequent ones; here π .9 and μ .6 with A > 0 is excluded, π .02 and μ .001 is not.
    The ratio is against the sampler, so it takes no importance sampling. Bounds are probabilities.
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
    """Supervised fine-tuning: ``l = -logprob``, the negative log-likelihood, in nats."""
    nowhere_T = torch.zeros_like(logprobs_T, dtype=torch.bool)
    return TokenLoss(-logprobs_T, nowhere_T, nowhere_T)


def kl_penalty(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, old_logprobs_T: Tensor, kind: str
) -> Tensor:
    """An estimate of KL(π ‖ base) for each token, in nats, with the gradient of the divergence.

    With ``d = log π - log base`` the estimators are ``k1 = d``, ``k2 = d²/2`` and
    ``k3 = exp(-d) + d - 1`` (joschu.net/blog/kl-approx.html). Without a ratio in the loss, only k2
    has the divergence's gradient: k1's is 0 on average, k3's is the reverse divergence's (arXiv
    2512.21852). Here each is multiplied by the ratio ``r = π/π_old``, as in DeepSeek-V3.2 (arXiv
    2512.02556), and the gradient flows through it: averages over tokens drawn from π_old then stay
    unbiased after π has been updated.

    - ``k1``: ``r d``. Unbiased value and gradient; noisy, and possibly negative.
    - ``k2``: ``sg(r) d²/2``, ``sg`` stopping the gradient. Unbiased gradient, biased value.
    - ``k3``: ``r (exp(-d) + d - 1)``. Unbiased value, never negative, and the gradient of ``k2``.

    Example with r = 1: d = -0.1 gives k1 -.1, k2 .005 and k3 .00517.
    """
    d_T = logprobs_T - reference_logprobs_T
    ratio_T = (logprobs_T - old_logprobs_T).exp()
    if kind == "k1":
        return ratio_T * d_T
    if kind == "k2":
        return ratio_T.detach() * d_T.square() / 2
    return ratio_T * ((-d_T).expm1() + d_T)


def entropy_penalty(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Term whose mean gradient, over tokens that π_old drew, is that of minus the entropy.

    ``sg(r) (log π)²/2`` for each token, ``r = π/π_old``: the gradient of ``-H = Σ_a π_a log π_a``
    is ``Σ_a π_a log π_a ∇log π_a``, as ``Σ_a π_a ∇log π_a = 0``. It is `kl_penalty`'s ``k2`` with
    the uniform distribution in place of the reference. Its value is no entropy.
    """
    ratio_T = (logprobs_T - old_logprobs_T).exp().detach()
    return ratio_T * logprobs_T.square() / 2
