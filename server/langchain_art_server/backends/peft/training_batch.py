"""Rows as a step or a reading of logprobs needs them: columns of terms, there and back.

Child side only. Index suffixes: T terms as in `scoring`; N all of a step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from langchain_art_server.algorithms.loss.step_loss import StepLoss, StepTokens
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.logprob_scoring import Counted, Packing, Scorer


@dataclass(frozen=True)
class TrainingBatch:
    """What a step learns from: rows, how they go through the model, and their tokens' loss."""

    rows: Sequence[Row]
    packing: Packing
    loss: StepLoss


def step_tokens(
    rows: Sequence[Row], counted: Counted, number: torch.dtype, device: torch.device
) -> StepTokens:
    """The columns of rows, at their counted tokens.

    Args:
        rows: without weights, all their counted tokens weigh the same.
        counted: their trained tokens.
        number: dtype of all but the calls.
        device: where the tensors go.
    """

    def tensor(columns: list[list[float]]) -> Tensor:
        return torch.from_numpy(counted.column(columns)).to(device, dtype=number)

    equal = 1.0 / len(counted.row_T)
    return StepTokens(
        sampler_logprobs_N=tensor([row.logprobs for row in rows]),
        advantages_N=tensor([row.advantages for row in rows]),
        weights_N=tensor([row.weights or [equal] * len(row.mask) for row in rows]),
        calls_N=torch.from_numpy(counted.call_T).to(device),
    )


@torch.no_grad()
def sweep_logprobs(packing: Packing, scorer: Scorer, like_N: Tensor) -> Tensor:
    """The logprobs of all terms of a packing (N), in the dtype and on the device of `like_N`."""
    found_N = torch.zeros_like(like_N)

    def note(logprobs_T: Tensor, terms_T: Tensor) -> None:
        found_N[terms_T] = logprobs_T

    packing.sweep(scorer, note)
    return found_N


def row_logprobs(rows: Sequence[Row], counted: Counted, logprobs_N: Tensor) -> list[np.ndarray]:
    """Logprobs of terms, row by row; 0.0 where a token is none of them."""
    found = [np.zeros(len(row.token_ids)) for row in rows]
    values_N = logprobs_N.cpu().numpy()
    starts = np.searchsorted(counted.row_T, np.arange(len(rows) + 1))
    for index, row in enumerate(found):
        stretch = slice(starts[index], starts[index + 1])
        row[counted.at_T[stretch]] = values_N[stretch]
    return found
