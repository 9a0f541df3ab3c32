"""Packing of rows as a token forest: common prefixes are computed once. Child side only.

Index suffixes as in `prefix_forest`, `attention_tiles` and `logprob_scoring`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from langchain_art_server.algorithms.sequences.prefix_forest import (
    Ints,
    Part,
    PartCosts,
    lay_out,
    most_alive,
)
from langchain_art_server.algorithms.sequences.token_sets import column
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.models.base_weights import text_weights
from langchain_art_server.backends.models.delta_nets import delta_nets
from langchain_art_server.backends.models.images import Images, placed
from langchain_art_server.backends.peft.forest.attention_flex import Blocks
from langchain_art_server.backends.peft.forest.attention_tiles import KeysValues, Tiles
from langchain_art_server.backends.peft.forest.delta_nets import Chains, PartChains
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    Predictions,
    Progress,
    ScoredBatch,
    Scorer,
    TermPredictions,
    Visit,
    report,
    visit_terms,
)
from langchain_art_server.backends.peft.recompute import Turned

PIECE = 50  # see `token_cost`; measured on CPU
#: The name under which transformers finds `forest_attention`.
FOREST_ATTENTION = "langchain_art_forest"
#: Options of transformers that ask more of attention than causality.
ODD_OPTIONS = ("softcap", "position_bias")


class ForestPass:
    """Tensors that layers take from parts above and leave to those below, in one forward pass.

    No dataclass: FSDP looks for tensors in dataclasses, and gives the layers copies of them. With
    `keep`, other parts attend to this one.
    """

    def __init__(self, attention: Tiles | Blocks, chains: PartChains | None, *, keep: bool) -> None:
        self.attention, self.chains = attention, chains
        #: For each layer, keys and values of the tokens above, or of a delta net the convolution's
        #: inputs and the states; empty if there are none.
        self.above: dict[int, KeysValues] = {}
        #: For each layer, those of the part itself, if other parts attend to it; else None.
        self.kept: dict[int, KeysValues] | None = {} if keep else None
        #: Inputs of the convolutions, for each layer that has one.
        self.mixed: dict[int, Tensor] = {}
        #: For each layer that computes queries and keys again, what does.
        self.turned: dict[int, Turned] = {}
        #: The layers that ran so, with the windows to which they attended.
        self.ran: dict[int, int | None] = {}

    def check(self, windows: Sequence[int | None]) -> None:
        """Raises OddAttentionError unless the attention ran in each layer, with these windows."""
        if len(self.ran) != len(windows):
            raise OddAttentionError(
                f"its attention ran in {len(self.ran)} of {len(windows)} layers; the others "
                "ignore it"
            )
        if (ran := [self.ran[layer] for layer in range(len(windows))]) != [*windows]:
            raise OddAttentionError(f"its layers' windows are {ran}, its config's {[*windows]}")


class OddAttentionError(Exception):
    """The architecture's attention is not plain causal attention."""


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    forest: ForestPass | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls, for the part that its forward was given.

    Queries (1, H, P, D), keys and values (1, K, P, D), with positions encoded, give (1, P, H, D)
    and no attention weights. `scaling` None is 1 / sqrt(D).

    Raises OddAttentionError: the architecture needs another kind of attention.
    """
    layer = getattr(module, "layer_idx", None)
    if odd := ", ".join(name for name in ODD_OPTIONS if options.get(name) is not None):
        raise OddAttentionError(f"its attention has {odd}")
    if options.get("dropout") or attention_mask is not None or not isinstance(layer, int):
        raise OddAttentionError("its attention has a mask, dropout or no layer index")
    if forest is None:
        raise OddAttentionError("it does not pass options on to its attention")
    window = forest.ran[layer] = options.get("sliding_window")
    if forest.kept is not None:
        # Gradient checkpointing computes a layer twice: the first time counts.
        forest.kept.setdefault(layer, (key[0], value[0]))
    above_k = None
    if layer in forest.above:
        above_k, above_v = forest.above[layer]
        key, value = torch.cat([above_k[None], key], 2), torch.cat([above_v[None], value], 2)
    turned = forest.turned.pop(layer, None)
    if turned is not None:
        query, key = forest.attention.lay(query), forest.attention.lay(key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = options.get("s_aux")
    out = forest.attention.attend(query, key, value, scale, window, sinks)
    if turned is not None:
        turned.forget(out, [(query, None), *([(key, above_k)] if forest.kept is None else [])])
    return out, None


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """The window of each layer in tokens, by a text model's config; None: it attends to all."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


AttentionInterface.register(FOREST_ATTENTION, forest_attention)


@dataclass(frozen=True)
class _ForestPart:
    """A part of the forest in tensors: one micro-batch."""

    parent: int  # index of the part below which it hangs, -1 for none
    last: bool  # no part hangs below it
    ids_P: Tensor
    positions: Tensor  # of its tokens (1, P), or in three dimensions (3, 1, P)
    attention: Tiles | Blocks  # which tokens attend to which
    above: dict[int, tuple[Tensor, Tensor]]
    """For each part that it attends to, which of its keys and values."""
    chains: PartChains | None  # of delta nets
    predictions: Predictions  # tokens that follow tokens of the part
    terms_T: Tensor  # the terms of all calls that end in the part
    shares: dict[int, TermPredictions]
    """Terms of these that each part (itself or one above) predicts."""


class ForestRows:
    """Rows as a forest in parts (`prefix_forest.lay_out`).

    Of the rows, at least one token is scored (`counted`). A row ends before its last scored one.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        counted: CountedTokens,
        budget: int,
        token_cost: float,
        model: PreTrainedModel,
        costs: PartCosts,
        images: Images | None = None,
    ) -> None:
        dtype, device = model.dtype, model.device

        def tensor(array: Ints) -> Tensor:
            return torch.from_numpy(array).to(device)

        lengths = np.zeros(len(rows), dtype=np.int64)
        np.maximum.at(lengths, counted.row_T, counted.at_T)
        kept = np.flatnonzero(lengths)
        inputs = [rows[i].token_ids[: lengths[i]] for i in kept.tolist()]
        forest, parts = lay_out(inputs, token_cost, budget, costs)
        positions, last_N = forest.depth_N[None], np.arange(len(forest.token_ids_N))
        for i, places in zip(kept.tolist(), forest.rows, strict=True):
            shifts = None if images is None else images.shifts(rows[i].token_ids)
            if shifts is None:
                continue
            positions = placed(positions, 0, places, shifts)
            last_N[places] = places + shifts[3, : len(places)]
        self.parts = [len(part.tokens_P) for part in parts]
        self.tokens, self.alive = len(forest.token_ids_N), most_alive(parts)
        first = np.cumsum(lengths) - lengths
        previous_T = np.concatenate(forest.rows)[first[counted.row_T] + counted.at_T - 1]
        targets_T = counted.column([row.token_ids for row in rows]).astype(np.int64)
        temperature_T = np.array([row.temperature for row in rows])[counted.row_T]
        drawn_from = column([row.drawn_from for row in rows], counted.row_T, counted.at_T)
        part_N, local_N = _places(parts, self.tokens)
        part_T, prediction_T = part_N[previous_T], np.empty(len(previous_T), dtype=np.int64)
        # A call's terms are visited together, in the part of its last one: its other terms are in
        # that part or in parts above it, which are still alive then.
        last_T = np.append(np.flatnonzero(np.diff(counted.call_T)), len(part_T) - 1)[counted.call_T]
        predicted, visited = (_grouped(x_T, len(parts)) for x_T in (part_T, part_T[last_T]))
        taps = [layer.conv1d.kernel_size[0] for layer in delta_nets(model)]
        chains = Chains(forest, part_N, local_N, max(taps)) if taps else None
        self._batches: list[_ForestPart] = []
        for index, (part, at_T, visit_T) in enumerate(zip(parts, predicted, visited, strict=True)):
            predictions, prediction_T[at_T] = Predictions.merged(
                local_N[previous_T[at_T]],
                targets_T[at_T],
                temperature_T[at_T],
                drawn_from and drawn_from.at(at_T),
                model,
            )
            # Part by part, as their keys are put together.
            above_E = part.above_E[np.argsort(part_N[part.above_E], kind="stable")]
            above_part_E, visit_part_T = part_N[above_E], part_T[visit_T]
            above = {
                owner: tensor(local_N[above_E[above_part_E == owner]])
                for owner in np.unique(above_part_E).tolist()
            }
            self._batches.append(
                _ForestPart(
                    parent=part.parent,
                    last=index + 1 == len(parts) or parts[index + 1].parent != index,
                    ids_P=tensor(forest.token_ids_N[part.tokens_P]),
                    positions=tensor(positions[..., part.tokens_P]),
                    attention=Tiles(part.tokens_P, above_E, forest, dtype, last_N)
                    if device.type == "cpu"
                    else Blocks(part.tokens_P, above_E, forest, device, last_N),
                    above={owner: (tokens, tokens) for owner, tokens in above.items()},
                    chains=chains and chains.of(index, part.tokens_P, device),
                    predictions=predictions,
                    terms_T=tensor(visit_T),
                    shares={
                        owner: TermPredictions(
                            tensor(np.flatnonzero(visit_part_T == owner)),
                            tensor(prediction_T[visit_T[visit_part_T == owner]]),
                        )
                        for owner in np.unique(visit_part_T).tolist()
                    },
                )
            )

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """See `Packing`."""
        alive: list[_OpenPart] = []
        for index, batch in enumerate(self._batches):
            while alive and alive[-1].index != batch.parent:
                alive.pop().backward()
            report(progress, index, len(self._batches))
            alive.append(_OpenPart(index, batch, scorer, alive))
            scored = {one.index: one.scored for one in alive}
            shares = [(scored[part], share) for part, share in batch.shares.items()]
            visit_terms(visit, batch.terms_T, shares)
        while alive:
            alive.pop().backward()


class _OpenPart:
    """A part between its forward and its backward pass."""

    def __init__(
        self, index: int, batch: _ForestPart, scorer: Scorer, alive: list[_OpenPart]
    ) -> None:
        self.index = index
        chains = batch.chains
        self._pass = ForestPass(batch.attention, chains, keep=not batch.last)
        attended = [(a, batch.above[a.index]) for a in alive if a.index in batch.above]
        continued = [
            (a, chains.above[a.index]) for a in alive if chains and a.index in chains.above
        ]
        #: For each layer, the parts above from which it takes, and what.
        self._sources: dict[int, list[tuple[_OpenPart, tuple[Tensor, Tensor]]]] = {
            layer: continued if layer in attended[0][0]._pass.mixed else attended
            for layer in (attended[0][0].layers if attended else ())
        }
        for layer, sources in self._sources.items():
            self._pass.above[layer] = _gather(layer, sources)
        inputs = {
            "input_ids": batch.ids_P[None],
            "position_ids": batch.positions,
            "forest": self._pass,
        }
        outputs_MX = scorer.outputs(inputs, batch.predictions.select_M)
        self._pass.check(windows_of(scorer.base.config.get_text_config()))
        self.scored = ScoredBatch(scorer, outputs_MX, batch.predictions, soon=batch.last)
        self._grads: dict[int, KeysValues] = {}

    @property
    def layers(self) -> dict[int, KeysValues]:
        """Keys and values of the part, by layer."""
        return self._pass.kept or {}

    def backward(self) -> None:
        """The part's backward pass, with the gradients that the parts below it have left."""
        inner: list[tuple[Tensor, Tensor]] = []
        for layer, grads in self._grads.items():
            inner.extend(zip(self.layers[layer], grads, strict=True))
        if not self.scored.backward(inner):
            return
        for layer, (key, value) in self._pass.above.items():
            if key.grad is None or value.grad is None:
                continue
            sources = self._sources[layer]
            pieces = zip(
                *(
                    grad.split([len(taken[i]) for _, taken in sources], 1)
                    for i, grad in enumerate((key.grad, value.grad))
                ),
                strict=True,
            )
            for (source, taken), grads in zip(sources, pieces, strict=True):
                source._receive(layer, taken, grads)

    def _receive(self, layer: int, taken: tuple[Tensor, Tensor], grads: KeysValues) -> None:
        if layer not in self._grads:
            key, value = self.layers[layer]
            self._grads[layer] = torch.zeros_like(key), torch.zeros_like(value)
        for into, which, grad in zip(self._grads[layer], taken, grads, strict=True):
            into.index_add_(1, which, grad)


def _gather(layer: int, sources: list[tuple[_OpenPart, tuple[Tensor, Tensor]]]) -> KeysValues:
    """Keys and values above a part, as leaves of autograd."""
    keys, values = (
        torch.cat(
            [part.layers[layer][i].detach().index_select(1, taken[i]) for part, taken in sources], 1
        )
        for i in (0, 1)
    )
    wanted = any(source.layers[layer][0].requires_grad for source, _ in sources)
    return keys.requires_grad_(wanted), values.requires_grad_(wanted)


def token_cost(base: PreTrainedModel) -> float:
    """The `token_cost` of `prefix_forest.grow` for a model.

    A token's work in a layer is proportional to the layer's parameters. To attend to one more
    piece, of any length, costs as much as `PIECE` parameters per number of the token's output.
    """
    config = base.config.get_text_config()
    queries, _ = attention_widths(config)
    return text_weights(base) / config.num_hidden_layers / (PIECE * queries)


def attention_widths(config: PreTrainedConfig) -> tuple[float, float]:
    """Numbers in a token's queries, and in its keys, of a text model's layers on average."""
    differ = getattr(config, "is_heterogeneous", False)
    found: list[tuple[int, int]] = []
    for one in config.per_layer_config if differ else [config]:
        heads: int = one.num_attention_heads
        width: int = getattr(one, "head_dim", None) or one.hidden_size // heads
        keys: int = getattr(one, "num_key_value_heads", None) or heads
        found.append((heads * width, keys * width))
    queries, keys_ = zip(*found, strict=True)
    return fmean(queries), fmean(keys_)


def _places(parts: list[Part], tokens: int) -> tuple[Ints, Ints]:
    part_N, local_N = np.empty(tokens, dtype=np.int64), np.empty(tokens, dtype=np.int64)
    for index, part in enumerate(parts):
        part_N[part.tokens_P] = index
        local_N[part.tokens_P] = np.arange(len(part.tokens_P))
    return part_N, local_N


def _grouped(part_T: Ints, parts: int) -> list[Ints]:
    """The terms of each part, ascending."""
    order = np.argsort(part_T, kind="stable")
    return np.split(order, np.searchsorted(part_T[order], np.arange(1, parts)))
