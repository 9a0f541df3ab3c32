"""The base model, and rows through it as padded micro-batches. Child side only.

Index suffixes: B rows of a micro-batch, T positions of a padded row, M edges as in `scoring`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.sequences.training_rows import Row, microbatches
from langchain_art_server.backends.peft.logprob_scoring import (
    Counted,
    Edges,
    Progress,
    Scored,
    Scorer,
    Share,
    Visit,
    visit_terms,
)


@dataclass(frozen=True)
class _Batch:
    ids_BT: Tensor
    attention_BT: Tensor
    edges: Edges
    share: Share
    terms_T: Tensor


class PaddedRows:
    """Rows of similar length side by side, padded on the right: what every architecture can do.

    Args:
        rows: at least one.
        counted: their tokens that count.
        budget: most tokens of a micro-batch, padding included; a longer row goes alone.
        number: dtype of temperatures.
        device: where the tensors go.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        counted: Counted,
        budget: int,
        number: torch.dtype,
        device: torch.device,
    ) -> None:
        lengths = [len(row.token_ids) for row in rows]
        self._batches = [
            _pad([rows[i] for i in group], group, counted, number, device)
            for group in microbatches(lengths, budget)
        ]
        sizes = [batch.ids_BT.numel() for batch in self._batches]
        self.tokens, self.alive = sum(sizes), max(sizes)

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """See `scoring.Packing`."""
        for index, batch in enumerate(self._batches):
            inputs = _inputs(scorer.base, batch.ids_BT, batch.attention_BT)
            outputs_MX = scorer.outputs(inputs, batch.edges.select_M)
            scored = Scored(scorer, outputs_MX, batch.edges, soon=True)
            visit_terms(visit, batch.terms_T, [(scored, batch.share)])
            scored.descend()
            if progress is not None:
                count = len(self._batches)
                progress((index + 1) / count, f"micro-batch {index + 1} of {count}")


def _pad(
    rows: Sequence[Row],
    group: Sequence[int],
    counted: Counted,
    number: torch.dtype,
    device: torch.device,
) -> _Batch:
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    ids_BT, attention_BT = (np.zeros(shape, dtype=np.int64) for _ in range(2))
    place = {row: b for b, row in enumerate(group)}
    for b, row in enumerate(rows):
        ids_BT[b, : len(row.token_ids)] = row.token_ids
        attention_BT[b, : len(row.token_ids)] = 1
    terms_T = np.flatnonzero(np.isin(counted.row_T, group))
    b_T = np.array([place[row] for row in counted.row_T[terms_T].tolist()], dtype=np.int64)
    at_T = counted.at_T[terms_T]
    temperature_T = np.array([row.temperature for row in rows])[b_T]
    edges, edge_T = Edges.merged(
        b_T * shape[1] + at_T - 1, ids_BT[b_T, at_T], temperature_T, number, device
    )
    ids, attention, edge, number_T = (
        torch.from_numpy(x).to(device) for x in (ids_BT, attention_BT, edge_T, terms_T)
    )
    share = Share(torch.arange(len(number_T), device=device), edge)
    return _Batch(ids, attention, edges, share, number_T)


def _inputs(base: PreTrainedModel, ids_BT: Tensor, attention_BT: Tensor) -> dict[str, Any]:
    # The mask and the positions are explicit, so that nothing is guessed from them: without a
    # mask, transformers takes a jump in the positions for the start of another document.
    inputs = {"input_ids": ids_BT, "attention_mask": attention_BT}
    if "position_ids" in inspect.signature(base.forward).parameters:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        inputs["position_ids"] = positions_T.expand(ids_BT.shape)
    return inputs


def load_base(model: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The base model, frozen and without dropout.

    Weights are read from safetensors only, and code that comes with a model is never run.

    Raises:
        ConfigError: it cannot be loaded, or it is not a causal language model.
    """
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
        )
        nn.Module.to(loaded, device).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the learner cannot load the model {model!r} on {device}: {error}"
        ) from error
    if loaded.get_output_embeddings() is None:
        raise ConfigError(f"the model {model!r} has no output head, expected a causal model")
    return loaded.requires_grad_(False)
