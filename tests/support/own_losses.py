"""Losses as an operator would register them: built-in ones again, and some that break a promise."""

import torch
from torch import Tensor

from langchain_art_server.algorithms.loss import token_losses
from langchain_art_server.losses import LossTokens, TokenLoss


def clipped(tokens: LossTokens, low: float = 0.2, high: float = 0.28) -> TokenLoss:
    """`ClippedRatio`."""
    return token_losses.clip_loss(
        tokens.logprobs, tokens.old_logprobs, tokens.advantages, low, high, dual_clip=3.0
    )


def by_call(tokens: LossTokens) -> TokenLoss:
    """`GSPO`, with wide bounds."""
    columns = tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.calls
    return token_losses.gspo_loss(*columns, 0.2, 0.28)


def weighted(tokens: LossTokens) -> TokenLoss:
    """`CISPO`."""
    columns = tokens.logprobs, tokens.old_logprobs, tokens.advantages
    return token_losses.cispo_loss(*columns, 1.0, 4.0)


def bounded(tokens: LossTokens) -> TokenLoss:
    """`DPPOTV`."""
    columns = tokens.logprobs, tokens.sampler_logprobs, tokens.advantages
    return token_losses.dppo_tv_loss(*columns, 0.2, 0.2)


def imitating(tokens: LossTokens) -> Tensor:
    """No policy gradient: the better half of the calls is imitated."""
    return -tokens.logprobs * (tokens.advantages > 0)


# --- broken ones ----------------------------------------------------------------------------------


def summed(tokens: LossTokens) -> Tensor:
    return -(tokens.logprobs * tokens.advantages).sum()


def in_half(tokens: LossTokens) -> Tensor:
    return (-tokens.logprobs * tokens.advantages).half()


def overflowing(tokens: LossTokens) -> Tensor:
    far = 40 * (tokens.logprobs - tokens.sampler_logprobs)
    return -far.exp() * tokens.advantages


def drawing(tokens: LossTokens) -> Tensor:
    return -tokens.logprobs * tokens.advantages * torch.rand(len(tokens.calls))


def changing(tokens: LossTokens) -> Tensor:
    tokens.advantages.sub_(0.1)
    return -tokens.logprobs * tokens.advantages


def by_place(tokens: LossTokens) -> Tensor:
    return -tokens.logprobs * tokens.advantages * torch.arange(len(tokens.calls))


def over_the_batch(tokens: LossTokens) -> Tensor:
    return -tokens.logprobs * (tokens.advantages - tokens.advantages.mean())


def detached(tokens: LossTokens) -> Tensor:
    return -tokens.logprobs.detach() * tokens.advantages


def upside_down(tokens: LossTokens) -> Tensor:
    return tokens.logprobs * tokens.advantages


def against_the_mean(tokens: LossTokens) -> Tensor:
    return -(tokens.logprobs - tokens.logprobs.mean()) * tokens.advantages
