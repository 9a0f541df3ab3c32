"""Recomputation of norms and gated MLPs in the backward pass. Child side only.

Norms compute in float32 and keep their input in it; a gated MLP keeps four tensors of its inner
width, of which two are products of the others. Both are a small part of a step's time and most of
its memory. Here a norm keeps its input as it came, and an MLP that of the norm before it and the
outputs of its first two projections; the rest is computed again by the same functions from the same
numbers. Matrix products are kept: unlike gradient checkpointing, no layer runs twice.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

#: The gated MLP of transformers: with it, `_mlp` is the same function.
GATED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"

#: Attribute of a norm's output: the function that makes it again.
AGAIN = "_langchain_art_again"


class Recompute:
    """Makes a model's norms and MLPs compute again what they do not keep, while `on`."""

    def __init__(self, model: nn.Module) -> None:
        self.on = False
        for module in model.modules():
            if "forward" in vars(module):
                continue  # somebody else's
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(self._norm, module)
            elif _is_gated(module):
                module.forward = partial(self._mlp, module)

    def _norm(self, norm: Any, x: Tensor, *more: Any) -> Tensor:
        forward = partial(type(norm).forward, norm)
        if more or not self._keeps(x):
            return forward(x, *more)
        made = _Again.apply(forward, x)
        setattr(made, AGAIN, partial(forward, x.detach()))
        return made

    def _mlp(self, mlp: Any, x: Tensor) -> Tensor:
        if not self._keeps(x):
            return type(mlp).forward(mlp, x)
        again = getattr(x, AGAIN, None)
        with _instead(x, again) if again else contextlib.nullcontext():
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        gated = partial(_gated, mlp.act_fn)
        inner = _Again.apply(gated, gate, up)
        with _instead(inner, partial(gated, gate.detach(), up.detach())):
            return mlp.down_proj(inner)

    def _keeps(self, x: Tensor) -> bool:
        """True if a plain call would keep something for the backward pass."""
        return self.on and torch.is_grad_enabled() and x.requires_grad


def _instead(tensor: Tensor, again: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Keep the function that makes a tensor again, wherever that tensor would be kept."""
    place, size = tensor.data_ptr(), tensor.numel()

    def pack(kept: Tensor) -> Any:
        return kept.shape if kept.data_ptr() == place and kept.numel() == size else kept

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return again().view(kept)

    return saved_tensors_hooks(pack, unpack)


def _gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


def _is_gated(module: nn.Module) -> bool:
    try:
        return GATED in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False  # it has no source


class _Again(torch.autograd.Function):
    """A function of tensors that keeps its inputs alone, and runs once more for its gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's doing
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return (None, *torch.autograd.grad(output, inputs, grads))
