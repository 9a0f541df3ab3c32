"""Rows end to end in one sequence, for Unsloth's kernels of variable length. Child side only.

Its attention takes the rows' lengths (``packed_seq_lengths``) and lets each row attend to itself
alone: no padding, no mask. For models whose attention takes no forest.

Index suffixes: P positions of all rows end to end, T terms as in `logprob_scoring`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from langchain_art_server.algorithms.sequences.prefix_forest import Ints, grow
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.forest.packing import OddAttentionError
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    Packing,
    PaddedRows,
    Scorer,
)
from langchain_art_server.backends.peft.packer import (
    Packer,
    compared_rows,
    excluded_by_config,
    gap_of,
)

log = logging.getLogger(__name__)
#: How much faster its makers call Unsloth's kernels than PEFT's. Not measured here.
SPEEDUP = 2.0


class PackedRows(PaddedRows):
    """Rows, at least one, as one sequence of their lengths' sum."""

    def __init__(self, rows: Sequence[Row], counted: CountedTokens, scorer: Scorer) -> None:
        base = scorer.base
        lengths = np.array([len(row.token_ids) for row in rows])
        starts: Ints = np.cumsum(lengths) - lengths
        ids_P = np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows])
        place_P = np.concatenate([np.arange(length) for length in lengths])
        place_T = starts[counted.row_T] + counted.at_T
        self._ids_P, self._place_P, self._lengths = (
            torch.from_numpy(x).to(base.device) for x in (ids_P, place_P, lengths.astype(np.int32))
        )
        self._predict(rows, counted, place_T, ids_P[place_T], base)
        self.tokens = self.alive = len(ids_P)

    def _inputs(self, scorer: Scorer) -> dict[str, Tensor]:
        return {
            "input_ids": self._ids_P[None],
            "position_ids": self._place_P[None],
            "packed_seq_lengths": self._lengths,
        }


class UnslothPacker(Packer):
    """A `Packer` that lays rows end to end where the model takes no forest but keeps rows apart."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        #: Why rows without a forest are padded and not laid end to end; None: they are laid so.
        self.apart_because = self._mixed() if self.padded_because else None
        if self.padded_because and self.apart_because is None:
            self.layout = "rows end to end"
        self._told = False

    def pack_to_learn(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> Packing:
        """See `Packer`. The first time, the log says which learner is likely the faster one."""
        packing = super().pack_to_learn(rows, counted, budget)
        if self.padded_because and rows and not self._told:
            self._told = True
            log.warning("%s", faster_learner(rows))
        return packing

    def _mixed(self) -> str | None:
        """Reason why rows in one sequence are not as each to itself, if they are not."""
        base = self._scorer.base
        if why := excluded_by_config(base):
            return why
        try:
            for offsets, _ in compared_rows(base):
                if why := gap_of(self._scorer, offsets, PackedRows):
                    return why
        except torch.OutOfMemoryError:
            raise  # not a property of the model
        except (OddAttentionError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            log.debug("Rows cannot be laid end to end.", exc_info=True)
            return str(error) or type(error).__name__
        return None

    def _padded_groups(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        lengths = [len(row.token_ids) for row in rows]
        return super()._padded_groups(rows, budget) if self.apart_because else fill(lengths, budget)

    def _without_forest(self, rows: Sequence[Row], counted: CountedTokens) -> Packing:
        if self.apart_because:
            return super()._without_forest(rows, counted)
        return PackedRows(rows, counted, self._scorer)


def faster_learner(rows: Sequence[Row]) -> str:
    """Learner that is likely the faster one for such rows, and why."""
    total = sum(len(row.token_ids) for row in rows)
    distinct = len(grow([row.token_ids for row in rows]).token_ids_N)
    found = f"Of the {total} tokens of this step's rows {distinct} are distinct"
    if total > SPEEDUP * distinct:
        return (
            f"{found}, and Unsloth's model computes all of them: [learner] kind = 'peft', which "
            f"computes the distinct ones, is likely faster. Unsloth's kernels would have to be "
            f"{total / distinct:.1f} times as fast."
        )
    return f"{found}: Unsloth's kernels are likely faster than [learner] kind = 'peft' here."


def fill(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows by groups of at most so many tokens: the longest first, each where there is room.

    A row longer than that goes alone. Example: ``fill([3, 9, 4, 6], 10)`` gives
    ``[[1], [3, 2], [0]]``.
    """
    groups: list[list[int]] = []
    sums: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        at = next((at for at, used in enumerate(sums) if used + length <= tokens), None)
        if at is None:
            groups.append([index])
            sums.append(length)
        else:
            groups[at].append(index)
            sums[at] += length
    return groups
