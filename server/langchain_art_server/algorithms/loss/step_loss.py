"""The loss of one step, micro-batch by micro-batch, over all its updates. Torch only.

Index suffixes: N all trained tokens of the step, T those of one micro-batch (a visit).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from langchain_art.wire import JobConfig
from langchain_art_server.algorithms.loss.loss_stats import LossStats
from langchain_art_server.algorithms.loss.objective import LossTerms, objective


@dataclass(frozen=True)
class StepTokens:
    """All trained tokens of a step, before the forward pass.

    Attributes:
        sampler_logprobs_N: recorded when the tokens were drawn, in nats.
        advantages_N: without a unit.
        weights_N: of the token in the loss.
        calls_N: integers, equal for the tokens of one call.
    """

    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    calls_N: Tensor


class StepLoss:
    """Adds up the loss and the statistics of a step as the model computes its logprobs.

    Every update visits each token once, in any order and split, all tokens of a call together. The
    logprobs of the first update are also π_old: they need no forward pass of their own.

    Args:
        tokens: of the whole step.
        config: see `objective`.

    Attributes:
        loss: of the current update so far.
        stats: of the current update so far.
        old_logprobs_N: the learner's before the first update, as far as they were visited.
        base_logprobs_N: the base model's; to be set before the first visit for `TrainConfig.kl`.
    """

    def __init__(self, tokens: StepTokens, config: JobConfig) -> None:
        self._tokens, self._config = tokens, config
        self._updates = 0
        self.loss, self.stats = 0.0, LossStats()
        self.old_logprobs_N = torch.full_like(tokens.sampler_logprobs_N, float("nan"))
        self.base_logprobs_N: Tensor | None = None

    @property
    def tokens(self) -> StepTokens:
        """All trained tokens of the step."""
        return self._tokens

    def begin_update(self) -> None:
        """Before each pass over the tokens."""
        self._updates += 1
        self.loss, self.stats = 0.0, LossStats()

    def visit(self, logprobs_T: Tensor, places_T: Tensor) -> Tensor:
        """Add some tokens; returns their part of the loss.

        Args:
            logprobs_T: the learner's, in nats; carries the gradient.
            places_T: their indices among the step's tokens.
        """
        if self._updates == 1:
            self.old_logprobs_N[places_T] = logprobs_T.detach()
        base_N, tokens = self.base_logprobs_N, self._tokens
        loss, stats = objective(
            LossTerms(
                logprobs_T=logprobs_T,
                old_logprobs_T=self.old_logprobs_N[places_T],
                sampler_logprobs_T=tokens.sampler_logprobs_N[places_T],
                advantages_T=tokens.advantages_N[places_T],
                weights_T=tokens.weights_N[places_T],
                calls_T=tokens.calls_N[places_T],
                base_logprobs_T=None if base_N is None else base_N[places_T],
            ),
            self._config,
        )
        self.loss += loss.item()
        self.stats += stats
        return loss
