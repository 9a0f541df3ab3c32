"""Sums and means over the tokens of each call. Torch and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def call_means(values_T: Tensor, calls_T: Tensor) -> Tensor:
    """For each token, the mean over the tokens of its call. Differentiable.

    Example: values ``[1, 3, 5]`` of the calls ``[7, 7, 4]`` give ``[2, 2, 5]``.

    Args:
        values_T: floating.
        calls_T: integers, equal for the tokens of one call.
    """
    sums_T, counts_T = _sums(values_T, calls_T)
    return sums_T / counts_T


def call_sums(values_T: Tensor, calls_T: Tensor) -> Tensor:
    """For each token, the sum over the tokens of its call; as `call_means`."""
    return _sums(values_T, calls_T)[0]


def _sums(values_T: Tensor, calls_T: Tensor) -> tuple[Tensor, Tensor]:
    _, index_T, counts_S = calls_T.unique(return_inverse=True, return_counts=True)
    zeros_S = torch.zeros(len(counts_S), dtype=values_T.dtype, device=values_T.device)
    sums_S = zeros_S.index_add(0, index_T, values_T)
    return sums_S.index_select(0, index_T), counts_S.index_select(0, index_T)
