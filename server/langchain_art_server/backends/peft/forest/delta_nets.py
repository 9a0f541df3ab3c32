"""Gated delta nets over a token forest: each path has its own recurrent state. Child side only.

A token mixes with those before it by a short convolution and a recurrent state alone, so the
forest is cut into pieces without a branch. A piece begins with the state that its parent piece
ended with, and with the convolution's inputs of the last tokens of its path; pieces of one depth
are computed together. Gradients go back the same way, through the states.

Index suffixes: N tokens of the forest, P of the part, K taps of the convolution, C its channels,
H heads, D numbers per head, B pieces of a batch, L their tokens, S states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.activations import ACT2FN

from langchain_art_server.algorithms.sequences.prefix_forest import Forest, Ints
from langchain_art_server.backends.models.delta_nets import CONVOLUTION, RULE, divert

if TYPE_CHECKING:
    from langchain_art_server.backends.peft.forest.packing import ForestPass

_CHUNK = 64  # tokens that the rule computes at once; pieces are padded to as many


@dataclass(frozen=True)
class _Batch:
    """Pieces of one depth and of about one length."""

    tokens_BL: Tensor  # in the part, padded
    real_BL: Tensor  # which are not padding
    begin_B: Tensor  # the states with which they begin
    lasting: Tensor  # of B, those with whose state others begin


@dataclass(frozen=True)
class PartChains:
    """Predecessors of a part's tokens: inputs of the convolution, and states.

    States are numbered: zero, then those above the part, then those of its pieces.
    """

    before_PK: Tensor  # the convolution's inputs: 0 for none, then tokens above, then the part's
    batches: list[_Batch]
    place_P: Tensor  # of each token in the batches' padded tokens, one behind the other
    kept_S: Tensor  # the states with which pieces of other parts begin
    above: dict[int, tuple[Tensor, Tensor]]
    """By part above: which of its tokens the convolution needs, and which of its kept states."""


class Chains:
    """The pieces of a forest in parts.

    `part_N` and `local_N` are the part of each token, and its place there; `taps` those of the
    convolution, the token's own included.
    """

    def __init__(self, forest: Forest, part_N: Ints, local_N: Ints, taps: int) -> None:
        count = len(part_N)
        self._part_N, self._local_N, self._taps = part_N, local_N, taps
        parent_N = np.arange(-1, count - 1)
        for segment in forest.segments:
            above = segment.parent
            parent_N[segment.start] = forest.segments[above].end - 1 if above >= 0 else -1
        starts_N = parent_N != np.arange(-1, count - 1)
        starts_N[0], starts_N[1:] = True, starts_N[1:] | (np.diff(part_N) != 0)
        branches = parent_N[starts_N]
        after = branches[branches >= 0] + 1
        after = after[after < count]
        starts_N[after] = True
        starts = np.flatnonzero(starts_N)
        piece_N = np.cumsum(starts_N) - 1
        self._starts, self._ends = starts, np.append(starts[1:], count)
        above_N = parent_N[starts]
        self._parents = np.where(above_N >= 0, piece_N[above_N], -1)
        self._part = part_N[starts]
        self._parent_N = parent_N
        abroad = (self._parents >= 0) & (self._part != self._part[self._parents])
        #: Of each piece, the number of its state among those that its part keeps; -1: none.
        self._kept = np.full(len(starts), -1)
        kept = self._by_part(np.unique(self._parents[abroad]), self._part)
        part_S = self._part[kept]
        self._kept[kept] = np.arange(len(kept)) - np.searchsorted(part_S, part_S)

    def of(self, part: int, tokens_P: Ints, device: torch.device) -> PartChains:
        """Those of a part."""

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        taps_PK = np.empty((len(tokens_P), self._taps), dtype=np.int64)
        taps_PK[:, -1] = tokens_P
        for tap in range(self._taps - 2, -1, -1):
            later = taps_PK[:, tap + 1]
            taps_PK[:, tap] = np.where(later >= 0, self._parent_N[later], -1)
        own_PK = (taps_PK >= 0) & (self._part_N[taps_PK] == part)
        others_PK = (taps_PK >= 0) & ~own_PK
        foreign = self._by_part(np.unique(taps_PK[others_PK]), self._part_N)
        before_PK = np.where(own_PK, 1 + len(foreign) + self._local_N[taps_PK], 0)
        sorted_at = np.argsort(foreign)
        found = np.searchsorted(foreign, taps_PK[others_PK], sorter=sorted_at)
        before_PK[others_PK] = 1 + sorted_at[found]

        pieces = np.flatnonzero(self._part == part)
        parents = self._parents[pieces]
        outside = (parents >= 0) & (self._part[parents] != part)
        states = self._by_part(np.unique(parents[outside]), self._part)
        number = {int(piece): 1 + at for at, piece in enumerate(states)} | {-1: 0}
        depth: dict[int, int] = {}
        for piece, parent in zip(pieces.tolist(), parents.tolist(), strict=True):
            depth[piece] = depth.get(parent, -1) + 1
        lasting = set(parents[~outside].tolist()) | set(pieces[self._kept[pieces] >= 0].tolist())
        sizes = -(-(self._ends - self._starts) // _CHUNK)
        groups: dict[tuple[int, int], list[int]] = {}
        for piece in pieces.tolist():
            key = depth[piece], (int(sizes[piece]) - 1).bit_length()
            groups.setdefault(key, []).append(piece)
        batches: list[_Batch] = []
        place_P, offset = np.empty(len(tokens_P), dtype=np.int64), 0
        for _, batch in sorted(groups.items()):
            lengths = self._ends[batch] - self._starts[batch]
            width, first = int(lengths.max()), self._local_N[self._starts[batch]]
            column = np.arange(width)
            real_BL = column < lengths[:, None]
            tokens_BL = np.where(real_BL, first[:, None] + column, first[:, None])
            at_BL = offset + np.arange(len(batch))[:, None] * width + column
            place_P[tokens_BL[real_BL]] = at_BL[real_BL]
            offset += len(batch) * width
            begin = [number[int(self._parents[piece])] for piece in batch]
            last = [at for at, piece in enumerate(batch) if piece in lasting]
            for at in last:
                number[batch[at]] = len(number)
            batches.append(
                _Batch(
                    tensor(tokens_BL),
                    tensor(real_BL),
                    tensor(np.array(begin, dtype=np.int64)),
                    tensor(np.array(last, dtype=np.int64)),
                )
            )
        kept = pieces[self._kept[pieces] >= 0]
        kept = kept[np.argsort(self._kept[kept])]
        owners = np.unique(self._part_N[foreign]).tolist()
        return PartChains(
            before_PK=tensor(before_PK),
            batches=batches,
            place_P=tensor(place_P),
            kept_S=tensor(np.array([number[int(piece)] for piece in kept], dtype=np.int64)),
            above={
                owner: (
                    tensor(self._local_N[foreign[self._part_N[foreign] == owner]]),
                    tensor(self._kept[states[self._part[states] == owner]]),
                )
                for owner in owners
            },
        )

    @staticmethod
    def _by_part(these: Ints, part: Ints) -> Ints:
        return these[np.argsort(part[these], kind="stable")]


def install(layers: list[Any]) -> None:
    """Let these layers take a forest."""
    for layer in layers:
        divert(layer, CONVOLUTION, "forest", _convolve)
        divert(layer, RULE, "forest", _compute)
        if not hasattr(layer, "takes_forest"):
            layer.register_forward_pre_hook(_bind, with_kwargs=True)
            layer.takes_forest = True


def _bind(layer: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The functions get no number of their layer; also when checkpointing computes it again."""
    forest = options.get("forest")
    return args, options | {"forest": (forest, layer.layer_idx)} if forest else options


def _convolve(
    _original: Callable[..., Tensor],
    forest: tuple[ForestPass, int],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_options: Any,
) -> Tensor:
    one, layer = forest
    assert one.chains is not None
    x_PC = hidden_states[0].T
    one.mixed[layer] = x_PC[None]
    above = [one.above[layer][0][0]] if layer in one.above else []
    x_EC = torch.cat([x_PC.new_zeros(1, x_PC.shape[1]), *above, x_PC])
    taps_PKC = x_EC[one.chains.before_PK].to(weight.dtype)
    out_PC = torch.einsum("pkc,ck->pc", taps_PKC, weight)
    out_PC = out_PC if bias is None else out_PC + bias
    out_PC = out_PC if activation is None else ACT2FN[activation](out_PC)
    return out_PC.T[None].to(hidden_states.dtype)


def _compute(
    original: Callable[..., tuple[Tensor, Tensor]],
    forest: tuple[ForestPass, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    one, layer = forest
    chains, keep = one.chains, one.kept
    assert chains is not None
    options |= {"output_final_state": True}
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    shape = (1, value.shape[2], key.shape[3], value.shape[3])
    above = [one.above[layer][1][0]] if layer in one.above else []
    state_SHDD = torch.cat([value.new_zeros(shape, dtype=wide), *above])
    found: list[Tensor] = []
    for batch in chains.batches:
        q, k, v, decay, write = (x[0][batch.tokens_BL] for x in (query, key, value, g, beta))
        real_BL1 = batch.real_BL[..., None]  # padding leaves the state as it is
        options["initial_state"] = state_SHDD[batch.begin_B]
        out_BLHD, end_BHDD = original(q, k, v, g=decay * real_BL1, beta=write * real_BL1, **options)
        found.append(out_BLHD.flatten(0, 1))
        if len(batch.lasting):
            state_SHDD = torch.cat([state_SHDD, end_BHDD[batch.lasting]])
    one.ran[layer] = None
    if keep is not None:  # the first time counts, and the second must save as many tensors
        keep.setdefault(layer, (one.mixed[layer], state_SHDD[chains.kept_S][None]))
    return torch.cat(found)[chains.place_P][None], None
