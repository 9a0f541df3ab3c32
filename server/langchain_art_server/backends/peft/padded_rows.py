"""The base model, and rows through it as one padded micro-batch. Child side only.

Index suffixes: B rows of the micro-batch, T positions of a padded row or terms of `micro_batches`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from langchain_art_server.algorithms.sequences.token_sets import column
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.base_weights import load_causal
from langchain_art_server.backends.peft.logprob_scoring import (
    Predictions,
    ScoredBatch,
    Scorer,
    TermPredictions,
    visit_terms,
)
from langchain_art_server.backends.peft.micro_batches import (
    CountedTokens,
    Progress,
    Visit,
    report,
)


class PaddedRows:
    """Rows, at least one, side by side, padded on the right: what every architecture supports."""

    def __init__(self, rows: Sequence[Row], counted: CountedTokens, base: PreTrainedModel) -> None:
        shape = (len(rows), max(len(row.token_ids) for row in rows))
        ids_BT, attention_BT = (np.zeros(shape, dtype=np.int64) for _ in range(2))
        for b, row in enumerate(rows):
            ids_BT[b, : len(row.token_ids)] = row.token_ids
            attention_BT[b, : len(row.token_ids)] = 1
        row_T, at_T = counted.row_T, counted.at_T
        temperature_T = np.array([row.temperature for row in rows])[row_T]
        self._predictions, prediction_T = Predictions.merged(
            row_T * shape[1] + at_T - 1,
            ids_BT[row_T, at_T],
            temperature_T,
            column([row.drawn_from for row in rows], row_T, at_T),
            base,
        )
        self._ids_BT, self._attention_BT, predictions = (
            torch.from_numpy(x).to(base.device) for x in (ids_BT, attention_BT, prediction_T)
        )
        self._terms_T = torch.arange(len(row_T), device=base.device)
        self._share = TermPredictions(self._terms_T, predictions)
        self.tokens = self.alive = ids_BT.size

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """See `micro_batches.Packing`."""
        report(progress, 0, 1)
        # Positions are given explicitly: without a mask, transformers takes a jump in them for the
        # start of another document.
        inputs = {"input_ids": self._ids_BT}
        if scorer.masked:
            inputs["attention_mask"] = self._attention_BT
        if "position_ids" in inspect.signature(scorer.base.forward).parameters:
            positions_T = torch.arange(self._ids_BT.shape[1], device=self._ids_BT.device)
            inputs["position_ids"] = positions_T.expand(self._ids_BT.shape)
        outputs_MX = scorer.outputs(inputs, self._predictions.select_M)
        scored = ScoredBatch(scorer, outputs_MX, self._predictions, soon=True)
        visit_terms(visit, self._terms_T, [(scored, self._share)])
        scored.backward()


def load_base(model: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The base model, frozen and without dropout. Raises ConfigError as `load_causal`."""
    return load_causal(model, dtype, device).requires_grad_(False)
