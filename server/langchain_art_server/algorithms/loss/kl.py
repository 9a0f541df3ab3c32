"""KL divergence from the base model, estimated per token. Torch and nothing else."""

from __future__ import annotations

from torch import Tensor


def kl_penalty(
    logprobs_T: Tensor, base_logprobs_T: Tensor, old_logprobs_T: Tensor, kind: str
) -> Tensor:
    """An estimate of KL(π ‖ base) for each token whose gradient is that of the divergence.

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

    Args:
        logprobs_T: the learner's, in nats; carries the gradient.
        base_logprobs_T: the base model's of the same tokens, at the same temperature.
        old_logprobs_T: the learner's before the first update on this batch.
        kind: ``k1``, ``k2`` or ``k3``.

    Returns:
        (T), in nats, to be minimised.
    """
    d_T = logprobs_T - base_logprobs_T
    ratio_T = (logprobs_T - old_logprobs_T).exp()
    if kind == "k1":
        return ratio_T * d_T
    if kind == "k2":
        return ratio_T.detach() * d_T.square() / 2
    return ratio_T * ((-d_T).expm1() + d_T)
