"""The attention function that transformers calls for a part of a token forest. Child side only.

It hands over to `attention_tiles` on a CPU and to `attention_flex` on a GPU, with the keys and
values of the tokens above the part in front of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from langchain_art_server.backends.peft.forest.attention_flex import Blocks
from langchain_art_server.backends.peft.forest.attention_tiles import KeysValues, Tiles

#: The name under which transformers finds `forest_attention`.
FOREST_ATTENTION = "langchain_art_forest"
#: Options of transformers that ask more of attention than causality.
ODD_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")


class ForestPass:
    """Input and output of the attention layers in one forward pass of a part.

    No dataclass: FSDP looks for tensors in dataclasses, and gives the layers copies of them. With
    `keep`, other parts attend to this one.
    """

    def __init__(self, attention: Tiles | Blocks, *, keep: bool) -> None:
        self.attention = attention
        #: For each layer, keys and values of the tokens above; empty if there are none.
        self.above: dict[int, KeysValues] = {}
        #: For each layer, those of the part itself, if other parts attend to it; else None.
        self.kept: dict[int, KeysValues] | None = {} if keep else None
        #: The layers in which the attention ran.
        self.ran: set[int] = set()

    def check(self, layers: int) -> None:
        """Raises OddAttentionError unless the attention ran in each of so many layers."""
        if len(self.ran) != layers:
            raise OddAttentionError(
                f"its attention ran in {len(self.ran)} of {layers} layers; the others ignore it"
            )


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

    Raises:
        OddAttentionError: the architecture needs another kind of attention.
    """
    layer = getattr(module, "layer_idx", None)
    if odd := ", ".join(name for name in ODD_OPTIONS if options.get(name) is not None):
        raise OddAttentionError(f"its attention has {odd}")
    if options.get("dropout") or attention_mask is not None or not isinstance(layer, int):
        raise OddAttentionError("its attention has a mask, dropout or no layer index")
    if forest is None:
        raise OddAttentionError("it does not pass options on to its attention")
    forest.ran.add(layer)
    if forest.kept is not None:
        # Gradient checkpointing computes a layer twice: the first time counts.
        forest.kept.setdefault(layer, (key[0], value[0]))
    if layer in forest.above:
        above_k, above_v = forest.above[layer]
        key, value = torch.cat([above_k[None], key], 2), torch.cat([above_v[None], value], 2)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return forest.attention.attend(query, key, value, scale), None


AttentionInterface.register(FOREST_ATTENTION, forest_attention)
