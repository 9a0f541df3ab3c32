"""Packing: rows as micro-batches, and which of their tokens are scored.

Index suffix: T terms. A *term* is one counted token of one row; terms are numbered row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.algorithms.sequences.training_rows import Row

if TYPE_CHECKING:
    from langchain_art_server.backends.peft.logprob_scoring import Scorer

Visit = Callable[[Tensor, Tensor], Tensor | None]
"""Takes the logprobs of some terms (T) and the terms' numbers (T). Returns their loss, whose
gradient is then computed, or None. All terms of one model call come in one visit."""
Progress = Callable[[float, str], None]


class Packing(Protocol):
    """Rows laid out for a model."""

    tokens: int
    """Tokens that go through the model in one sweep, padding included."""
    alive: int
    """Most tokens whose activations are in memory at a time."""

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
        """The tokens with mask 1, or every token but the first of each row."""
        none: Ints = np.empty(0, dtype=np.int64)
        found: list[Ints] = []
        calls = [none]
        for row in rows:
            counts = np.ones(len(row.mask), bool) if every_token else np.asarray(row.mask, bool)
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
    """Groups of rows, one after the other, each a `Packing` of its own.

    Of a group without numbers of terms, nothing is visited.
    """

    def __init__(self, groups: Sequence[tuple[Packing, Ints]], device: torch.device) -> None:
        self._groups = [(packing, torch.from_numpy(terms).to(device)) for packing, terms in groups]
        self.tokens = sum(packing.tokens for packing, _ in groups)
        self.alive = max((packing.alive for packing, _ in groups), default=0)

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """See `Packing`."""
        for index, (packing, numbers_T) in enumerate(self._groups):

            def visit_group(
                logprobs_T: Tensor, terms_T: Tensor, all_T: Tensor = numbers_T
            ) -> Tensor | None:
                return visit(logprobs_T, all_T[terms_T])

            report(progress, index, len(self._groups))
            packing.sweep(scorer, visit_group if len(numbers_T) else _visit_nothing)


def report(progress: Progress | None, index: int, count: int) -> None:
    """Report that the micro-batch `index` of `count` begins."""
    if progress is not None:
        progress(index / count, f"micro-batch {index + 1} of {count}")


def _visit_nothing(_logprobs_T: Tensor, _terms_T: Tensor) -> None: ...
