"""Multi-LoRA: several adapters beside the base weights, each row of a batch routed to its own.

``y = W x + B' (A x)`` with ``B' = (alpha / r) · B``, unmerged, in the dtype (`lora_dtype`) in which
the learner computes it by PEFT. Where ``alpha / r`` is a power of two, as it is by default, these
are PEFT's own roundings, so that the sampler's logprobs equal the learner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from langchain_art_server.backends.embedded.batch_invariance import (
    RowLinear,
    flat_rows,
    shaped_rows,
)
from langchain_art_server.backends.models.adapter_files import LoadedAdapter
from langchain_art_server.backends.models.adapter_reader import (
    linear_layers,
    lora_dtype,
    read_adapter,
)


@dataclass(eq=False, kw_only=True)
class RoutedAdapter(LoadedAdapter):
    """An adapter whose weights are in the layers `modules`, with its `root` in the prefix cache."""

    root: int
    modules: tuple[str, ...]


#: Per adapter of the next forward pass, the indices of its rows; None: all rows.
RowGroups = list[tuple[RoutedAdapter, Tensor | None]]


class LoraLinear(nn.Module):
    """A linear layer with the low-rank pairs of every adapter that targets it."""

    def __init__(self, base: nn.Linear, groups: RowGroups) -> None:
        super().__init__()
        self.base, self.groups = base, groups
        self.fewest = base.fewest if isinstance(base, RowLinear) else 1
        self.pairs: dict[RoutedAdapter, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, …, in]`` -> ``[rows, …, out]``."""
        y = self.base(x)
        for adapter, rows in self.groups:
            if (pair := self.pairs.get(adapter)) is None:
                continue
            down, up = pair
            mine = x if rows is None else x[rows]
            flat = flat_rows(mine.to(down.dtype), self.fewest)
            delta = shaped_rows(flat @ down @ up, mine)
            if rows is None:
                y += delta
            else:
                y[rows] += delta
        return y


class AdapterBank:
    """The adapters of one model. A linear layer is wrapped when the first adapter needs it."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model, self._device, self._dtype = model, device, model.dtype
        self._linears = linear_layers(model)
        self._wrapped: dict[str, LoraLinear] = {}
        self._groups: RowGroups = []

    def load(self, name: str, path: Path, root: int) -> RoutedAdapter:
        """Load an adapter's directory. Raises ConfigError, see `read_adapter`."""
        weights = read_adapter(path, self._linears)
        modules = tuple(weights.pairs)
        adapter = RoutedAdapter(name=name, path=path, root=root, modules=modules)
        for module, (down, up) in weights.pairs.items():
            layer = self._wrapped.get(module) or self._wrap(module)
            dtype = lora_dtype(self._dtype, down.dtype)
            if len(down) == 1:  # products with one column add up in another order in each batch
                down, up = (
                    torch.cat([part, torch.zeros_like(part)], i)
                    for i, part in enumerate((down, up))
                )
            # Scaled and transposed once: y = x @ A^T @ B'^T.
            up = weights.scaling * up
            down, up = (part.to(self._device, dtype).t() for part in (down, up))
            layer.pairs[adapter] = (down, up)
        return adapter

    def unload(self, adapter: RoutedAdapter) -> None:
        """Free an adapter's weights."""
        for module in adapter.modules:
            self._wrapped[module].pairs.pop(adapter, None)

    def route(self, adapters: Sequence[RoutedAdapter | None]) -> None:
        """Route the next forward pass: entry i is the adapter of row i, None the base model."""
        rows: dict[RoutedAdapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        self._groups[:] = [
            (a, None if len(r) == len(adapters) else torch.tensor(r, device=self._device))
            for a, r in rows.items()
        ]

    def _wrap(self, module: str) -> LoraLinear:
        layer = self._wrapped[module] = LoraLinear(self._linears[module], self._groups)
        parent, _, child = module.rpartition(".")
        setattr(self._model.get_submodule(parent), child, layer)
        return layer
