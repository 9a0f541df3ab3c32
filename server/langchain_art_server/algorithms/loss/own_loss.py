"""A loss that the operator of a server has registered: ``[losses] NAME = "MODULE:FUNCTION"``.

The function comes from a package that is installed beside the learner. Clients name it, and send
numbers for its options; no code of theirs is run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import OwnLoss
from langchain_art_server.algorithms.loss.token_losses import TokenLoss


@dataclass(frozen=True)
class LossTokens:
    """The trained tokens of a micro-batch, laid end to end: T of them, and no others.

    There is no padding and no mask: prompts and what is excluded are not among them. All tokens of
    a call are here together; which calls are in one micro-batch, and in which order, means nothing.
    Logprobs are in nats, of the call's temperature and over the tokens that could be drawn. All
    tensors have the shape [T] and the floating dtype of `logprobs`, but for `calls`.
    """

    logprobs: Tensor
    """The learner's now, log π. The only one that carries the gradient."""
    old_logprobs: Tensor
    """The learner's before the first update on this batch: log π_old. Equal in that update."""
    sampler_logprobs: Tensor
    """The behaviour policy's, log μ: recorded when the tokens were drawn."""
    reference_logprobs: Tensor | None
    """Logprobs of `TrainConfig.kl`'s reference or of the teacher; None without these."""
    advantages: Tensor
    """Advantages, without a unit."""
    calls: Tensor
    """int64, equal for the tokens of one call and of no other."""


LossFunction: TypeAlias = Callable[..., Tensor | TokenLoss]
"""Takes `LossTokens`, and as keyword arguments the numbers of `OwnLoss.options`; gives the loss of
each token, [T], to be minimised; or a `TokenLoss`, which says where bounds acted, too.

It is not weighted: aggregation, importance sampling, the guard, the KL penalty and the entropy
bonus are the step's, as with every loss.
"""


def load_losses(named: Mapping[str, str]) -> dict[str, LossFunction]:
    """The functions that ``MODULE:FUNCTION`` name. Raises ConfigError if one is not there."""
    losses: dict[str, LossFunction] = {}
    for name, where in named.items():
        module, _, function = where.partition(":")
        try:
            found: Any = getattr(importlib.import_module(module), function)
        except Exception as error:
            raise ConfigError(
                f"[losses] {name} = {where!r} cannot be imported where the learner runs: "
                f"{type(error).__name__}: {error}. Install its package there."
            ) from error
        if not callable(found):
            raise ConfigError(f"[losses] {name} = {where!r} is {found!r:.200}, expected a function")
        losses[name] = cast("LossFunction", found)
    return losses


def own_token_loss(
    losses: Mapping[str, LossFunction], chosen: OwnLoss, tokens: LossTokens
) -> TokenLoss:
    """Losses by the registered function, checked.

    Raises:
        ConfigError: there is none of this name, or it takes no such options.
        ArtError: what it gave is no loss for each token.
    """
    if chosen.name not in losses:
        raise ConfigError(f"got the loss {chosen.name!r}, expected one of {sorted(losses)}")
    function = losses[chosen.name]
    try:
        inspect.signature(function).bind(tokens, **chosen.options)
    except TypeError as error:
        raise ConfigError(
            f"got options={chosen.options} for the loss {chosen.name!r}, expected those of "
            f"{inspect.signature(function)}: {error}"
        ) from error
    return as_token_loss(function(tokens, **chosen.options), tokens, chosen.name)


def as_token_loss(found: object, tokens: LossTokens, name: str) -> TokenLoss:
    """`found` with no bounds where it names none; or ArtError if it has another shape or dtype."""
    wanted = tokens.logprobs
    if isinstance(found, TokenLoss):
        given = found
    elif isinstance(found, Tensor):
        nowhere_T = torch.zeros_like(wanted, dtype=torch.bool)
        given = TokenLoss(found, nowhere_T, nowhere_T)
    else:
        raise ArtError(f"The loss {name!r} gave {found!r:.200}, expected a tensor or a TokenLoss.")
    for part, dtype in zip(given, (wanted.dtype, torch.bool, torch.bool), strict=True):
        if part.shape != wanted.shape or part.dtype != dtype:
            raise ArtError(
                f"The loss {name!r} gave {part.dtype} of shape {list(part.shape)}, expected "
                f"{dtype} of shape {list(wanted.shape)}: one for each token."
            )
    return given
