"""Attention over a part of a token forest by FlexAttention (arXiv 2412.05496), for GPUs.

One kernel for all pairs of a part: it visits the blocks of queries and keys that hold a pair
(token, ancestor), and checks single pairs only in blocks that also hold others. Measured on an
H200 (docs/gpu.md); on CPU torch has its forward pass only, which the tests compare with
`attention_tiles`.

Queries and keys are padded to whole blocks, at least `LEAST` tokens: torch compiles a kernel again
for special sizes (one token, one block, as many keys as queries), and gives up after eight times.

Child side only. Index suffixes as in `attention_tiles`; Q blocks of queries, B blocks of keys, and
P and S with the padding.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.sequences.prefix_forest import Forest, Ints
from langchain_art_server.backends.peft.forest.attention_tiles import image_spans

BLOCK = 128  # tokens of a block, the kernel's default
LEAST = 2 * BLOCK  # fewest queries and keys: two blocks
#: Torch's kernel for many queries. Left to itself, torch 2.13 takes the one for decoding below 128
#: queries, which has no configuration where 128 is no multiple of queries times heads per key head.
KERNEL: Any = {"BACKEND": "TRITON"}


class Blocks:
    """All pairs of a part, by blocks; arguments as for `attention_tiles.Tiles`."""

    def __init__(
        self,
        tokens_P: Ints,
        above_E: Ints,
        forest: Forest,
        device: torch.device,
        last_N: Ints | None = None,
    ) -> None:
        self._images, self._above = image_spans(tokens_P, last_N), len(above_E)
        keys, exit_N = np.concatenate([above_E, tokens_P]), forest.exit_N
        self._new, self._device = len(tokens_P), device
        # A query of the padding attends as the last one does, and no query to a key of it.
        self._place = _padded(tokens_P, int(tokens_P[-1]))
        self._order, self._exits = _padded(keys, len(exit_N)), _padded(exit_N[keys], 0)
        self._depth_P = forest.depth_N[self._place]
        self._depth_S = _padded(forest.depth_N[keys], 0)
        self._masks: dict[int | None, BlockMask] = {}

    def mask(self, window: int | None) -> BlockMask:
        """The pairs less than `window` tokens apart; None: all."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> BlockMask:
        some_QB, all_QB = _blocks(self._place, self._order, self._exits)
        place_P, order_S, exit_S, depth_P, depth_S = (
            torch.from_numpy(x).to(self._device)
            for x in (self._place, self._order, self._exits, self._depth_P, self._depth_S)
        )

        def is_ancestor(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (order_S[k] <= place_P[q]) & (place_P[q] < exit_S[k])

        def is_near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return is_ancestor(batch, head, q, k) & (depth_P[q] - depth_S[k] < limit)

        if window is not None:
            limit = torch.tensor(window, device=self._device)  # one kernel for all windows
            (q_low, q_high), (k_low, k_high) = map(_bounds, (self._depth_P, self._depth_S))
            some_QB &= q_low[:, None] - k_high < window
            all_QB &= q_high[:, None] - k_low < window
        causal = is_ancestor if window is None else is_near

        def is_seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            ahead = (image_P[q] == image_S[k]) & (order_S[k] > place_P[q])
            return causal(batch, head, q, k) | ahead

        if self._images:
            # The number of a token's image; a query and a key of none differ.
            images_P, images_S = np.full(len(place_P), -1), np.full(len(order_S), -2)
            for number, (start, end) in enumerate(self._images):
                low, high = start + self._above, end + self._above
                images_P[start:end] = images_S[low:high] = number
                some_QB[start // BLOCK : -(-end // BLOCK), low // BLOCK : -(-high // BLOCK)] = True
            image_P, image_S = (torch.from_numpy(x).to(self._device) for x in (images_P, images_S))
        return BlockMask.from_kv_blocks(
            *_indices(some_QB & ~all_QB, self._device),
            *_indices(all_QB, self._device),
            BLOCK,
            is_seen if self._images else causal,
            seq_lengths=(len(self._place), len(self._order)),
        )

    def lay(self, x_1HPD: Tensor) -> Tensor:
        """Queries or keys as `attend` keeps them."""
        return _whole_blocks(x_1HPD)

    def attend(
        self,
        q_1HPD: Tensor,
        k_1KSD: Tensor,
        v_1KSD: Tensor,
        scale: float,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Attend as `attention_tiles.Tiles.attend`.

        Raises ArtError: the kernel was compiled too often; it would hold all pairs of tokens now.
        """
        cpu = q_1HPD.device.type == "cpu"
        attend: Any = flex_attention if cpu else compiled_attention()
        found: Any = attend(
            _whole_blocks(q_1HPD),
            _whole_blocks(k_1KSD),
            _whole_blocks(v_1KSD),
            block_mask=self.mask(window),
            scale=scale,
            enable_gqa=True,
            kernel_options=KERNEL,
            **({} if sink_H is None else {"return_aux": AuxRequest(lse=True)}),
        )
        out_1HPD = found if sink_H is None else found[0] * _kept(found[1].lse, sink_H)
        return out_1HPD[:, :, : self._new].transpose(1, 2)


@functools.cache
def compiled_attention() -> Any:
    """`flex_attention`, compiled for all sizes at once."""
    # Both take long to import, and a CPU does without.
    from torch._dynamo.exc import FailOnRecompileLimitHit  # noqa: PLC0415
    from torch.fx.experimental import _config  # noqa: PLC0415

    config: Any = _config

    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)

    def attend(*args: Any, **options: Any) -> Any:
        try:
            # Sizes that are equal once may differ the next time: no kernel for equal ones.
            with config.patch(use_duck_shape=False):
                return compiled(*args, **options)
        except FailOnRecompileLimitHit as error:
            raise ArtError(
                "FlexAttention was compiled for more shapes than torch allows "
                "(torch._dynamo.config.recompile_limit); without a kernel it would take memory for "
                "all pairs of tokens. Start the server again, and report the model's name."
            ) from error

    return attend


def _kept(lse_1HP: Tensor, sink_H: Tensor) -> Tensor:
    """The share of the weights that one more key with the score `sink_H` leaves (1, H, P, 1)."""
    return torch.sigmoid(lse_1HP - sink_H[None, :, None].to(lse_1HP.dtype))[..., None]


def _padded_length(tokens: int) -> int:
    return max(LEAST, -(-tokens // BLOCK) * BLOCK)


def _padded(values: Ints, filler: int) -> Ints:
    return np.pad(values, (0, _padded_length(len(values)) - len(values)), constant_values=filler)


def _whole_blocks(x_1HPD: Tensor) -> Tensor:
    """The tensor with zeros behind its tokens, always of one memory layout; itself if it is so.

    It is token by token, as projections are, and so is what is attended: no layer keeps a copy.
    """
    whole_1PHD = x_1HPD.transpose(1, 2)
    if missing := _padded_length(x_1HPD.shape[2]) - x_1HPD.shape[2]:
        whole_1PHD = functional.pad(whole_1PHD, (0, 0, 0, 0, 0, missing))
    return whole_1PHD.contiguous().transpose(1, 2)


def _blocks(place_P: Ints, order_K: Ints, exit_K: Ints) -> tuple[Any, Any]:
    """Blocks that may hold a pair, and those that hold nothing but pairs (Q, B)."""
    q_low, q_high = _bounds(place_P)
    order_low, order_high = _bounds(order_K)
    exit_low, exit_high = _bounds(exit_K)
    some_QB = (order_low <= q_high[:, None]) & (exit_high > q_low[:, None])
    all_QB = (order_high <= q_low[:, None]) & (exit_low > q_high[:, None])
    return some_QB, all_QB


def _bounds(values: Ints) -> tuple[Ints, Ints]:
    starts = np.arange(0, len(values), BLOCK)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _indices(blocks_QB: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of key blocks that each query block visits, and all blocks, the visited first."""
    order = np.argsort(~blocks_QB, axis=1, kind="stable").astype(np.int32)
    counts = blocks_QB.sum(1).astype(np.int32)
    counts_11Q, order_11QB = (torch.from_numpy(x)[None, None].to(device) for x in (counts, order))
    return counts_11Q, order_11QB
