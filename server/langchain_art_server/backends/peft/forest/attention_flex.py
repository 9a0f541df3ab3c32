"""Attention over a part of a token forest by FlexAttention (arXiv 2412.05496), for GPUs.

One kernel for all pairs of a part: it visits the blocks of queries and keys that hold a pair
(token, ancestor), and checks single pairs only in blocks that also hold others. Not measured on a
GPU yet; on CPU torch has its forward pass only, which the tests compare with `attention_tiles`.

Child side only. Index suffixes as in `attention_tiles`; Q blocks of queries, B blocks of keys.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from langchain_art_server.algorithms.sequences.prefix_forest import Ints

#: Tokens of a block, the kernel's default.
BLOCK = 128
#: Torch's kernel for many queries. Left to itself, torch 2.13 takes the one for decoding below 128
#: queries, which has no configuration where 128 is no multiple of queries times heads per key head.
KERNEL: Any = {"BACKEND": "TRITON"}


class Blocks:
    """All pairs of a part, by blocks; arguments as for `attention_tiles.Tiles`."""

    def __init__(self, tokens_P: Ints, above_E: Ints, exit_N: Ints, device: torch.device) -> None:
        keys = np.concatenate([above_E, tokens_P])
        some_QB, all_QB = _blocks(tokens_P, keys, exit_N[keys])
        place_P, order_K, exit_K = (
            torch.from_numpy(x).to(device) for x in (tokens_P, keys, exit_N[keys])
        )

        def is_ancestor(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (order_K[k] <= place_P[q]) & (place_P[q] < exit_K[k])

        self._mask = BlockMask.from_kv_blocks(
            *_indices(some_QB & ~all_QB, device),
            *_indices(all_QB, device),
            BLOCK,
            is_ancestor,
            seq_lengths=(len(tokens_P), len(keys)),
        )

    def attend(self, q_1HPD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, scale: float) -> Tensor:
        """As `attention_tiles.Tiles.attend`."""
        attend = flex_attention if q_1HPD.device.type == "cpu" else _compiled()
        out_1HPD: Any = attend(
            q_1HPD,
            k_1KSD,
            v_1KSD,
            block_mask=self._mask,
            scale=scale,
            enable_gqa=True,
            kernel_options=KERNEL,
        )
        return out_1HPD.transpose(1, 2)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _blocks(place_P: Ints, order_K: Ints, exit_K: Ints) -> tuple[Any, Any]:
    """Which blocks may hold a pair, and which hold nothing but pairs (Q, B)."""
    q_low, q_high = _bounds(place_P)
    order_low, order_high = _bounds(order_K)
    exit_low, exit_high = _bounds(exit_K)
    some_QB = (order_low <= q_high[:, None]) & (exit_high > q_low[:, None])
    all_QB = (order_high <= q_low[:, None]) & (exit_low > q_high[:, None])
    all_QB[:, len(order_K) // BLOCK :] = False  # the last block of keys may be partly empty
    return some_QB, all_QB


def _bounds(values: Ints) -> tuple[Ints, Ints]:
    starts = np.arange(0, len(values), BLOCK)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _indices(blocks_QB: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries visits, and all blocks, the visited first."""
    order = np.argsort(~blocks_QB, axis=1, kind="stable").astype(np.int32)
    counts = blocks_QB.sum(1).astype(np.int32)
    counts_11Q, order_11QB = (torch.from_numpy(x)[None, None].to(device) for x in (counts, order))
    return counts_11Q, order_11QB
