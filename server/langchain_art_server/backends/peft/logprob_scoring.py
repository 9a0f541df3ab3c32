"""Logprobs of the tokens that count: which they are, and how a model gives them. Child side only.

A *term* is one counted token of one row; terms are numbered row by row. An *edge* is a token that
follows a position of a batch: where rows share both, one edge serves the terms of all of them.

Index suffixes: T terms, M edges of a batch, H hidden size, V vocabulary, X either of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from langchain_art.errors import ConfigError
from langchain_art_server.algorithms.loss.token_losses import CHUNK_ELEMENTS, token_logprobs
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.algorithms.sequences.training_rows import Row

Visit = Callable[[Tensor, Tensor], Tensor | None]
"""Takes logprobs (T) and the numbers of their terms (T) to their loss, whose gradient is wanted, or
to None. All terms of a call come in one visit."""
Progress = Callable[[float, str], None]


class Packing(Protocol):
    """Rows laid out for a model, batch by batch."""

    tokens: int
    """Tokens that go through the model in one sweep, padding included."""
    alive: int
    """Most of them that are in memory at a time."""

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """Visit all terms, each once, and add the gradients of the losses to the parameters."""
        ...


@dataclass(frozen=True)
class Counted:
    """The counted tokens of some rows, row by row.

    Attributes:
        row_T: index of its row.
        at_T: its index in the row.
        call_T: number of the call that said it, ascending over all rows.
    """

    row_T: Ints
    at_T: Ints
    call_T: Ints

    @classmethod
    def of(cls, rows: Sequence[Row], *, every_token: bool = False) -> Counted:
        """Those with mask 1, or every token but the first of each row."""
        found: list[Ints] = []
        calls: list[Ints] = []
        for row in rows:
            counts = np.ones(len(row.mask), bool) if every_token else np.asarray(row.mask, bool)
            counts[0] = False  # nothing comes before the first token
            found.append(np.flatnonzero(counts))
            said = np.asarray(row.calls, np.int64) if row.calls else np.zeros(len(counts), np.int64)
            calls.append(said[found[-1]])
        row_T = np.repeat(np.arange(len(rows)), [len(places) for places in found])
        said_T = np.concatenate(calls)
        new = (np.diff(row_T, prepend=-1) != 0) | (np.diff(said_T, prepend=-1) != 0)
        return cls(row_T, np.concatenate(found), np.cumsum(new) - 1)

    def column(self, columns: Sequence[Sequence[float]]) -> NDArray[np.float64]:
        """The terms' values of a column that has one list per row."""
        lengths = np.array([len(column) for column in columns], dtype=np.int64)
        starts: Ints = np.cumsum(lengths) - lengths
        flat = np.concatenate([np.asarray(column, dtype=np.float64) for column in columns])
        return flat[starts[self.row_T] + self.at_T]


@dataclass(frozen=True)
class Edges:
    """The edges of one batch.

    Attributes:
        select_M: position in the batch, all of its rows laid end to end, that the token follows.
        targets_M: the token.
        temperature_M: under which it was sampled.
    """

    select_M: Tensor
    targets_M: Tensor
    temperature_M: Tensor

    @classmethod
    def merged(
        cls,
        select_T: Ints,
        targets_T: Ints,
        temperature_T: NDArray[np.float64],
        number: torch.dtype,
        device: torch.device,
    ) -> tuple[Edges, Ints]:
        """One edge for all terms with the same position, token and temperature; each term's."""
        order = np.lexsort((temperature_T, targets_T, select_T))
        keys = [column[order] for column in (select_T, targets_T, temperature_T)]
        new = np.ones(len(order), dtype=bool)
        new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
        edge_T = np.empty(len(order), dtype=np.int64)
        edge_T[order] = np.cumsum(new) - 1
        select_M, targets_M, temperature_M = (torch.from_numpy(key[new]) for key in keys)
        edges = cls(
            select_M.to(device), targets_M.to(device), temperature_M.to(device, dtype=number)
        )
        return edges, edge_T


class Scorer:
    """A causal model, and what is done with its hidden states.

    Attributes:
        base: the model, with whatever adapter is on it.
        model: what is called: `base`, or PEFT's wrapper around it.
        plain_head: the logits are what the output head makes of the hidden states, and no more.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self.base = base
        self.model: nn.Module = base
        self.plain_head = False

    @property
    def head(self) -> nn.Module:
        """The output head."""
        head = self.base.get_output_embeddings()
        assert head is not None  # load_base saw to it
        return head

    def outputs(self, inputs: dict[str, Any], select_M: Tensor) -> Tensor:
        """Run the model and take what it has to say at some positions.

        Args:
            inputs: of the model's forward.
            select_M: positions, all rows of the batch laid end to end.

        Returns:
            Hidden states (M, H) if the head is plain: its logits can be made piece by piece. Else
            the logits (M, V): the hidden states are thinned out on their way into the head, so
            whatever the architecture does to logits behind it (scaling, soft-capping) is done as
            ever. No logits are made at other positions either way.

        Raises:
            ConfigError: the architecture does something else with its hidden states.
        """
        taken: list[Tensor] = []

        def thin(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_MH = args[0].flatten(0, -2).index_select(0, select_M)
            taken.append(hidden_MH)
            return (hidden_MH[None, : 0 if self.plain_head else None], *args[1:])

        hook = self.head.register_forward_pre_hook(thin)
        try:
            logits_1MV: Tensor = self.model(**inputs, use_cache=False).logits
        finally:
            hook.remove()
        if len(taken) != 1 or logits_1MV.shape[:-1] != (1, 0 if self.plain_head else len(select_M)):
            raise ConfigError(
                f"the architecture {type(self.base).__name__} does not give one row of logits for "
                f"each hidden state: got {tuple(logits_1MV.shape)}; it cannot be trained here"
            )
        return taken[0] if self.plain_head else logits_1MV[0]

    def backward(self, outputs_MX: Tensor, ends: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add to the parameters' gradients what comes down from tensors of one pass.

        Args:
            outputs_MX: what the pass gave.
            ends: tensors of the pass, each once, at least one, and their gradients.
        """
        del outputs_MX  # of one rank alone, nothing depends on it
        torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])

    def logits(self, outputs_MX: Tensor) -> Tensor:
        """Logits (M, V) of what `outputs` returned."""
        return self.head(outputs_MX) if self.plain_head else outputs_MX

    def logprobs(self, outputs_MX: Tensor, edges: Edges) -> Tensor:
        """Logprobs (M) of the edges, with logits for a chunk of them in memory at a time."""
        size = max(1, CHUNK_ELEMENTS // self.base.config.get_text_config().vocab_size)
        everything = (outputs_MX, edges.targets_M, edges.temperature_M)
        if not self.plain_head or len(outputs_MX) <= size:
            return self._of_chunk(*everything)
        found: list[Any] = [
            checkpoint(self._of_chunk, *chunk, use_reentrant=False)
            for chunk in zip(*(column.split(size) for column in everything), strict=True)
        ]
        return torch.cat(found)

    def _of_chunk(self, outputs_MX: Tensor, targets_M: Tensor, temperature_M: Tensor) -> Tensor:
        return token_logprobs(self.logits(outputs_MX), targets_M, temperature_M)


class Scored:
    """Logprobs of a batch's edges; takes gradients for them, and takes these to the model's output.

    Args:
        scorer: gives the logprobs.
        outputs_MX: of the batch.
        edges: of the batch.
        soon: the gradients come before another batch does: what they need stays in memory. Else
            the logits are computed a second time.
    """

    def __init__(self, scorer: Scorer, outputs_MX: Tensor, edges: Edges, *, soon: bool) -> None:
        self._scorer, self._outputs_MX, self._edges = scorer, outputs_MX, edges
        self._leaf_MX = outputs_MX.detach().requires_grad_(outputs_MX.requires_grad)
        with torch.set_grad_enabled(soon and outputs_MX.requires_grad):
            self._graph_M = scorer.logprobs(self._leaf_MX, edges)
        self.logprobs_M = self._graph_M.detach()
        self._grad_M: Tensor | None = None

    def receive(self, edge_T: Tensor, grad_T: Tensor) -> None:
        """Add to the gradients of some edges."""
        if self._grad_M is None:
            self._grad_M = torch.zeros_like(self.logprobs_M)
        self._grad_M.index_add_(0, edge_T, grad_T)

    def ends(self) -> list[tuple[Tensor, Tensor]]:
        """The model's outputs with their gradient; nothing if there is none. Once only."""
        if self._grad_M is None:
            return []
        if not self._graph_M.requires_grad:
            self._graph_M = self._scorer.logprobs(self._leaf_MX, self._edges)
        self._graph_M.backward(self._grad_M)
        grad_MX = self._leaf_MX.grad
        assert grad_MX is not None
        return [(self._outputs_MX, grad_MX)]

    def descend(self, inner: Sequence[tuple[Tensor, Tensor]] = ()) -> bool:
        """Take all gradients down to the parameters; whether there were any. Once only.

        Args:
            inner: tensors on the way to the outputs, and their gradients.
        """
        ends = [*self.ends(), *inner]
        if ends:
            self._scorer.backward(self._outputs_MX, ends)
        return bool(ends)


@dataclass(frozen=True)
class Share:
    """Which of the terms of a visit (`which_T`) are which edges of one batch."""

    which_T: Tensor
    edge_T: Tensor


def visit_terms(visit: Visit, terms_T: Tensor, shares: Sequence[tuple[Scored, Share]]) -> None:
    """Visit terms, and give each batch the gradients of its edges.

    Args:
        visit: as above.
        terms_T: numbers of the terms.
        shares: together all of them.
    """
    if not len(terms_T):
        return
    first = shares[0][0].logprobs_M
    logprobs_T = first.new_empty(len(terms_T))
    for scored, share in shares:
        logprobs_T[share.which_T] = scored.logprobs_M[share.edge_T]
    loss = visit(logprobs_T.requires_grad_(torch.is_grad_enabled()), terms_T)
    if loss is None:
        return
    (grad_T,) = torch.autograd.grad(loss, logprobs_T)
    for scored, share in shares:
        scored.receive(share.edge_T, grad_T[share.which_T])
