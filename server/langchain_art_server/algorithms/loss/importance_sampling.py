"""Importance sampling between sampler and learner. Torch only.

Each token has three probabilities: μ, the sampler's, which drew it; π_old, the learner's before the
first update on the batch; π, the learner's now. The loss is *decoupled* (AReaL, arXiv 2505.24298;
verl's rollout correction): its ratio π/π_old bounds the updates of this step, and the importance
weight π_old/μ, computed here, corrects for staleness and for numerical differences of the engines.
With one update per batch π_old is π, the ratio is 1, and no token is clipped for its staleness. A
single ratio π/μ would use up the bounds on staleness before the first update. (`dppo_tv_loss` has
such a ratio by design, and takes no weight.)

Weights are per token or per call, never a product over a whole run: at a gap of 0.02 nats per
token, the product over 8,000 tokens is below one half for 69 % of healthy runs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from langchain_art.wire import ImportanceSampling, SequenceMask, TruncatedIS
from langchain_art_server.algorithms.loss.token_losses import call_means, call_sums


class Importance(NamedTuple):
    """Importance weights of tokens. No gradient."""

    weights_T: Tensor  # factors of the tokens' losses, at least 0
    limited_T: Tensor  # true where a bound changed the weight
    guarded_T: Tensor  # true where the guard excluded the whole call


@torch.no_grad()
def importance(
    old_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    calls_T: Tensor,
    sampling: ImportanceSampling | None,
    guard: float | None,
) -> Importance:
    """Weights ``w = π_old / μ``, bounded as `sampling` says.

    - ``truncated``: ``min(w, high)`` (fengyao.notion.site/off-policy-rl; Espeholt et al., arXiv
      1802.01561).
    - ``icepop``: ``w`` within ``[low, high]``, else 0 (arXiv 2510.18855).
    - ``sequence_mask``: the product of w over the call for each of its tokens, 0 outside of the
      bounds (richardli.xyz/rl-collapse).
    - None: 1.

    Then the guard: 0 for calls whose geometric mean ``exp(mean log w)`` is not within
    ``[1/guard, guard]``. Its mean does not depend on the call's length, its noise does: at a gap of
    0.05 nats, bounds of 1 % (verl, SkyRL) would exclude half of all calls of ten tokens. Hence the
    wide default.

    Tokens of weight 0 stay in the loss's denominator: the fewer are left, the smaller the step.

    Args:
        old_logprobs_T: the learner's before the first update, in nats.
        sampler_logprobs_T: recorded when the tokens were drawn.
        calls_T: integers, equal for the tokens of one call; a call's tokens are all here.
        sampling: the correction and its bounds.
        guard: above 1; None: no call is excluded.
    """
    gap_T = old_logprobs_T - sampler_logprobs_T
    log_T = call_sums(gap_T, calls_T) if isinstance(sampling, SequenceMask) else gap_T
    weights_T = log_T.exp() if sampling else torch.ones_like(log_T)
    limited_T = torch.zeros_like(log_T, dtype=torch.bool)
    if isinstance(sampling, TruncatedIS):
        limited_T = weights_T > sampling.high
        weights_T = weights_T.clamp(max=sampling.high)
    elif sampling is not None:
        limited_T = (weights_T < (sampling.low or 0.0)) | (weights_T > sampling.high)
        weights_T = weights_T.masked_fill(limited_T, 0.0)
    guarded_T = torch.zeros_like(limited_T)
    if guard is not None:
        guarded_T = call_means(gap_T, calls_T).abs() > math.log(guard)
    return Importance(weights_T.masked_fill(guarded_T, 0.0), limited_T, guarded_T)
