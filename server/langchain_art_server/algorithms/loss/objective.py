"""The objective of a step: the sum of its tokens' weighted losses, and statistics. Torch only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from langchain_art.errors import ConfigError
from langchain_art.wire import CISPO, DPPOTV, GSPO, JobConfig, Loss, SFTConfig
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

    A token that several runs share goes through the model once and has one entry per run. All
    tokens of a call are in one micro-batch.

    Attributes:
        logprobs_T: the learner's, in nats; carries the gradient.
        old_logprobs_T: the learner's before the first update on this batch.
        sampler_logprobs_T: recorded when the tokens were drawn.
        advantages_T: without a unit.
        weights_T: of the token in the step's loss (`loss_weights.call_weights`).
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


def objective(terms: LossTerms, config: JobConfig) -> tuple[Tensor, LossStats]:
    """A micro-batch's part of the step's loss, and its statistics.

    ``Σ_t weight_t w_t (l_t + coefficient kl_t)``: l from `token_losses`, w from
    `importance_sampling`, kl from `kl`. Parts of micro-batches add up to the loss of the step,
    whatever the split.

    Args:
        terms: of the micro-batch.
        config: reads `loss`, `kl` and `guard`.

    Returns:
        A scalar to be minimised, and sums to be added.

    Raises:
        ConfigError: `config.kl` is set and the base model's logprobs are missing.
    """
    if isinstance(config, SFTConfig):  # no sampler drew these tokens: there is no gap to one
        terms = replace(terms, sampler_logprobs_T=terms.old_logprobs_T)
        found, sampling, guard, kl = sft_loss(terms.logprobs_T), None, None, None
    else:
        found, guard, kl = _token_loss(terms, config.loss), config.guard, config.kl
        loss = config.loss
        sampling = None if isinstance(loss, DPPOTV) else loss.importance_sampling
    weighed = importance(
        terms.old_logprobs_T, terms.sampler_logprobs_T, terms.calls_T, sampling, guard
    )
    loss_T = found.loss_T
    if kl is not None:
        if terms.base_logprobs_T is None:
            raise ConfigError(f"got {kl!r}, but no logprobs of the base model")
        loss_T = loss_T + kl.coefficient * kl_penalty(
            terms.logprobs_T, terms.base_logprobs_T, terms.old_logprobs_T, kl.estimator
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


def _token_loss(terms: LossTerms, loss: Loss) -> TokenLoss:
    new_T, old_T, advantages_T = terms.logprobs_T, terms.old_logprobs_T, terms.advantages_T
    low, high = loss.clip_low, loss.clip_high
    if isinstance(loss, GSPO):
        return gspo_loss(new_T, old_T, advantages_T, terms.calls_T, low, high)
    if isinstance(loss, CISPO):
        return cispo_loss(new_T, old_T, advantages_T, low, high)
    if isinstance(loss, DPPOTV):
        return dppo_tv_loss(new_T, terms.sampler_logprobs_T, advantages_T, low, high)
    return clip_loss(new_T, old_T, advantages_T, low, high, loss.dual_clip)
