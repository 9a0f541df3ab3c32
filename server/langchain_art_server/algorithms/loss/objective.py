"""What a step minimises: weighed losses of tokens, and what they say of the step. Torch only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from langchain_art.errors import ConfigError
from langchain_art.wire import TrainConfig
from langchain_art_server.algorithms.loss.importance_sampling import importance
from langchain_art_server.algorithms.loss.kl import kl_penalty
from langchain_art_server.algorithms.loss.loss_stats import LossStats, loss_stats
from langchain_art_server.algorithms.loss.token_losses import (
    TokenLoss,
    cispo_loss,
    clip_loss,
    dppo_tv_loss,
    gspo_loss,
    sft_loss,
)


@dataclass(frozen=True)
class LossTerms:
    """The trained tokens of a micro-batch: one entry for each token of each run.

    Where runs share a token, it stands once in the model and here once for each of them. All
    tokens of a call are in one micro-batch.

    Attributes:
        logprobs_T: the learner's, in nats; carries the gradient.
        old_logprobs_T: the learner's before the first update on this batch.
        sampler_logprobs_T: recorded when the tokens were drawn.
        advantages_T: without a unit.
        weights_T: of the token in the step's loss (`aggregation.call_weights`).
        calls_T: integers, equal for the tokens of one call.
        base_logprobs_T: the base model's; only read for `TrainConfig.kl`.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    sampler_logprobs_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    calls_T: Tensor
    base_logprobs_T: Tensor | None = None


def objective(terms: LossTerms, config: TrainConfig) -> tuple[Tensor, LossStats]:
    """The part of a step's loss that falls to a micro-batch, and its stats.

    ``Σ_t weight_t w_t (l_t + kl_coefficient kl_t)``: l from `loss`, w from `mismatch`, kl from
    `kl`. Parts of micro-batches add up to the loss of the step, whatever the split.

    Args:
        terms: tokens.
        config: reads `loss`, `clip_low`, `clip_high`, `dual_clip`, `kl`, `kl_coefficient` and what
            `importance` reads.

    Returns:
        A scalar to be minimised, and sums to be added.

    Raises:
        ConfigError: `config.kl` is set and the base model's logprobs are missing.
    """
    if config.loss == "sft":  # nobody drew these tokens: there is no sampler to be apart from
        terms = replace(terms, sampler_logprobs_T=terms.old_logprobs_T)
    found = _token_loss(terms, config)
    weighed = importance(terms.old_logprobs_T, terms.sampler_logprobs_T, terms.calls_T, config)
    loss_T = found.loss_T
    if config.kl is not None:
        if terms.base_logprobs_T is None:
            raise ConfigError(f"got kl={config.kl!r}, but no logprobs of the base model")
        loss_T = loss_T + config.kl_coefficient * kl_penalty(
            terms.logprobs_T, terms.base_logprobs_T, terms.old_logprobs_T, config.kl
        )
    stats = loss_stats(
        terms.logprobs_T,
        terms.old_logprobs_T,
        terms.sampler_logprobs_T,
        terms.base_logprobs_T,
        found,
        weighed,
    )
    return (terms.weights_T * weighed.weights_T * loss_T).sum(), stats


def _token_loss(terms: LossTerms, config: TrainConfig) -> TokenLoss:
    if config.loss == "sft":
        return sft_loss(terms.logprobs_T)
    new_T, old_T, advantages_T = terms.logprobs_T, terms.old_logprobs_T, terms.advantages_T
    low, high = config.clip_low, config.clip_high
    if config.loss == "gspo":
        return gspo_loss(new_T, old_T, advantages_T, terms.calls_T, low, high)
    if config.loss == "cispo":
        return cispo_loss(new_T, old_T, advantages_T, low, high)
    if config.loss == "dppo_tv":
        return dppo_tv_loss(new_T, terms.sampler_logprobs_T, advantages_T, low, high)
    return clip_loss(new_T, old_T, advantages_T, low, high, config.dual_clip)
