"""The loss of a step: its tokens' weighted losses, added up over micro-batches. Torch only.

Index suffixes: N all trained tokens of the step, T those of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from torch import Tensor

from langchain_art.errors import ConfigError
from langchain_art.wire import CISPO, DPPOTV, GSPO, OwnLoss, SFTConfig, StepConfig
from langchain_art.wire.choices import BuiltInLoss
from langchain_art_server.algorithms.loss.importance_sampling import importance
from langchain_art_server.algorithms.loss.loss_stats import LossStats, loss_stats
from langchain_art_server.algorithms.loss.own_loss import LossFunction, LossTokens, own_token_loss
from langchain_art_server.algorithms.loss.token_losses import (
    TokenLoss,
    cispo_loss,
    clip_loss,
    dppo_tv_loss,
    entropy_penalty,
    gspo_loss,
    kl_penalty,
    sft_loss,
)


@dataclass(frozen=True)
class TrainedTokens:
    """Known data of trained tokens before the forward pass: one entry per token of each run.

    A token that several runs share goes through the model once and has one entry per run.
    """

    sampler_logprobs: Tensor  # recorded when the tokens were drawn, in nats
    advantages: Tensor  # without a unit
    weights: Tensor  # of the token in the step's loss (`loss_weights.call_weights`)
    calls: Tensor  # integers, equal for the tokens of one call

    def at(self, places_T: Tensor) -> TrainedTokens:
        """Some of the tokens."""
        return TrainedTokens(*(getattr(self, field.name)[places_T] for field in fields(self)))


def objective(
    tokens: TrainedTokens,
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    reference_logprobs_T: Tensor | None,
    config: StepConfig,
    losses: Mapping[str, LossFunction] = MappingProxyType({}),
) -> tuple[Tensor, LossStats]:
    """A micro-batch's part of the step's loss, and its statistics.

    ``Σ_t weight_t w_t (l_t + coefficient kl_t + entropy_bonus e_t)``, to be minimised: l, kl and e
    from `token_losses`, w from `importance_sampling`. Parts of micro-batches add up to the loss of
    the step, whatever the split.

    Args:
        tokens: of the micro-batch, with all tokens of each call.
        logprobs_T: the learner's, in nats; carries the gradient.
        old_logprobs_T: the learner's before the first update on this batch.
        reference_logprobs_T: those of the reference of `TrainConfig.divergence`; None without it.
        config: reads `loss`, `divergence`, `entropy_bonus` and `guard`.
        losses: the registered ones by name, of which `OwnLoss` names one.

    Raises:
        ConfigError: `config.divergence` is set and the reference's logprobs are missing; or a
            registered loss is not there or takes no such options.
        ArtError: a registered loss did not give one number for each token.
    """
    sampler_T = tokens.sampler_logprobs
    if isinstance(config, SFTConfig):  # no sampler drew these tokens: there is no gap to one
        sampler_T = old_logprobs_T
        found, sampling, guard, kl, bonus = sft_loss(logprobs_T), None, None, None, 0.0
    else:
        if isinstance(config.loss, OwnLoss):
            given = LossTokens(
                logprobs=logprobs_T,
                old_logprobs=old_logprobs_T,
                sampler_logprobs=sampler_T,
                reference_logprobs=reference_logprobs_T,
                advantages=tokens.advantages,
                calls=tokens.calls,
            )
            found = own_token_loss(losses, config.loss, given)
        else:
            found = _token_loss(tokens, logprobs_T, old_logprobs_T, config.loss)
        loss, guard, kl, bonus = config.loss, config.guard, config.divergence, config.entropy_bonus
        sampling = None if isinstance(loss, DPPOTV) else loss.importance_sampling
    weighed = importance(old_logprobs_T, sampler_T, tokens.calls, sampling, guard)
    loss_T = found.loss_T
    if kl is not None:
        if reference_logprobs_T is None:
            raise ConfigError(f"got {kl!r}, but no logprobs of the reference")
        penalty_T = kl_penalty(logprobs_T, reference_logprobs_T, old_logprobs_T, kl.estimator)
        loss_T = loss_T + kl.coefficient * penalty_T
    if bonus:
        loss_T = loss_T + bonus * entropy_penalty(logprobs_T, old_logprobs_T)
    stats = loss_stats(logprobs_T, old_logprobs_T, sampler_T, reference_logprobs_T, found, weighed)
    return (tokens.weights * weighed.weights_T * loss_T).sum(), stats


def _token_loss(
    tokens: TrainedTokens, new_T: Tensor, old_T: Tensor, loss: BuiltInLoss
) -> TokenLoss:
    advantages_T, low, high = tokens.advantages, loss.clip_low, loss.clip_high
    if isinstance(loss, GSPO):
        return gspo_loss(new_T, old_T, advantages_T, tokens.calls, low, high)
    if isinstance(loss, CISPO):
        return cispo_loss(new_T, old_T, advantages_T, low, high)
    if isinstance(loss, DPPOTV):
        return dppo_tv_loss(new_T, tokens.sampler_logprobs, advantages_T, low, high)
    return clip_loss(new_T, old_T, advantages_T, low, high, loss.dual_clip)


class StepLoss:
    """Adds up the loss and the statistics of a step as the model computes its logprobs.

    Every update visits each token once, in any order and split, all tokens of a call together. The
    logprobs of the first update are also π_old: they need no forward pass of their own.
    """

    def __init__(
        self,
        tokens: TrainedTokens,
        config: StepConfig,
        losses: Mapping[str, LossFunction] = MappingProxyType({}),
    ) -> None:
        self.tokens, self._config, self._losses = tokens, config, losses
        self._updates = 0
        self.loss, self.stats = 0.0, LossStats()  # of the current update so far
        #: The learner's before the first update, as far as they were visited.
        self.old_logprobs_N = torch.full_like(tokens.sampler_logprobs, float("nan"))
        #: To be set before the first visit for `TrainConfig.divergence`.
        self.reference_logprobs_N: Tensor | None = None

    def begin_update(self) -> None:
        """Prepare a pass over the tokens; called before each."""
        self._updates += 1
        self.loss, self.stats = 0.0, LossStats()

    def visit(self, logprobs_T: Tensor, places_T: Tensor) -> Tensor:
        """Add the learner's logprobs of the tokens at `places_T`; gives their part of the loss."""
        if self._updates == 1:
            self.old_logprobs_N[places_T] = logprobs_T.detach()
        base_T = None if self.reference_logprobs_N is None else self.reference_logprobs_N[places_T]
        old_T, tokens = self.old_logprobs_N[places_T], self.tokens.at(places_T)
        loss, stats = objective(tokens, logprobs_T, old_T, base_T, self._config, self._losses)
        self.loss += loss.item()
        self.stats += stats
        return loss
