"""Direct preference optimization (DPO): from log-probabilities of pairs to weights of tokens.

The loss of a pair is ``-log sigmoid(m)`` with the margin ``m = beta ((w - w_ref) - (l - l_ref))``;
``w`` and ``l`` are the policy's log-probabilities of the chosen and of the rejected reply, summed
over their tokens, ``_ref`` those of the base model (arXiv 2305.18290, eq. 7). Its gradient is

    -beta sigmoid(-m) (∇w - ∇l)

so at the weights before the step it is that of ``Σ_t weight_t (-logprob_t)``, with
``beta sigmoid(-m) / pairs`` as the weight of each chosen token, and minus that of each rejected
one. No pair has to be in one micro-batch, or on one rank. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of the replies of one pair, in nats, summed over their tokens."""

    chosen: float
    rejected: float
    base_chosen: float
    base_rejected: float

    def margin(self, beta: float) -> float:
        """``m`` above, without a unit."""
        return beta * (self.chosen - self.base_chosen - self.rejected + self.base_rejected)


@dataclass(frozen=True)
class PreferenceWeights:
    """The step's loss before it, and the weight of the tokens of each pair's chosen reply."""

    loss: float
    weights: list[float]
    metrics: dict[str, float]
    """``preference_loss``; ``preference_margin``, the mean of m; ``preference_accuracy``, the
    fraction of pairs with m above 0, and ``preference_order``, of those whose chosen reply is the
    likelier one; mean logprobs of both kinds of replies, in nats."""


def preference_weights(pairs: Sequence[PairLogprobs], beta: float) -> PreferenceWeights:
    """See the module. `pairs` has at least one."""
    margins = [pair.margin(beta) for pair in pairs]
    loss = fmean(_softplus(-margin) for margin in margins)
    return PreferenceWeights(
        loss=loss,
        weights=[beta * _sigmoid(-margin) / len(pairs) for margin in margins],
        metrics={
            "preference_loss": loss,
            "preference_margin": fmean(margins),
            "preference_accuracy": fmean(float(margin > 0) for margin in margins),
            "preference_order": fmean(float(pair.chosen > pair.rejected) for pair in pairs),
            "chosen_logprob": fmean(pair.chosen for pair in pairs),
            "rejected_logprob": fmean(pair.rejected for pair in pairs),
        },
    )


def _softplus(x: float) -> float:
    """``log(1 + exp(x))``, which does not overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))
