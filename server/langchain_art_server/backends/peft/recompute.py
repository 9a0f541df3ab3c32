"""Recomputation of norms and gated MLPs in the backward pass. Child side only.

Norms compute in float32 and keep their input in it; a gated MLP keeps four tensors of its inner
width, of which two are products of the others. Both are a small part of a step's time and most of
its memory. Here a norm keeps its input as it came, attention and an MLP that of the norm before
them, and an MLP the outputs of its first two projections; the rest is computed again, once, by the
same functions from the same numbers. So are queries and keys that have norms of their own, in a
forest (`Turned`). Matrix products are kept: unlike gradient checkpointing, no layer runs twice.

In 16 bits a norm of Llama's kind (Qwen's, Mistral's) keeps its input as it came in any case, and is
torch's, a kernel of its own on a GPU: the same numbers, rounded where transformers rounds them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    rotate_half,
)

#: The gated MLP of transformers: with it, `_mlp` is the same function.
GATED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"

AGAIN = "_langchain_art_again"  # attribute of a norm's output: what makes it again

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
#: Lines of an attention of transformers whose queries and keys are a norm's output, turned.
TURNED = (
    "query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)",
    "key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)",
    "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)",
)


class Recompute:
    """Makes norms, attention and MLPs compute again what they do not keep, while `on`."""

    def __init__(self, model: nn.Module) -> None:
        self.on = False
        for module in model.modules():
            if "forward" in vars(module):
                continue  # somebody else's
            if type(module).__name__.endswith("RMSNorm"):
                like_llamas = _body(type(module)) == _body(LlamaRMSNorm)
                function = _rms_norm if like_llamas else type(module).forward
                module.forward = partial(self._norm, module, partial(function, module))
            elif GATED in _body(type(module)):
                module.forward = partial(self._mlp, module)
            elif all(hasattr(module, name) for name in PROJECTIONS):
                module.forward = partial(self._attention, module)

    def _norm(self, norm: Any, function: Any, x: Tensor, *more: Any) -> Tensor:
        half = function.func is _rms_norm and x.dtype in (torch.bfloat16, torch.float16)
        forward = function if half else partial(type(norm).forward, norm)
        if more or not ((self.on or (half and not x.is_cuda)) and _has_gradient(x)):
            return forward(x, *more)
        made = _Made(forward, x)
        output = _Again.apply(made, x)
        if self.on:
            setattr(output, AGAIN, made)
        return output

    def _attention(self, attention: Any, *args: Any, **options: Any) -> Any:
        x = options["hidden_states"] if "hidden_states" in options else args[0]
        with contextlib.ExitStack() as stack:
            if made := getattr(x, AGAIN, None):
                for name in PROJECTIONS:
                    stack.enter_context(_within(getattr(attention, name), _instead(x, made)))
            forest, positions = options.get("forest"), options.get("position_embeddings")
            if self.on and forest and positions and _turns(type(attention)):
                forest.turned[attention.layer_idx] = turned = Turned(positions)
                for norm in (attention.q_norm, attention.k_norm):
                    stack.callback(norm.register_forward_hook(turned.note).remove)
            return type(attention).forward(attention, *args, **options)

    def _mlp(self, mlp: Any, x: Tensor) -> Tensor:
        if not (self.on and _has_gradient(x)):
            return type(mlp).forward(mlp, x)
        with _instead(x, getattr(x, AGAIN, None)):
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        made = _Made(partial(_gated, mlp.act_fn), gate, up)
        inner = _Again.apply(made, gate, up)
        with _instead(inner, made):
            return mlp.down_proj(inner)


class _Made:
    """The output of a function, computed again once for all that need it in the backward pass."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        self.function, self._inputs = function, [one.detach() for one in inputs]
        self._again: tuple[list[Tensor], Tensor] | None = None

    def again(self) -> tuple[list[Tensor], Tensor]:
        """Inputs and output of one more call, with its graph."""
        if self._again is None:
            inputs = [one.detach().requires_grad_() for one in self._inputs]
            with torch.enable_grad():
                self._again = inputs, self.function(*inputs)
        return self._again

    def gradients(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of the inputs: the last use."""
        inputs, output = self.again()
        self._again = None
        return torch.autograd.grad(output, inputs, grads)


class Turned:
    """Makes an attention's queries and keys again: outputs of norms, turned by their positions."""

    def __init__(self, positions: tuple[Tensor, Tensor]) -> None:
        self._positions, self._mades = positions, list[_Made | None]()

    def note(self, _norm: Any, _inputs: Any, output: Tensor) -> None:
        """Hook of the norms of queries and of keys."""
        self._mades.append(getattr(output, AGAIN, None))

    def forget(self, output: Tensor, inputs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Free the memory of an attention's inputs until its backward pass, if they can be made.

        They are its queries (1, H, tokens, D) and, unless others need them, its keys, as it keeps
        them, with the keys (K, above, D) that stand before its own. What stands behind is zero.
        """
        mades = [made for made in self._mades if made]
        kept = [(*one, one[0].untyped_storage().nbytes()) for one in inputs]
        dtype = self._positions[0].dtype
        whole = all(one.nbytes == size and one.dtype is dtype for one, _, size in kept)
        if len(mades) < 2 or output.grad_fn is None or not whole:
            return

        @torch.no_grad()
        def fill(_grads: Any) -> None:
            for (one, above_KAD, size), made in zip(kept, mades, strict=False):
                one.untyped_storage().resize_(size)
                made_1HPD = made.again()[1].detach().transpose(1, 2)
                start = 0 if above_KAD is None else above_KAD.shape[1]
                end = start + made_1HPD.shape[2]
                into = one.data  # to autograd, nothing has changed
                if above_KAD is not None:
                    into[0, :, :start] = above_KAD
                into[:, :, end:] = 0
                _turn(made_1HPD, *self._positions, into[:, :, start:end])
            kept.clear()

        for one, _, _ in kept:
            one.untyped_storage().resize_(0)
        output.grad_fn.register_prehook(fill)


def _turn(x_1HPD: Tensor, cos_1PD: Tensor, sin_1PD: Tensor, into_1HPD: Tensor) -> None:
    """Transformers' `apply_rotary_pos_emb`, to the bit, with little more than half its traffic."""
    cos, sin = cos_1PD[:, None], sin_1PD[:, None]
    half = x_1HPD.shape[-1] // 2
    torch.mul(x_1HPD, cos, out=into_1HPD)
    into_1HPD[..., :half] -= x_1HPD[..., half:] * sin[..., :half]
    into_1HPD[..., half:] += x_1HPD[..., :half] * sin[..., half:]


@cache
def _turns(kind: type[nn.Module]) -> bool:
    """True if an attention's queries and keys are made as `Turned` makes them."""
    if any(line not in _body(kind) for line in TURNED):
        return False
    names = inspect.unwrap(kind.forward).__globals__
    functions = (apply_rotary_pos_emb, rotate_half)
    found = ((names.get(function.__name__), function) for function in functions)
    return all(one and inspect.getsource(one) == inspect.getsource(f) for one, f in found)


def _instead(tensor: Tensor, made: _Made | None) -> contextlib.AbstractContextManager[Any]:
    """Keep what makes a tensor again, if anything does, wherever that tensor would be kept."""
    if made is None:
        return contextlib.nullcontext()
    place, size = tensor.data_ptr(), tensor.numel()

    def pack(kept: Tensor) -> Any:
        return kept.shape if kept.data_ptr() == place and kept.numel() == size else kept

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else made.again()[1].detach().view(kept)

    return saved_tensors_hooks(pack, unpack)


@contextlib.contextmanager
def _within(module: nn.Module, context: contextlib.AbstractContextManager[Any]) -> Generator[None]:
    """Call a module inside of a context, and nothing else."""

    def enter(*_: Any) -> None:
        context.__enter__()

    def leave(*_: Any) -> None:
        context.__exit__(None, None, None)

    before = module.register_forward_pre_hook(enter)
    after = module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _has_gradient(x: Tensor) -> bool:
    """True if a plain call would keep something for the backward pass."""
    return torch.is_grad_enabled() and x.requires_grad


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    return norm.weight * functional.rms_norm(x, x.shape[-1:], None, norm.variance_epsilon)


def _gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return act(gate) * up


@cache
def _body(kind: type[nn.Module]) -> str:
    """Source of a forward pass, without its first line; empty if it has none."""
    try:
        return inspect.getsource(kind.forward).partition("\n")[2]
    except (OSError, TypeError):
        return ""


class _Again(torch.autograd.Function):
    """Output of a `_Made`: it keeps the inputs alone, and is made once more for its gradient."""

    @staticmethod
    def forward(ctx: Any, made: _Made, *inputs: Tensor) -> Tensor:
        ctx.made = made
        ctx.save_for_backward(*inputs)
        return made.function(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's doing
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        return (None, *ctx.made.gradients(grads))
