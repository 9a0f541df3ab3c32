"""Losses of your own: the types of `LossFunction`, and `check_loss`, which tests one.

Register a function in the server's settings, ``[losses] NAME = "MODULE:FUNCTION"``, and name it in
``TrainConfig(loss=NAME)``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from langchain_art.wire import OwnLoss, TrainConfig
from langchain_art_server.algorithms.loss.objective import TrainedTokens, objective
from langchain_art_server.algorithms.loss.own_loss import LossFunction, LossTokens, as_token_loss
from langchain_art_server.algorithms.loss.token_losses import TokenLoss, call_means, call_sums

__all__ = ["LossFunction", "LossTokens", "TokenLoss", "call_means", "call_sums", "check_loss"]

#: Relative and absolute tolerance in float64, where additions may be in another order.
_RTOL, _ATOL = 1e-9, 1e-12
#: Standard deviations, in nats, of π_old against π, and of μ against π_old.
_ON_POLICY, _USUAL, _FAR = (0.0, 0.0), (0.3, 0.1), (12.0, 12.0)


def check_loss(function: LossFunction, *, policy_gradient: bool = False, **options: float) -> None:
    """Test what every loss has to keep, on random tokens; for a test of yours.

    - One loss for each token, with the shape and dtype of the logprobs, on 1 to 40 tokens.
    - Loss and gradient are finite, on policy, near it and 12 nats away, in float32 and float64.
    - The same tokens give the same bits, and the tensors that it was given are not changed.
    - Order: tokens in another order, with other numbers for the calls, give the same losses.
    - Mask: tokens of excluded calls (weight 0) get no gradient, those of others included.
    - Packing: calls in micro-batches of their own give the same losses and gradients as together.

    Args:
        function: as registered.
        policy_gradient: that it claims to be a policy gradient: on policy, where π = π_old = μ, the
            gradient of the sum is minus the advantage at each token of a call of one advantage.
        **options: what the function is called with beside the tokens.

    Raises:
        AssertionError: with the promise that is broken, and numbers.

    Example::

        def test_my_loss():
            check_loss(my_loss, policy_gradient=True, bound=0.2)
    """
    for seed in range(8):
        for spread in (_ON_POLICY, _USUAL, _FAR):
            for dtype in (torch.float32, torch.float64):
                _finite(function, options, _drawn(seed, spread, dtype))
        tokens = _drawn(seed, _USUAL, torch.float64)
        _pure(function, options, tokens)
        _order(function, options, tokens, seed)
        _mask(function, options, tokens)
        _packing(function, options, tokens)
        if policy_gradient:
            _policy_gradient(function, options, _drawn(seed, _ON_POLICY, torch.float64))


def _drawn(seed: int, spread: tuple[float, float], dtype: torch.dtype) -> LossTokens:
    """Calls of one to eight tokens; the first seed has a single token."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 8) for _ in range(5)] if seed else [1]
    new = [-rng.uniform(0.01, 6) for _ in range(sum(lengths))]
    old = [min(-1e-3, one + rng.gauss(0, spread[0])) for one in new] if spread[0] else new
    sampler = [min(-1e-3, one + rng.gauss(0, spread[1])) for one in old] if spread[1] else old
    worth = [rng.choice([0.0, rng.gauss(0, 2)]) if seed > 1 else 1.0 for _ in lengths]

    def tensor(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return LossTokens(
        logprobs=tensor(new).requires_grad_(),
        old_logprobs=tensor(old),
        sampler_logprobs=tensor(sampler),
        reference_logprobs=tensor([-rng.uniform(0.01, 6) for _ in new]),
        advantages=tensor([a for a, n in zip(worth, lengths, strict=True) for _ in range(n)]),
        calls=torch.tensor([k for k, n in enumerate(lengths) for _ in range(n)]),
    )


def _at(tokens: LossTokens, places: Tensor) -> LossTokens:
    columns: dict[str, Any] = {one.name: getattr(tokens, one.name) for one in fields(tokens)}
    found = LossTokens(**{name: column.detach()[places] for name, column in columns.items()})
    return replace(found, logprobs=found.logprobs.requires_grad_())


def _of(
    function: LossFunction, options: dict[str, float], tokens: LossTokens
) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their sum."""
    loss_T = as_token_loss(function(tokens, **options), tokens, _name(function)).loss_T
    assert loss_T.requires_grad, f"{_name(function)}: got losses without a gradient to the logprobs"
    (slope_T,) = torch.autograd.grad(loss_T.sum(), tokens.logprobs)
    return loss_T.detach(), slope_T


def _name(function: LossFunction) -> str:
    return getattr(function, "__name__", repr(function))


def _finite(function: LossFunction, options: dict[str, float], tokens: LossTokens) -> None:
    for kind, found_T in zip(("loss", "gradient"), _of(function, options, tokens), strict=True):
        if not (fine_T := found_T.isfinite()).all():
            t = int((~fine_T).nonzero()[0])
            at = {
                one.name: getattr(tokens, one.name)[t].item()
                for one in fields(tokens)
                if getattr(tokens, one.name) is not None
            }
            raise AssertionError(f"finite: got the {kind} {found_T[t].item()} at {at}")


def _pure(function: LossFunction, options: dict[str, float], tokens: LossTokens) -> None:
    columns = [getattr(tokens, one.name) for one in fields(tokens)]
    before = [one.detach().clone() for one in columns]
    first, again = _of(function, options, tokens), _of(function, options, tokens)
    assert all(torch.equal(a, b) for a, b in zip(columns, before, strict=True)), (
        "pure: the function has changed the tensors that it was given"
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), (
        "pure: the same tokens gave other losses the second time"
    )


def _order(
    function: LossFunction, options: dict[str, float], tokens: LossTokens, seed: int
) -> None:
    places = torch.randperm(len(tokens.calls), generator=torch.Generator().manual_seed(seed))
    moved = _at(tokens, places)
    moved = replace(moved, calls=1_000 - 7 * moved.calls)
    _same("order", _of(function, options, moved), _of(function, options, tokens), places)


def _packing(function: LossFunction, options: dict[str, float], tokens: LossTokens) -> None:
    whole = _of(function, options, tokens)
    for call in tokens.calls.unique():
        places = (tokens.calls == call).nonzero().squeeze(1)
        _same("packing", _of(function, options, _at(tokens, places)), whole, places)


def _same(
    promise: str, got: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], places: Tensor
) -> None:
    for kind, mine_T, all_T in zip(("losses", "gradients"), got, whole, strict=True):
        assert torch.allclose(mine_T, all_T[places], rtol=_RTOL, atol=_ATOL), (
            f"{promise}: got the {kind} {mine_T.tolist()}, and {all_T[places].tolist()} for the "
            "same tokens in one micro-batch with others"
        )


def _mask(function: LossFunction, options: dict[str, float], tokens: LossTokens) -> None:
    """The guard excludes calls that another model must have sampled; all others stay."""
    strange_T = tokens.calls == tokens.calls.max()
    sampler_T = torch.where(strange_T, tokens.sampler_logprobs - 10, tokens.old_logprobs)
    given = TrainedTokens(
        sampler_logprobs=sampler_T,
        advantages=tokens.advantages,
        weights=torch.ones_like(tokens.advantages),
        calls=tokens.calls,
    )
    config = TrainConfig(loss=OwnLoss(name="checked", options=options), guard=1.25)
    reference_T = tokens.reference_logprobs
    columns = (tokens.logprobs, tokens.old_logprobs, reference_T)
    loss, _ = objective(given, *columns, config, {"checked": function})
    (slope_T,) = torch.autograd.grad(loss, tokens.logprobs)
    assert not slope_T[strange_T].any(), (
        f"mask: got the gradient {slope_T[strange_T].tolist()} at excluded tokens, expected 0"
    )


def _policy_gradient(function: LossFunction, options: dict[str, float], tokens: LossTokens) -> None:
    _, slope_T = _of(function, options, tokens)
    assert torch.allclose(slope_T, -tokens.advantages, rtol=_RTOL, atol=_ATOL), (
        f"policy gradient: got {slope_T.tolist()} on policy, expected minus the advantages, "
        f"{(-tokens.advantages).tolist()}"
    )
