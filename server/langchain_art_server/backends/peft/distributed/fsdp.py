"""A base model whose layers lie in parts on several ranks: FSDP2. Child side only.

PyTorch's `fully_shard` (arXiv 2304.11277, in its form for single parameters) cuts each decoder
layer's weights into as many parts as there are ranks. A rank gathers a layer before it computes
with it and forgets the others' parts behind it, on the way there and on the way back. So each way
is one of all ranks (`Ranks.on_way`), and a rank that has nothing to compute gives its parts alone.

Not cut: LoRA's parameters, which are put on later; embeddings, output head and last norm, whose
weights are read outside of the model's forward (logits are made piece by piece, and head and
embeddings may be one tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from langchain_art.errors import ConfigError
from langchain_art_server.backends.peft.distributed.process_group import Ranks, Way
from langchain_art_server.backends.peft.logprob_scoring import Scorer
from langchain_art_server.backends.peft.packer import Packer
from langchain_art_server.backends.peft.padded_rows import load_base


def decoder_layers(base: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, in order."""
    return [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]


def sharded_base(model: str, dtype: torch.dtype, ranks: Ranks) -> PreTrainedModel:
    """The base model, frozen, this rank's part of its layers on the rank's device.

    The files are mapped into memory and go to the device layer by layer, so that no device ever
    holds more than its part and one layer.

    Args:
        model: hub name or local path.
        dtype: of the weights.
        ranks: all of which must come here.

    Raises:
        ConfigError: it cannot be loaded, or its layers cannot be told from the rest or be cut.
    """
    base = load_base(model, dtype, torch.device("cpu"))
    layers = decoder_layers(base)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    if not inside:
        raise ConfigError(
            f"got learner.shard=true with {type(base).__name__}, which has no layers that "
            "transformers can checkpoint one by one; expected an architecture that has, or "
            "shard=false"
        )
    whole = [p for p in base.parameters() if id(p) not in inside]
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    try:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(base.base_model, mesh=mesh, ignored_params=set(whole))
    except ValueError as error:
        raise ConfigError(f"the layers of {model!r} cannot be cut into parts: {error}") from error
    for tensor in (*whole, *base.buffers()):
        tensor.data = tensor.data.to(ranks.device)
    return base


def sharded_forward(base: PreTrainedModel, ranks: Ranks) -> tuple[ShardedScorer, ShardedPacker]:
    """How rows go through a model in parts. All ranks must come here.

    Args:
        base: what `sharded_base` gave.
        ranks: that hold it.

    Raises:
        ConfigError: the architecture goes through one layer several times.
    """
    # Several ways, the same on each rank. If one fails for a rank alone, the others would wait.
    with ranks.on_way(Way.THERE):
        scorer = ShardedScorer(base, ranks, _running_order(base))
        packer = ShardedPacker(scorer)
    scorer.in_step = True
    return scorer, packer


def _running_order(base: PreTrainedModel) -> list[FSDPModule]:
    """The layers that text goes through, in order; those of a model's eyes, say, are left out."""
    order: list[FSDPModule] = []

    def note(layer: nn.Module, _args: object) -> None:
        order.append(cast(FSDPModule, layer))

    hooks = [layer.register_forward_pre_hook(note) for layer in decoder_layers(base)]
    with torch.no_grad():
        base(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=base.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    if len(set(order)) < len(order):
        raise ConfigError(
            f"got learner.shard=true with {type(base).__name__}, which goes through one layer "
            "several times, expected an architecture that does not, or shard=false"
        )
    # By itself, FSDP fetches ahead what came before in the list of all ways, which may be of
    # another one. The first layer names itself: an empty list would mean FSDP's own choice.
    for layer, before in zip(order, [order[0], *order], strict=False):
        layer.set_modules_to_backward_prefetch([before])
    return order


class ShardedScorer(Scorer):
    """A `Scorer` whose ways through the model are ways of all ranks.

    Args:
        base: what `sharded_base` gave.
        ranks: that hold it.
        layers: that every way goes through, in order.

    Attributes:
        in_step: the ranks tell each other of each way before they take it; while it is False,
            they must take the same ones.
    """

    def __init__(self, base: PreTrainedModel, ranks: Ranks, layers: list[FSDPModule]) -> None:
        super().__init__(base)
        self._ranks, self._layers = ranks, layers
        self.in_step = False
        ranks.idle = self._gather

    def outputs(self, inputs: dict[str, Any], select_M: Tensor) -> Tensor:
        """See `Scorer.outputs`."""
        if not self.in_step:
            return super().outputs(inputs, select_M)
        with self._ranks.on_way(Way.THERE):
            return super().outputs(inputs, select_M)

    def backward(self, outputs_MX: Tensor, ends: Sequence[tuple[Tensor, Tensor]]) -> None:
        """See `Scorer.backward`."""
        if all(end is not outputs_MX for end, _ in ends):
            # A layer is gathered when a gradient comes to its output. Keys and values are within.
            ends = [(outputs_MX, torch.zeros_like(outputs_MX)), *ends]
        with self._ranks.on_way(Way.BACK):
            super().backward(outputs_MX, ends)

    def _gather(self, way: Way) -> None:
        """What a way is to a rank that has nothing to compute: layer by layer, its part."""
        layers = self._layers
        if way is Way.BACK:
            # Gradients end in the lowest layer with LoRA, and the one below is fetched ahead.
            learns = [
                any(p.requires_grad for p in cast(nn.Module, layer).parameters())
                for layer in layers
            ]
            layers = layers[max(0, learns.index(True) - 1) :][::-1]
        for layer in layers:
            layer.unshard()
            layer.reshard()


class ShardedPacker(Packer):
    """A `Packer` that knows whole weights from activations.

    Args:
        scorer: of the model.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        # A trial that failed has left FSDP in the middle of a layer.
        cast(FSDPModule, scorer.base.base_model).reset_iter_state()
        self._known: set[int] = set()

    def _weights(self) -> set[int]:
        return self._known

    def _measure(self) -> float:
        self._known = _addresses(self._scorer.model)
        layer_weights: list[set[int]] = []

        def gathered(layer: nn.Module, _args: object) -> None:
            layer_weights.append(_addresses(layer) - self._known)
            self._known |= layer_weights[-1]

        def forgotten(_layer: nn.Module, _args: object, _outputs: object) -> None:
            self._known -= layer_weights.pop()  # activations may lie there next

        hooks = [
            hook
            for layer in decoder_layers(self._scorer.base)
            for hook in (
                layer.register_forward_pre_hook(gathered),
                layer.register_forward_hook(forgotten),
            )
        ]
        try:
            return super()._measure()
        finally:
            for hook in hooks:
                hook.remove()


def _addresses(module: nn.Module) -> set[int]:
    """Where the weights lie that are whole on this rank right now."""
    whole = (p for p in module.parameters() if not isinstance(p, DTensor))
    return {p.untyped_storage().data_ptr() for p in whole}
