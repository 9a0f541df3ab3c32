"""Rows as micro-batches, logprobs of their tokens, and the gradients back. Child side only.

A *term* is one counted token of one row; terms are numbered row by row. A *prediction* is a
position of a micro-batch, the token that follows it, its temperature and the set of tokens that it
was drawn from: where terms of several rows share all four, it is computed once.

Index suffixes: T terms (or positions of a padded row), B rows of a micro-batch, M predictions of a
batch, H hidden size, V vocabulary, X either of the two.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.loss.token_losses import CHUNK_ELEMENTS, token_logprobs
from langchain_art_server.algorithms.sequences.image_tokens import IMAGE_IDS
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.algorithms.sequences.token_sets import SetColumn, column
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.device import free_bytes
from langchain_art_server.backends.models.images import Images, placed

GPU_CHUNK_ELEMENTS = 1 << 28  # logits at a time on a GPU
LOGIT_SHARE = 0.25  # share of its free memory that they and their gradient may take
Visit = Callable[[Tensor, Tensor], Tensor | None]
"""Takes the logprobs of some terms (T) and the terms' numbers (T). Returns their loss, whose
gradient is then computed, or None. All terms of one model call come in one visit."""
Progress = Callable[[float, str], None]


class Packing(Protocol):
    """Rows laid out for a model."""

    tokens: int  # tokens that go through the model in one sweep, padding included
    alive: int  # most tokens whose activations are in memory at a time
    parts: list[int]  # tokens of each pass through the model, in one sweep

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """Visit each term once, and add the losses' gradients to those of the parameters."""
        ...


@dataclass(frozen=True)
class CountedTokens:
    """The tokens of some rows that are scored, row by row."""

    row_T: Ints  # index of its row
    at_T: Ints  # its index in the row
    call_T: Ints  # number of the call that sampled it, from 0, ascending over all rows

    @classmethod
    def of(cls, rows: Sequence[Row], *, every_token: bool = False) -> CountedTokens:
        """The tokens with mask 1, or every token but the first of each row and those of images."""
        none: Ints = np.empty(0, dtype=np.int64)
        found: list[Ints] = []
        calls = [none]
        for row in rows:
            counts = (
                np.asarray(row.token_ids) < IMAGE_IDS if every_token else np.asarray(row.mask, bool)
            )
            counts[0] = False  # nothing comes before the first token
            found.append(np.flatnonzero(counts))
            of_call = np.asarray(row.calls or [0] * len(counts), np.int64)
            calls.append(of_call[found[-1]])
        row_T = np.repeat(np.arange(len(rows)), [len(places) for places in found])
        of_call_T = np.concatenate(calls)
        new = (np.diff(row_T, prepend=-1) != 0) | (np.diff(of_call_T, prepend=-1) != 0)
        return cls(row_T, np.concatenate([none, *found]), np.cumsum(new) - 1)

    def of_rows(self, group: Sequence[int]) -> tuple[CountedTokens, Ints]:
        """Counts of some rows (ascending), as if there were no others; their numbers among all."""
        terms = np.flatnonzero(np.isin(self.row_T, group))
        row_T = np.searchsorted(np.asarray(group), self.row_T[terms])
        call_T = np.unique(self.call_T[terms], return_inverse=True)[1]
        return CountedTokens(row_T, self.at_T[terms], call_T), terms

    def column(self, columns: Sequence[Sequence[float]]) -> NDArray[np.float64]:
        """The terms' values of a column that has one list per row."""
        lengths = np.array([len(column) for column in columns], dtype=np.int64)
        starts: Ints = np.cumsum(lengths) - lengths
        flat = np.concatenate([np.empty(0), *(np.asarray(c, np.float64) for c in columns)])
        return flat[starts[self.row_T] + self.at_T]


class MicroBatches:
    """Groups of rows, one after the other; of one without numbers of terms, nothing is visited."""

    def __init__(self, groups: Sequence[tuple[Packing, Ints]], device: torch.device) -> None:
        self._groups = [(packing, torch.from_numpy(terms).to(device)) for packing, terms in groups]
        self.tokens = sum(packing.tokens for packing, _ in groups)
        self.alive = max((packing.alive for packing, _ in groups), default=0)
        self.parts = [tokens for packing, _ in groups for tokens in packing.parts]

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """See `Packing`."""
        for index, (packing, numbers_T) in enumerate(self._groups):

            def visit_group(
                logprobs_T: Tensor, terms_T: Tensor, all_T: Tensor = numbers_T
            ) -> Tensor | None:
                return visit(logprobs_T, all_T[terms_T])

            report(progress, index, len(self._groups))
            packing.sweep(scorer, visit_group if len(numbers_T) else lambda _T, _terms_T: None)


def report(progress: Progress | None, index: int, count: int) -> None:
    """Report that the micro-batch `index` of `count` begins."""
    if progress is not None:
        progress(index / count, f"micro-batch {index + 1} of {count}")


def number_dtype(base: PreTrainedModel) -> torch.dtype:
    """Dtype of logprobs, temperatures and LoRA: float64 on a float64 model, else float32."""
    return torch.float64 if base.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Predictions:
    """The predictions of one micro-batch."""

    select_M: Tensor  # position, all rows of the micro-batch end to end, that the token follows
    targets_M: Tensor  # the token
    temperature_M: Tensor  # at which it was sampled
    drawn_from: SetColumn | None  # from which tokens; None: from the whole vocabulary

    @classmethod
    def merged(
        cls,
        select_T: Ints,
        targets_T: Ints,
        temperature_T: NDArray[np.float64],
        drawn_from: SetColumn | None,
        base: PreTrainedModel,
    ) -> tuple[Predictions, Ints]:
        """One for all terms of the same position, token, temperature and set; each term's index."""
        columns = [select_T, targets_T, temperature_T]
        if drawn_from is not None:
            columns.append(drawn_from.numbers_M)
        order = np.lexsort(columns[::-1])
        keys = [column[order] for column in columns]
        new = np.ones(len(order), dtype=bool)
        new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
        prediction_T = np.empty(len(order), dtype=np.int64)
        prediction_T[order] = np.cumsum(new) - 1
        select_M, targets_M, temperature_M = (torch.from_numpy(key[new]) for key in keys[:3])
        device, number = base.device, number_dtype(base)
        predictions = cls(
            select_M.to(device),
            targets_M.to(device),
            temperature_M.to(device, dtype=number),
            drawn_from and drawn_from.at(order[new]),
        )
        return predictions, prediction_T


class Scorer:
    """A causal model, and logprobs from its hidden states."""

    def __init__(self, base: PreTrainedModel) -> None:
        self.base = base  # with whatever adapter is on it
        self.model: nn.Module = base  # what is called: `base`, or PEFT's wrapper around it
        #: The output head alone makes the logits (no scaling or soft-capping behind it).
        self.plain_head = False
        #: What the backward pass needs of a forward pass is held in the host's memory meanwhile.
        self.offloads = False
        #: Padded rows come with a mask; causal attention needs none, as they are padded at the end.
        self.masked = True
        self.images: Images | None = None  # what reads the images of rows; None: they have none

    @property
    def head(self) -> nn.Module:
        """The output head."""
        head = self.base.get_output_embeddings()
        assert head is not None  # load_causal saw to it
        return head

    def outputs(self, inputs: dict[str, Any], select_M: Tensor) -> Tensor:
        """Run the model and take its outputs at some positions, all rows laid end to end.

        Raises ConfigError: the architecture does something else with its hidden states.

        Returns:
            Hidden states (M, H) if the head is plain: `logprobs` computes the logits in chunks.
            Else logits (M, V) of those positions alone: a hook selects their hidden states in front
            of the head, so what the architecture does to logits behind it is applied.
        """
        taken: list[Tensor] = []

        def thin(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_MH = args[0].flatten(0, -2).index_select(0, select_M)
            taken.append(hidden_MH)
            return (hidden_MH[None, : 0 if self.plain_head else None], *args[1:])

        hook = self.head.register_forward_pre_hook(thin)
        try:
            with self._on_host() if self.offloads else contextlib.nullcontext():
                logits_1MV: Tensor = self.model(**inputs, use_cache=False).logits
        finally:
            hook.remove()
        if len(taken) != 1 or logits_1MV.shape[:-1] != (1, 0 if self.plain_head else len(select_M)):
            raise ConfigError(
                f"the architecture {type(self.base).__name__} does not give one row of logits for "
                f"each hidden state: got {tuple(logits_1MV.shape)}; it cannot be trained here"
            )
        return taken[0] if self.plain_head else logits_1MV[0]

    def _on_host(self) -> saved_tensors_hooks:
        """Hold what autograd saves in the host's memory, but for the head, which is a weight."""
        host = save_on_cpu(pin_memory=True)
        head = next(self.head.parameters()).untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            stays = tensor.untyped_storage().data_ptr() == head
            return tensor if stays else host.pack_hook(tensor)

        def unpack(held: Any) -> Tensor:
            return held if isinstance(held, Tensor) else host.unpack_hook(held)

        return saved_tensors_hooks(pack, unpack)

    def backward(self, outputs_MX: Tensor, ends: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add to the parameters' gradients, after `outputs` returned `outputs_MX`.

        `ends` are tensors of that forward pass, each once, and the gradients that reach them.
        """
        del outputs_MX  # `ShardedScorer` needs it
        if ends:
            torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])

    def logits(self, outputs_MX: Tensor) -> Tensor:
        """Logits (M, V) of what `outputs` returned."""
        return self.head(outputs_MX) if self.plain_head else outputs_MX

    def logprobs(self, outputs_MX: Tensor, predictions: Predictions) -> Tensor:
        """Logprobs (M) of the predictions, with logits for a chunk of them in memory at a time."""
        vocabulary = self.base.config.get_text_config().vocab_size
        size = max(1, self._chunk_elements(outputs_MX.dtype) // vocabulary)
        drawn_from = predictions.drawn_from
        everything = (outputs_MX, predictions.targets_M, predictions.temperature_M)
        if not self.plain_head or len(outputs_MX) <= size:
            return self._of_chunk(*everything, drawn_from)
        sets = [
            drawn_from and drawn_from.at(slice(start, start + size))
            for start in range(0, len(outputs_MX), size)
        ]
        found: list[Any] = [
            checkpoint(self._of_chunk, *chunk, use_reentrant=False)
            for chunk in zip(*(column.split(size) for column in everything), sets, strict=True)
        ]
        return torch.cat(found)

    def _chunk_elements(self, dtype: torch.dtype) -> int:
        """Logits at a time. On a GPU, which reads the whole head for each chunk, as many as fit."""
        device = self.base.device
        if device.type != "cuda":
            return CHUNK_ELEMENTS
        fits = free_bytes(device) * LOGIT_SHARE / (2 * dtype.itemsize)  # and their gradient
        return max(CHUNK_ELEMENTS, min(GPU_CHUNK_ELEMENTS, int(fits)))

    def _of_chunk(
        self,
        outputs_MX: Tensor,
        targets_M: Tensor,
        temperature_M: Tensor,
        drawn_from: SetColumn | None,
    ) -> Tensor:
        forbidden = drawn_from and drawn_from.forbidden
        return token_logprobs(self.logits(outputs_MX), targets_M, temperature_M, forbidden)


class ScoredBatch:
    """Logprobs of a micro-batch's predictions, and their gradients on the way back to the model.

    With `soon`, `backward` comes before the next forward pass: what it needs stays in memory. Else
    the logits are computed again for it.
    """

    def __init__(
        self, scorer: Scorer, outputs_MX: Tensor, predictions: Predictions, *, soon: bool
    ) -> None:
        self._scorer, self._outputs_MX, self._predictions = scorer, outputs_MX, predictions
        self._leaf_MX = outputs_MX.detach().requires_grad_(outputs_MX.requires_grad)
        with torch.set_grad_enabled(soon and outputs_MX.requires_grad):
            self._graph_M = scorer.logprobs(self._leaf_MX, predictions)
        self.logprobs_M = self._graph_M.detach()
        self._grad_M: Tensor | None = None

    def receive(self, prediction_T: Tensor, grad_T: Tensor) -> None:
        """Add to the gradients of some predictions."""
        if self._grad_M is None:
            self._grad_M = torch.zeros_like(self.logprobs_M)
        self._grad_M.index_add_(0, prediction_T, grad_T)

    def backward(self, inner: Sequence[tuple[Tensor, Tensor]] = ()) -> bool:
        """The model's backward pass, once only; returns whether there were gradients.

        `inner` are further tensors of the forward pass, and their gradients.
        """
        ends = list(inner)
        if self._grad_M is not None:
            if not self._graph_M.requires_grad:
                self._graph_M = self._scorer.logprobs(self._leaf_MX, self._predictions)
            self._graph_M.backward(self._grad_M)
            assert self._leaf_MX.grad is not None
            ends.insert(0, (self._outputs_MX, self._leaf_MX.grad))
        if self._outputs_MX.requires_grad:
            self._scorer.backward(self._outputs_MX, ends)
        return bool(ends)


class TermPredictions(NamedTuple):
    """Map of a visit's terms (`which_T`) to predictions of one micro-batch."""

    which_T: Tensor
    prediction_T: Tensor


def visit_terms(
    visit: Visit, terms_T: Tensor, shares: Sequence[tuple[ScoredBatch, TermPredictions]]
) -> None:
    """Visit terms, and give each micro-batch that predicts some the gradients of its share."""
    if not len(terms_T):
        return
    first = shares[0][0].logprobs_M
    logprobs_T = first.new_empty(len(terms_T))
    for scored, share in shares:
        logprobs_T[share.which_T] = scored.logprobs_M[share.prediction_T]
    loss = visit(logprobs_T.requires_grad_(torch.is_grad_enabled()), terms_T)
    if loss is None:
        return
    (grad_T,) = torch.autograd.grad(loss, logprobs_T)
    for scored, share in shares:
        scored.receive(share.prediction_T, grad_T[share.which_T])


class PaddedRows:
    """Rows, at least one, side by side, padded on the right: what every architecture supports."""

    def __init__(
        self,
        rows: Sequence[Row],
        counted: CountedTokens,
        base: PreTrainedModel,
        images: Images | None = None,
    ) -> None:
        shape = (len(rows), max(len(row.token_ids) for row in rows))
        positions = np.tile(np.arange(shape[1]), (shape[0], 1))
        ids_BT, attention_BT = (np.zeros(shape, dtype=np.int64) for _ in range(2))
        for b, row in enumerate(rows):
            if images is not None:
                at = np.arange(len(row.token_ids))
                positions = placed(positions, b, at, images.shifts(row.token_ids))
            ids_BT[b, : len(row.token_ids)] = row.token_ids
            attention_BT[b, : len(row.token_ids)] = 1
        row_T, at_T = counted.row_T, counted.at_T
        self._ids_BT, self._attention_BT, self._positions = (
            torch.from_numpy(x).to(base.device) for x in (ids_BT, attention_BT, positions)
        )
        self._kinds = {} if images is None else images.kinds(self._ids_BT)
        self._predict(rows, counted, row_T * shape[1] + at_T, ids_BT[row_T, at_T], base)
        self.tokens = self.alive = ids_BT.size
        self.parts = [self.tokens]

    def _predict(
        self,
        rows: Sequence[Row],
        counted: CountedTokens,
        place_T: Ints,
        ids_T: Ints,
        base: PreTrainedModel,
    ) -> None:
        """Set what is predicted: the tokens `ids_T` at these places, all rows laid end to end."""
        row_T = counted.row_T
        self._predictions, prediction_T = Predictions.merged(
            place_T - 1,
            ids_T,
            np.array([row.temperature for row in rows])[row_T],
            column([row.drawn_from for row in rows], row_T, counted.at_T),
            base,
        )
        self._terms_T = torch.arange(len(row_T), device=base.device)
        predictions = torch.from_numpy(prediction_T).to(base.device)
        self._share = TermPredictions(self._terms_T, predictions)

    def _inputs(self, scorer: Scorer) -> dict[str, Tensor]:
        # Positions are given explicitly: without a mask, transformers takes a jump in them for the
        # start of another document.
        inputs = {"input_ids": self._ids_BT, **self._kinds}
        if scorer.masked:
            inputs["attention_mask"] = self._attention_BT
        if "position_ids" in inspect.signature(scorer.base.forward).parameters:
            inputs["position_ids"] = self._positions
        return inputs

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """See `Packing`."""
        report(progress, 0, 1)
        outputs_MX = scorer.outputs(self._inputs(scorer), self._predictions.select_M)
        scored = ScoredBatch(scorer, outputs_MX, self._predictions, soon=True)
        visit_terms(visit, self._terms_T, [(scored, self._share)])
        scored.backward()
