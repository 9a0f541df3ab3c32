"""Data parallel training: several GPUs or processes, each with its share of the rows.

As in PyTorch DDP (arXiv 2006.15704): the step's loss is a weighted sum over tokens, so the sum of
the ranks' gradients is the gradient of one rank with all rows, up to the order of additions. Only
LoRA's gradients are exchanged. Every rank then takes the same optimizer step; rank 0 (`rank_zero`)
talks to the parent and writes the files. Each rank has the whole base model, or a shard of it.

PyTorch's `fully_shard` (FSDP2; arXiv 2304.11277, in its form for single parameters) cuts each
decoder layer's weights into as many parts as there are ranks. A rank gathers a layer before it
computes with it, forward and backward, and drops the others' parts after it. So all ranks must make
the same number of passes, in the same order: each makes as many micro-batches as the rank that
needs most, and a micro-batch is complete rows, with one forward pass and right after it one
backward pass.

Not sharded: LoRA's parameters, which are added later; embeddings, output head and last norm, whose
weights are read outside of the model's forward (logits are computed in chunks, and head and
embeddings may be one tensor).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from langchain_art.errors import ConfigError
from langchain_art.wire import StepConfig
from langchain_art_server.algorithms.loss.loss_stats import LossStats
from langchain_art_server.algorithms.sequences.training_rows import Row, forest_groups, shares
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.models.base_weights import linears_in_four_bits, load_causal
from langchain_art_server.backends.models.device import torch_device
from langchain_art_server.backends.peft.distributed.process_group import Ranks
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    MicroBatches,
    Packing,
    Progress,
    Scorer,
)
from langchain_art_server.backends.peft.packer import Packer
from langchain_art_server.backends.peft.training_batch import TrainingBatch, Watched, watch


class DataParallelCore(LearnerCore):
    """The core of one rank: a `LearnerCore` that trains on its share of the rows.

    All of `ranks` must be made at the same time. With `shard`, each holds a part of the base's
    layers. `options` are the other ones of `LearnerCore`.

    Raises:
        ConfigError: the model does not load on this rank.
        ArtError: it does not load on another one.
    """

    def __init__(
        self,
        model: str,
        device: str,
        dtype: str | None,
        ranks: Ranks,
        *,
        shard: bool = False,
        **options: Any,
    ) -> None:
        self._ranks, self._shard = ranks, shard
        with ranks.together():
            torch_device(device)
        with ranks.together():
            super().__init__(model, device, dtype, **options)

    def step(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """See `LearnerCore.step`; counts of rows, tokens and CPU seconds are sums over ranks."""
        metrics = super().step(request, progress)
        counts = ("rows", "tokens_processed", "cpu_seconds")
        return metrics | self._ranks.add({name: metrics[name] for name in counts})

    def logprobs(
        self, adapter: Path | None, rows: Sequence[Row], progress: Progress | None = None
    ) -> list[np.ndarray]:
        """See `LearnerCore.logprobs`. With a sharded base, all ranks must come here."""
        with self._ranks.together() if self._shard else contextlib.nullcontext():
            return super().logprobs(adapter, rows, progress)

    def batch(
        self,
        rows: Sequence[Row],
        config: StepConfig,
        reference: Path | None = None,
        progress: Progress | None = None,
    ) -> TrainingBatch:
        """This rank's share of the rows, made ready; may be empty."""
        equal = 1.0 / sum(sum(row.mask) for row in rows)
        merged = self.packer.padded_because is None
        chosen = shares([row.token_ids for row in rows], self._ranks.size, merged=merged)
        own = [
            row if row.weights else replace(row, weights=[equal] * len(row.mask))
            for row in (rows[index] for index in chosen[self._ranks.rank])
        ]
        with self._ranks.together():
            return super().batch(own, config, reference, progress)

    def accumulate(self, batch: TrainingBatch, progress: Progress) -> tuple[float, LossStats]:
        """Add the gradient of all ranks' rows; returns their loss and its statistics."""
        with self._ranks.together():
            own = super().accumulate(batch, progress)
        self._ranks.add_gradients(self.parameters.values())
        return self._ranks.add_stats(*own)

    def watch(self, batch: TrainingBatch, all_rows: int, step: int) -> Watched:
        """See `LearnerCore.watch`; each rank has a sample of its own rows."""
        with self._ranks.together():
            return watch(batch, self.packer, all_rows, [step, self._ranks.rank], self._ranks.size)

    def moved(self, watched: Watched, progress: Progress | None = None) -> dict[str, float]:
        """See `LearnerCore.moved`; of all ranks."""
        with self._ranks.together():
            own = super().moved(watched, progress)
        return self._ranks.add(own)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return self._ranks.together()

    def _image_reader(self) -> str:
        return "several ranks learn from none yet; ranks = 1 in [learner] does"

    def _load(self) -> PreTrainedModel:
        if not self._shard:
            return super()._load()
        with self._ranks.together():
            return sharded_base(self.name, self.dtype, self._ranks)

    def _forward(self) -> tuple[Scorer, Packer]:
        if not self._shard:
            return super()._forward()
        scorer = ShardedScorer(self.base, self._ranks)
        with self._ranks.one_pass():  # several, the same on each; a refused attention is no failure
            packer = ShardedPacker(scorer, self._ranks)
        scorer.checked = True
        return scorer, packer

    def _write(self, out: Path) -> None:
        with self._ranks.together():
            if self._ranks.rank == 0:
                super()._write(out)


#: What a rank without rows left puts through the model.
_STAND_IN = Row([0, 0], [0, 1], [0.0, 0.0], [0.0, 0.0])


def decoder_layers(base: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, in order."""
    return [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]


def sharded_base(model: str, dtype: torch.dtype, ranks: Ranks) -> PreTrainedModel:
    """The base model, frozen, this rank's part of its layers on the rank's device.

    All ranks must come here. The files are mapped into memory and go to the device layer by layer:
    no device holds more than its part and one layer.

    Raises ConfigError: it cannot be loaded, or its layers cannot be found or cut.
    """
    base = load_causal(model, dtype, torch.device("cpu"))
    if linears_in_four_bits(base):
        raise ConfigError(
            f"got learner.shard=true with {model!r}, whose weights are in 4 bits; expected one of "
            "the two: parts of 4-bit weights cannot be gathered"
        )
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


class ShardedScorer(Scorer):
    """A `Scorer` whose passes through the model are made by all ranks at the same time."""

    def __init__(self, base: PreTrainedModel, ranks: Ranks) -> None:
        super().__init__(base)
        self._ranks = ranks
        self.checked = False  # a rank learns before each pass whether another one has failed

    def outputs(self, inputs: dict[str, Any], select_M: Tensor) -> Tensor:
        """See `Scorer.outputs`."""
        # FSDP remembers forward passes without a backward one, and would prefetch their layers.
        cast(FSDPModule, self.base.base_model).reset_iter_state()
        with self._ranks.one_pass() if self.checked else contextlib.nullcontext():
            return super().outputs(inputs, select_M)

    def backward(self, outputs_MX: Tensor, ends: Sequence[tuple[Tensor, Tensor]]) -> None:
        """See `Scorer.backward`; without gradients, zeros go back."""
        with self._ranks.one_pass() if self.checked else contextlib.nullcontext():
            super().backward(outputs_MX, ends or [(outputs_MX, torch.zeros_like(outputs_MX))])


class ShardedPacker(Packer):
    """A `Packer` that makes as many micro-batches on each rank."""

    def __init__(self, scorer: Scorer, ranks: Ranks) -> None:
        super().__init__(scorer)
        self._ranks = ranks
        self._known: set[int] = set()

    def pack(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> Packing:
        """See `Packer.pack`. All ranks must come here, each with its own rows."""
        if self.padded_because is not None:
            groups = self._padded_groups(rows, self._limit(budget))
        else:
            groups = forest_groups([row.token_ids for row in rows], self._limit(budget))
        found = [self._group(rows, counted, group) for group in groups]
        stand_in = self._group([_STAND_IN], CountedTokens.of([_STAND_IN]), [0])[0]
        nothing = CountedTokens.of([]).row_T
        missing = int(self._ranks.agree(len(found))) - len(found)
        return MicroBatches([*found, *[(stand_in, nothing)] * missing], self._device)

    def _most(self, number: float) -> float:
        return self._ranks.agree(number)

    def _weights(self) -> set[int]:
        return self._known

    def _measure(self) -> float:
        self._known = _addresses(self._scorer.model)
        layer_weights: list[set[int]] = []

        def gathered(layer: nn.Module, _args: object) -> None:
            layer_weights.append(_addresses(layer) - self._known)
            self._known |= layer_weights[-1]

        def dropped(_layer: nn.Module, _args: object, _outputs: object) -> None:
            self._known -= layer_weights.pop()  # activations may get these addresses next

        with contextlib.ExitStack() as hooks:
            for layer in decoder_layers(self._scorer.base):
                hooks.callback(layer.register_forward_pre_hook(gathered).remove)
                hooks.callback(layer.register_forward_hook(dropped).remove)
            return super()._measure()


def _addresses(module: nn.Module) -> set[int]:
    """Addresses of the weights that are whole on this rank at the moment."""
    whole = (p for p in module.parameters() if not isinstance(p, DTensor))
    return {p.untyped_storage().data_ptr() for p in whole}
