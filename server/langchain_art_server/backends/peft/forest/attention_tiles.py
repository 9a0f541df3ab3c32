"""Attention over a part of a token forest on a CPU, without a mask of all tokens. Child side only.

The pairs (token, ancestor) of a forest fall into rectangles: all tokens below a segment attend to
all of it, and within a segment attention is causal. In preorder both are slices, so each is one
call of torch's fused kernel on views; the partial results are merged by their log-sum-exps (the
online softmax of FlashAttention, arXiv 2205.14135, section 3.1). Small subtrees, where that would
be many tiny calls, take one call with a small mask.

Index suffixes: H heads, K key heads, G heads per key head, P tokens of the part, E tokens above
them, S both together, D numbers per head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from langchain_art_server.algorithms.sequences.prefix_forest import Forest, Ints

BLOCK = 128  # whole subtrees of up to this many tokens take one call with a mask

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, (K, tokens, D) each, with positions encoded."""


@dataclass(frozen=True)
class Tile:
    """Tokens `start` to `end` attend to the keys `low` to `high`."""

    start: int
    end: int
    low: int
    high: int
    causal: bool = False  # among its own tokens
    mask: Tensor | None = None  # added to the scores
    first: bool = False  # of its tokens; every token has exactly one such tile, in which it is


class Tiles:
    """All pairs of a `prefix_forest.Part`, each once. Keys above it come before the part's own.

    `dtype` is that of the masks. `last_N` are, for tokens of images that attend to each other, the
    last of these, for others themselves.
    """

    def __init__(
        self,
        tokens_P: Ints,
        above_E: Ints,
        forest: Forest,
        dtype: torch.dtype,
        last_N: Ints | None = None,
    ) -> None:
        exit_N = forest.exit_N
        exit_P = np.searchsorted(tokens_P, exit_N[tokens_P])
        above = len(above_E)
        self._tiles = [
            replace(tile, low=tile.low + above, high=tile.high + above)
            for tile in _own_tiles(exit_P, dtype)
        ]
        if above:
            starts = np.searchsorted(tokens_P, above_E)
            ends = np.searchsorted(tokens_P, exit_N[above_E])
            cuts = np.flatnonzero((np.diff(starts) != 0) | (np.diff(ends) != 0)) + 1
            for low, high in itertools.pairwise([0, *cuts.tolist(), above]):
                self._tiles.append(Tile(int(starts[low]), int(ends[low]), low, high))
        self._depth_P = forest.depth_N[tokens_P]
        self._depth_S = forest.depth_N[np.concatenate([above_E, tokens_P])]
        self._dtype = dtype
        self._near: dict[int, list[Tile]] = {}
        #: In images, tokens attend to those behind them, too, however small the window is.
        self._ahead = [
            Tile(a, b, above + a, above + b, mask=_mask(~np.tri(b - a, dtype=bool), dtype))
            for a, b in image_spans(tokens_P, last_N)
        ]

    def lay(self, x_1HPD: Tensor) -> Tensor:
        """Queries or keys as `attend` keeps them."""
        return x_1HPD

    def attend(
        self,
        q_1HPD: Tensor,
        k_1KSD: Tensor,
        v_1KSD: Tensor,
        scale: float,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """The attention's output (1, P, H, D); positions are encoded in queries and keys.

        A token attends to the `window` last tokens of its row, itself among them; None: to all.
        `sink_H` is the score of one more key for each head, whose value is zero (`gpt-oss`); it
        gets no gradient.
        """
        q_KGPD = q_1HPD[0].unflatten(0, (k_1KSD.shape[1], -1))
        tiles = (self._tiles if window is None else self._within(window)) + self._ahead
        return _Attention.apply(q_KGPD, k_1KSD[0], v_1KSD[0], tiles, scale, sink_H)[None]

    def _within(self, window: int) -> list[Tile]:
        if window not in self._near:
            self._near[window] = [
                near
                for tile in self._tiles
                for near in _near(tile, self._depth_P, self._depth_S, window, self._dtype)
            ]
        return self._near[window]


def image_spans(tokens_P: Ints, last_N: Ints | None) -> list[tuple[int, int]]:
    """Stretches of a part that are each an image whose tokens attend to each other."""
    found = list[tuple[int, int]]()
    ahead = tokens_P * 0 if last_N is None else last_N[tokens_P] - tokens_P
    for start in np.flatnonzero(ahead).tolist():
        if not found or start >= found[-1][1]:
            found.append((start, start + int(ahead[start]) + 1))
    return found


def _own_tiles(exit_P: Ints, dtype: torch.dtype) -> list[Tile]:
    """Causal attention within each segment, rectangles below it, and masks for small subtrees."""
    cuts = np.append(np.flatnonzero(np.diff(exit_P)) + 1, len(exit_P))
    first: list[Tile] = []
    rectangles: list[Tile] = []
    stack = [(0, len(exit_P))]  # stretches of whole sibling subtrees
    while stack:
        start, end = stack.pop()
        small = start  # the subtrees from here to `start` fit into one block
        while start < end:
            leave = int(exit_P[start])
            if leave - small > BLOCK and small < start:
                first.append(_block(exit_P, small, start, dtype))
                small = start
            if leave - small > BLOCK:
                stem = min(int(cuts[np.searchsorted(cuts, start, side="right")]), leave)
                _triangle(start, stem, first, rectangles)
                if stem < leave:
                    rectangles.append(Tile(stem, leave, start, stem))
                    stack.append((stem, leave))
                small = leave
            start = leave
        if small < end:
            first.append(_block(exit_P, small, end, dtype))
    return first + rectangles


def _triangle(start: int, end: int, first: list[Tile], rectangles: list[Tile]) -> None:
    """Causal attention of a segment, by halves.

    The kernel takes as long for a causal square of up to 512 tokens as for all of it (measured);
    a small block on the diagonal wastes little, and rectangles waste nothing.
    """
    if end - start <= BLOCK:
        first.append(Tile(start, end, start, end, causal=True, first=True))
        return
    blocks = -(-(end - start) // BLOCK)
    middle = start + blocks // 2 * BLOCK
    _triangle(start, middle, first, rectangles)
    rectangles.append(Tile(middle, end, start, middle))
    _triangle(middle, end, first, rectangles)


def _block(exit_P: Ints, start: int, end: int, dtype: torch.dtype) -> Tile:
    exits = exit_P[start:end] - start
    if (exits == end - start).all():
        return Tile(start, end, start, end, causal=True, first=True)
    at = np.arange(end - start)
    seen = (at[None, :] <= at[:, None]) & (at[:, None] < exits[None, :])
    return Tile(start, end, start, end, mask=_mask(seen, dtype), first=True)


def _mask(seen: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~torch.from_numpy(seen), -torch.inf)


def _near(
    tile: Tile, depth_P: Ints, depth_S: Ints, window: int, dtype: torch.dtype
) -> Iterator[Tile]:
    """Tiles of the pairs of one that are less than `window` tokens apart."""
    keys = depth_S[tile.low : tile.high]
    if depth_P[tile.start : tile.end].max() - keys.min() < window:
        yield tile
    elif tile.first:  # at most `BLOCK` tokens among themselves
        near = depth_P[tile.start : tile.end, None] - keys < window
        if tile.mask is not None:
            yield replace(tile, mask=tile.mask + _mask(near, dtype))
        else:
            yield replace(tile, mask=_mask(np.tril(near), dtype), causal=False)
    else:
        # The keys are a stretch of one row: the far ones come first, the last ones are near to all.
        for start in range(tile.start, tile.end, BLOCK):
            end = min(start + BLOCK, tile.end)
            near = depth_P[start:end, None] - keys < window
            some, all_ = (int(np.append(x, True).argmax()) for x in (near.any(0), near.all(0)))
            if some < all_:
                mask = _mask(near[:, some:all_], dtype)
                yield Tile(start, end, tile.low + some, tile.low + all_, mask=mask)
            if all_ < len(keys):
                yield Tile(start, end, tile.low + all_, tile.high)


class _Attention(torch.autograd.Function):
    """Queries (K, G, P, D), keys and values (K, S, D) to the attention's output (P, H, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_KGPD: Tensor,
        k_KSD: Tensor,
        v_KSD: Tensor,
        tiles: list[Tile],
        scale: float,
        sink_H: Tensor | None,
    ) -> Tensor:
        kheads, groups, tokens, width = q_KGPD.shape
        out_PHD = q_KGPD.new_empty(tokens, kheads * groups, width)
        out_KGPD = _by_head(out_PHD, kheads)
        exact = torch.float64 if q_KGPD.dtype == torch.float64 else torch.float32
        lse_KGP = torch.empty(kheads, groups, tokens, dtype=exact, device=q_KGPD.device)
        k_KGSD, v_KGSD = (x[:, None].expand(-1, groups, -1, -1) for x in (k_KSD, v_KSD))
        for tile in tiles:
            rows, keys = slice(tile.start, tile.end), slice(tile.low, tile.high)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_KGPD[:, :, rows],
                k_KGSD[:, :, keys],
                v_KGSD[:, :, keys],
                0.0,
                tile.causal,
                attn_mask=tile.mask,
                scale=scale,
            )
            if tile.first:
                out_KGPD[:, :, rows], lse_KGP[:, :, rows] = out, lse
            else:
                if tile.mask is not None:  # the kernel says 0 of a token that sees no key
                    lse.masked_fill_(tile.mask.isneginf().all(-1), -torch.inf)
                both = torch.logaddexp(lse_KGP[:, :, rows], lse)
                weight = (lse - both).exp_().to(out.dtype).unsqueeze(-1)
                out_KGPD[:, :, rows].lerp_(out, weight)
                lse_KGP[:, :, rows] = both
        if sink_H is not None:
            both = torch.logaddexp(lse_KGP, sink_H.view(kheads, groups, 1).to(exact))
            out_KGPD.mul_((lse_KGP - both).exp_().to(out_KGPD.dtype).unsqueeze(-1))
            lse_KGP = both
        ctx.save_for_backward(q_KGPD, k_KSD, v_KSD, out_PHD, lse_KGP)
        ctx.tiles, ctx.scale = tiles, scale
        return out_PHD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's doing
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        # dS = P (dP - rowsum(dO O)): with the log-sum-exp of all keys and the whole output O, each
        # tile's own backward pass gives its exact share of the gradient.
        q_KGPD, k_KSD, v_KSD, out_PHD, lse_KGP = ctx.saved_tensors
        kheads, groups = q_KGPD.shape[:2]
        out_KGPD, grad_KGPD = (_by_head(x, kheads) for x in (out_PHD, grads[0].contiguous()))
        k_KGSD, v_KGSD = (x[:, None].expand(-1, groups, -1, -1) for x in (k_KSD, v_KSD))
        gq_KGPD = torch.empty_like(q_KGPD)
        gk_KSD, gv_KSD = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k_KSD, v_KSD)
        )
        for tile in ctx.tiles:
            rows, keys = slice(tile.start, tile.end), slice(tile.low, tile.high)
            part_q, part_k, part_v = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_KGPD[:, :, rows],
                    q_KGPD[:, :, rows],
                    k_KGSD[:, :, keys],
                    v_KGSD[:, :, keys],
                    out_KGPD[:, :, rows],
                    lse_KGP[:, :, rows],
                    0.0,
                    tile.causal,
                    attn_mask=tile.mask,
                    scale=ctx.scale,
                )
            )
            if tile.first:
                gq_KGPD[:, :, rows] = part_q
            else:
                gq_KGPD[:, :, rows] += part_q
            gk_KSD[:, keys] += part_k.sum(1)
            gv_KSD[:, keys] += part_v.sum(1)
        return gq_KGPD, gk_KSD, gv_KSD, None, None, None


def _by_head(x_PHD: Tensor, kheads: int) -> Tensor:
    return x_PHD.unflatten(1, (kheads, -1)).permute(1, 2, 0, 3)
