"""Makes the logits of a row independent of the other rows of its batch, bit for bit, on a CPU.

A kernel may add up the same numbers in another order when a batch has other sizes. On a CPU this
happens in three places, each avoided by a choice of sizes that is measured when a model is loaded:

=================================  ==============================================================
a matrix product of few rows       has kernels of its own: it gets at least `BatchInvariance.rows`
attention of few queries           too: a decoded token's heads are packed as rows; prompts are
                                   padded on the left to a multiple of `BatchInvariance.rows`
attention over other numbers of    cuts its sum at other columns: keys are read in the lengths that
keys                               `BatchInvariance.length` gives
=================================  ==============================================================

The rule of gated delta nets goes by tokens for prompts, too, and their gates fill the processor's
registers (`BatchInvariance.multiple`). So a token has the same keys, values, states and logits
whether it was decoded, computed with a prompt or after a cached prefix, alone or beside any other
rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from langchain_art_server.backends.embedded.delta_rule import by_tokens
from langchain_art_server.backends.models.base_weights import text_modules

#: The name under which transformers finds `packed_attention`.
PACKED_ATTENTION = "langchain_art_packed"
#: Numbers of rows that are tried, and numbers of rows whose products must agree with these.
_FEWEST, _BATCHES = (1, 2, 4, 8, 16, 32), (*range(1, 18), 33, 64)
_RANK = 8  # an adapter's rank: its products are MKL's, beside layers that are not
#: Weights of a layer from which on oneDNN's product is faster at four rows, and the rows for which
#: it orders them.
_PACKED_SIZE, _PACKED_ROWS = 1 << 16, 32
_pack: Any = torch.ops.mkldnn._reorder_linear_weight
_multiply_packed: Any = torch.ops.mkldnn._linear_pointwise
_KEY_BLOCK = 512  # PyTorch's attention on a CPU reads keys in blocks of so many
_LENGTH_STEP = 64


@dataclass(frozen=True)
class BatchInvariance:
    """Sizes in which kernels give a row the same bits beside any others."""

    rows: int  # the fewest rows of a product
    lengths: tuple[int, ...]
    """Numbers of keys that attention may read, of up to 512, ascending; behind each 512 keys the
    same again."""
    multiple: int  # a pass has a multiple of so many rows

    def length(self, keys: int) -> int:
        """The least number of keys, of at least `keys`, that attention may read."""
        blocks, rest = divmod(keys - 1, _KEY_BLOCK)
        return blocks * _KEY_BLOCK + self.lengths[bisect_left(self.lengths, rest + 1)]

    def width(self, tokens: int) -> int:
        """The least number of prompt tokens of a row, of at least `tokens`, padding included."""
        fewest = math.lcm(self.rows, self.multiple)
        return -(-tokens // fewest) * fewest


class RowLinear(nn.Linear):
    """A linear layer that gives a row the same bits in every batch.

    It computes at least `fewest` rows, and, where the layer is large, by oneDNN on weights in
    oneDNN's own order: two to three times as fast as MKL on AMD's processors, for a second copy.
    """

    fewest: int
    packed: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``[…, in]`` -> ``[…, out]``."""
        return shaped_rows(self.multiply(flat_rows(input, self.fewest)), input)

    def pack(self) -> None:
        """Copy the weights for oneDNN, if the layer is large enough to gain by it."""
        large = self.weight.numel() >= _PACKED_SIZE and self.weight.dtype == torch.float32
        large = large and torch.backends.mkldnn.is_available()
        self.packed = _pack(self.weight, _PACKED_ROWS) if large else None

    def multiply(self, x: Tensor) -> Tensor:
        """The layer's product of ``[rows, in]``, as it is."""
        if self.packed is None:
            return functional.linear(x, self.weight, self.bias)
        return _multiply_packed(x, self.packed, self.bias, "none", [], "")


def flat_rows(x: Tensor, fewest: int) -> Tensor:
    """The rows of ``x [..., in]`` as ``[rows, in]``, with zeros behind where they are too few."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if (missing := fewest - len(flat)) > 0:
        flat = torch.cat([flat, flat.new_zeros(missing, flat.shape[1])])
    return flat


def shaped_rows(flat: Tensor, like: Tensor) -> Tensor:
    """``[rows, out]`` in the shape ``[..., out]`` of ``like [..., in]``, without rows behind."""
    return flat[: like.shape[:-1].numel()].view(*like.shape[:-1], -1)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as by ``sdpa``, where one query of a sequence is computed as several rows.

    The query heads of a key/value head, which share its keys, are the rows: as many as a product
    needs, the last of them repeated. See `sdpa_attention_forward` for the shapes.
    """
    rows, heads, count, size = query.shape
    per_head = attention_mask is not None and attention_mask.shape[1] > 1
    if count > 1 or per_head or options.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    fewest: Any = module.fewest
    packed = query.reshape(rows, key.shape[1], -1, size)
    if (some := packed.shape[2]) < fewest:
        packed = torch.cat([packed, packed[:, :, -1:].expand(-1, -1, fewest - some, -1)], 2)
    out = functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out[:, :, :some].reshape(rows, 1, heads, -1), None


AttentionInterface.register(PACKED_ATTENTION, cast(Any, packed_attention))
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def batch_invariance(
    model: PreTrainedModel, heads: Iterable[tuple[int, int]], states: Sequence[tuple[int, ...]]
) -> BatchInvariance | None:
    """Set a model up so that its rows do not depend on each other; None: it stays as it was.

    `heads` are the pairs (key/value heads, size of a head) of its cache, and `states` the shapes of
    its gated delta nets' there. None on a device other than a CPU, for another attention than
    ``sdpa``, for weights that no `RowLinear` multiplies (experts, 4 bits), and where no sizes are
    found that agree.
    """
    sdpa = getattr(model.config, "_attn_implementation", None) == "sdpa"
    text, beside = text_modules(model), (nn.Conv1d,) if states else ()
    covered = all(_is_covered(one) or isinstance(one, beside) for one in text)
    if model.device.type != "cpu" or not sdpa or not covered:
        return None
    multiple = _multiple(states) if states else 1
    if multiple is None or not all(_rule_agrees(shape) for shape in states if len(shape) == 3):
        return None
    linears = [one for one in model.modules() if type(one) is nn.Linear and one in text]
    for one in linears:
        one.__class__ = RowLinear
        cast(RowLinear, one).pack()
    kinds = {tuple(one.weight.shape): cast(RowLinear, one) for one in linears}
    pairs = set(heads)
    for rows in _FEWEST:
        agree = all(_agree(one, rows) for one in kinds.values())
        if agree and (lengths := _lengths(pairs, rows, model.dtype)) is not None:
            break
    else:
        rows, lengths = 1, None
    for one in text:
        if isinstance(one, RowLinear) or hasattr(one, "layer_idx"):
            setattr(one, "fewest", rows)  # noqa: B010 - attention layers declare no such name
    if lengths is None:
        return None
    model.set_attn_implementation(PACKED_ATTENTION)
    return BatchInvariance(rows, lengths, multiple)


def _is_covered(module: nn.Module) -> bool:
    """True if a module multiplies by no weights of its own, or as a `RowLinear` will."""
    if type(module) is nn.Linear or isinstance(module, nn.Embedding):
        return True
    return all(one.dim() < 2 for one in module.parameters(recurse=False))


def _agree(linear: RowLinear, fewest: int) -> bool:
    """True if products of at least so many rows, an adapter's too, give each row the same bits."""
    dtype = linear.weight.dtype
    x = _drawn(max(*_BATCHES, *_FEWEST), linear.in_features, dtype)
    down = _drawn(_RANK, linear.in_features, dtype).t()
    up = _drawn(linear.out_features, _RANK, dtype).t()
    whole, adapted = linear.multiply(x), x @ down @ up
    for size in sorted({max(fewest, size) for size in _BATCHES}):
        some = x[-size:].contiguous()
        same = (some @ down @ up).equal(adapted[-size:])
        if not same or not linear.multiply(some).equal(whole[-size:]):
            return False
    return True


def _multiple(states: Sequence[tuple[int, ...]]) -> int | None:
    """The fewest rows of which numbers of elementwise functions have the same bits; None: none.

    Those that do not fill the processor's registers are computed otherwise. In other layers their
    elements do: gates have one for each head.
    """
    most = max(_BATCHES)
    sizes = {size for shape in states for size in (shape[0], math.prod(shape[::2]))}
    functions = (torch.exp, torch.sigmoid, functional.softplus, functional.silu)
    pairs = [(_drawn(most, size, torch.float32), apply) for size in sizes for apply in functions]
    for fewest in _FEWEST:
        steps = range(fewest, most, fewest)
        if all(apply(x[:n]).equal(apply(x)[:n]) for n in steps for x, apply in pairs):
            return fewest
    return None


def _rule_agrees(shape: tuple[int, ...]) -> bool:
    """True if the rule gives each row the same bits beside others, and in one pass or two."""
    most, (heads, size, width) = max(_BATCHES), shape
    parts = [
        _drawn(most * 2 * heads, n, torch.float32).view(most, 2, heads, n)
        for n in (size, size, width)
    ]
    parts += [-parts[0][..., 0].abs(), parts[1][..., 0].sigmoid()]

    def last(rows: int, *steps: slice) -> Tensor:
        state, found = torch.zeros(rows, *shape), torch.empty(0)
        for step in steps:
            q, k, v, decay, write = (x[:rows, step] for x in parts)
            found, state = by_tokens(q, k, v, decay, write, state, True)
        return found[:, -1]

    whole = last(most, slice(0, 2))
    return all(last(n, slice(0, 1), slice(1, 2)).equal(whole[:n]) for n in _BATCHES)


def _lengths(heads: set[tuple[int, int]], rows: int, dtype: torch.dtype) -> tuple[int, ...] | None:
    """The numbers of keys, of up to 512, over which attention gives the same bits as over more.

    And as beside more queries than `rows`.
    """
    longest = 2 * _KEY_BLOCK
    steps = range(_LENGTH_STEP, longest + 1, _LENGTH_STEP)
    good = set(steps)
    for count, size in heads:
        drawn = [_drawn(count * n, size, dtype) for n in (max(_FEWEST), longest, longest)]
        many, key, value = (one.view(1, count, -1, size) for one in drawn)
        query = many[:, :, :rows]
        for back, length in product((0, 1, 30, 63), steps):
            whole = _attend(many, key, value, longest, length - back)[:, :, :rows]
            wider = [n for n in good if n >= length]
            alike = [_attend(query, key, value, n, length - back).equal(whole) for n in wider]
            good -= {n for n, same in zip(wider, alike, strict=True) if not same}
    found = tuple(n for n in steps[: len(steps) // 2] if {n, n + _KEY_BLOCK} <= good)
    return found if _KEY_BLOCK in found else None


def _attend(query: Tensor, key: Tensor, value: Tensor, length: int, seen: int) -> Tensor:
    mask = (torch.arange(length) < seen).expand(1, 1, query.shape[2], length)
    cut = key[:, :, :length], value[:, :, :length]
    return functional.scaled_dot_product_attention(query, *cut, attn_mask=mask)


def _drawn(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows * size)
    return torch.randn(rows, size, generator=generator).to(dtype)
