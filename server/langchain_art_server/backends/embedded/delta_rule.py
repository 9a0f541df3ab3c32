"""Gated delta nets over slots: the rows of a batch are padded, and each goes on from its own state.

The states are the recurrent ones and the convolutions' last inputs, which `kv_cache` holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from langchain_art_server.backends.models.delta_nets import (
    CONVOLUTION,
    RULE,
    delta_nets,
    divert,
    functions_of,
)

_RECURRENT = "torch_recurrent_gated_delta_rule"


@dataclass(frozen=True)
class SlotPass:
    """A pass over slots: which tokens ``[n, S]`` are padding, and whether states go by tokens.

    By tokens the rule gives the same bits for a prompt, its parts and decoded tokens; by chunks, as
    transformers computes more than one token, it is faster on a GPU.
    """

    padding: Tensor | None
    by_tokens: bool


def takes_slots(model: nn.Module, layers: set[int]) -> bool:
    """Let the layers of these numbers take a `SlotPass`; False: some are no gated delta nets."""
    nets = [one for one in delta_nets(model) if _RECURRENT in functions_of(one)]
    for net in nets:
        divert(net, CONVOLUTION, "slots", _convolve)
        for name in (RULE, _RECURRENT):
            divert(net, name, "slots", _compute)
    return {net.layer_idx for net in nets} == layers


def by_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The rule token by token; `initial_state` ``[n, H, K, V]`` becomes the state that follows.

    ``S ← S eᵍ + k (β (v - Sᵀk))ᵀ``, ``o = Sᵀq / √K``. See `torch_recurrent_gated_delta_rule` of
    transformers for the shapes.
    """
    rows, count, heads, _size = value.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], 2).float() for x in (query, key))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    parts = (q * q.shape[-1] ** -0.5, k, value.float(), g.exp()[..., None], beta.float()[..., None])
    # [n, S, H, …] -> [S, n x H, 1, …]
    q, k, v, decay, write = (x.transpose(0, 1).reshape(count, rows * heads, 1, -1) for x in parts)
    state, out = initial_state.flatten(0, 1), torch.empty_like(v)
    for at in range(count):
        state *= decay[at]
        change = (v[at] - torch.bmm(k[at], state)) * write[at]
        state.addcmul_(k[at].transpose(1, 2), change)
        torch.bmm(q[at], state, out=out[at])
    return out.view(count, rows, heads, -1).transpose(0, 1).to(value.dtype), initial_state


def _convolve(
    _original: Callable[..., Tensor],
    _slots: SlotPass,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_options: Any,
) -> Tensor:
    taps = weight.shape[-1]
    x, width = hidden_states.to(weight.dtype), hidden_states.shape[-1] - taps
    out = x[..., 1 : 1 + width] * weight[:, :1]
    for at in range(1, taps):
        out += x[..., 1 + at : 1 + at + width] * weight[:, at : at + 1]
    out = out if bias is None else out + bias[:, None]
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _compute(
    original: Callable[..., Any],
    slots: SlotPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> Any:
    if slots.padding is not None:  # leaves the state as it is
        g, beta = (x.masked_fill(slots.padding[..., None], 0.0) for x in (g, beta))
    rule = by_tokens if slots.by_tokens else original
    return rule(query, key, value, g=g, beta=beta, **options)
