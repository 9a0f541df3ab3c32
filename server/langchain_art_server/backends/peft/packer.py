"""Packing of rows into micro-batches, and gradient checkpointing. Child side only.

Neither changes a result beyond rounding; both decide what a step costs in time and memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from langchain_art.errors import InvalidRequest
from langchain_art_server.algorithms.sequences.prefix_forest import Ints
from langchain_art_server.algorithms.sequences.training_rows import Row, microbatches
from langchain_art_server.backends.models.base_weights import growing_rope
from langchain_art_server.backends.models.device import free_bytes
from langchain_art_server.backends.peft.forest.packing import ForestRows, token_cost
from langchain_art_server.backends.peft.forest.support_check import has_plain_head, use_forest
from langchain_art_server.backends.peft.logprob_scoring import (
    CountedTokens,
    MicroBatches,
    Packing,
    PaddedRows,
    Scorer,
)

log = logging.getLogger(__name__)
#: Most tokens alive at once on a CPU: with more, less stays in its caches and a step is slower.
CPU_TOKENS = 3072
#: Share of the free memory that activations may take; the rest is for the backward pass's work.
MEMORY_SHARE = 0.6


class Packer:
    """Lays rows out for a model, and turns gradient checkpointing on where memory needs it.

    It sets the scorer's model up for forests if its attention supports them.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        scorer.plain_head = has_plain_head(scorer.base)
        self._rope = growing_rope(scorer.base.config.get_text_config())
        #: Why rows are padded and are no forest; None: they are a forest.
        self.padded_because = use_forest(scorer)
        #: What rows are without a forest.
        self.layout = "padded rows"
        #: See `prefix_forest.grow`.
        self.token_cost = 0.0 if self.padded_because else token_cost(scorer.base)
        #: With gradient checkpointing, the inputs of layers are held in the host's memory.
        self.offload = False
        #: Gradient checkpointing is on for the last packing for training.
        self.checkpoints = False
        self._bytes_per_token: tuple[object, float] | None = None
        #: Part of the memory for activations that may be used.
        self.share = 1.0
        #: Most tokens alive at a time in the last packing for training.
        self.alive = 0
        #: Bytes that activations may take, and those that the last packing's take.
        self._most_bytes = self._kept_bytes = float("inf")

    def pack(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> Packing:
        """Rows, if any, for forward passes with at most `budget` tokens alive at a time.

        Raises:
            InvalidRequest: a row is so long that the model's rotary positions change. All tokens
                beside it, and its own that were sampled before, would be computed differently.
        """
        longest = max((len(row.token_ids) for row in rows), default=0)
        if self._rope is not None and longest > self._rope[1]:
            kind, most = self._rope
            raise InvalidRequest(
                f"got a row of {longest} tokens, expected at most {most}: above that the model's "
                f"{kind} rotary positions change, and no longer are what earlier calls were "
                f"sampled with. Start the server with max_model_len={most}."
            )
        if rows and self.padded_because is None:
            return self._forest(rows, counted, self._limit(budget))
        groups = self._padded_groups(rows, self._limit(budget))
        return MicroBatches([self._group(rows, counted, g) for g in groups], self._device)

    def pack_to_learn(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> Packing:
        """Rows for forward and backward passes, with gradient checkpointing if memory needs it.

        On a CPU the free memory decides on nothing else, so that the same rows give the same bits.
        On other devices micro-batches are made smaller first, which costs less; if a row is too
        long for that, they are as large as memory holds with checkpointing.
        """
        plain, on_cpu = self._measured(), self._device.type == "cpu"
        memory = min(self.share * MEMORY_SHARE * free_bytes(self._device), self._most_bytes)
        fits = int(memory / plain)
        packing = self.pack(rows, counted, budget if on_cpu else min(budget, max(fits, 1)))
        needed = packing.alive > fits
        each = self._checkpointed(plain) if needed else plain
        if not on_cpu and self._on_any_rank(needed):
            needed, each = True, self._checkpointed(plain)
            packing = self.pack(rows, counted, min(budget, max(int(memory / each), 1)))
        if needed and not self.checkpoints:
            log.warning(
                "%d tokens are alive at once and memory holds the activations of %d: gradient "
                "checkpointing is on, which computes each layer twice.",
                packing.alive,
                fits,
            )
        self._checkpoint(needed)
        self.alive, self._kept_bytes = packing.alive, packing.alive * each
        return packing

    def take_less(self) -> None:
        """Let activations take half of the last packing's memory, from now on: it ran out."""
        self._most_bytes = self._kept_bytes / 2

    @property
    def _device(self) -> torch.device:
        return self._scorer.base.device

    def _limit(self, budget: int) -> int:
        return min(budget, CPU_TOKENS) if self._device.type == "cpu" else budget

    def _padded_groups(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        return microbatches([len(row.token_ids) for row in rows], budget)

    def _group(
        self, rows: Sequence[Row], counted: CountedTokens, group: Sequence[int]
    ) -> tuple[Packing, Ints]:
        """Some of the rows as one micro-batch, and the numbers of its terms."""
        chosen = sorted(group)
        own, terms = counted.of_rows(chosen)
        some = [rows[index] for index in chosen]
        if self.padded_because is None:
            return self._forest(some, own, sum(len(row.token_ids) for row in some)), terms
        return self._without_forest(some, own), terms

    def _without_forest(self, rows: Sequence[Row], counted: CountedTokens) -> Packing:
        return PaddedRows(rows, counted, self._scorer.base)

    def _forest(self, rows: Sequence[Row], counted: CountedTokens, budget: int) -> ForestRows:
        return ForestRows(rows, counted, budget, self.token_cost, self._scorer.base)

    def _checkpoint(self, on: bool) -> None:
        self.checkpoints, base = on, self._scorer.base
        self._scorer.offloads = on and self.offload
        if on and base.supports_gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        for module in base.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # Transformers checkpoints only in training; the layer's parts stay in eval.
                module.training = on

    def _measured(self) -> float:
        """Bytes of activations per token that a backward pass needs.

        Measured once per adapter shape, which is the same on all ranks, and so is the moment.
        """
        names = self._scorer.model.named_parameters()
        shapes = [(name, p.shape) for name, p in names if p.requires_grad]
        if self._bytes_per_token is None or self._bytes_per_token[0] != shapes:
            self._checkpoint(False)
            self._bytes_per_token = shapes, self._measure()
        return self._bytes_per_token[1]

    def _checkpointed(self, plain: float) -> float:
        """Bytes per token with checkpointing, if a backward pass without it needs `plain`.

        They are those of the layer that is computed again, the inputs of all layers (unless
        the host holds them) and, in a forest, their keys and values, to which the parts below
        attend.
        """
        config = self._scorer.base.config.get_text_config()
        heads, width = config.num_attention_heads, config.hidden_size
        keys = getattr(config, "num_key_value_heads", None) or heads
        head = getattr(config, "head_dim", None) or width // heads
        kept = (0 if self.offload else width) + (
            2 * keys * head if self.padded_because is None else 0
        )
        layers = config.num_hidden_layers
        return plain / layers + layers * kept * self._scorer.base.dtype.itemsize

    def _on_any_rank(self, needed: bool) -> bool:
        """True if a rank needs checkpointing; ranks that pack together then all use it."""
        return needed

    def _weights(self) -> set[int]:
        """Addresses of the model's weights, which are no activations."""
        return {p.untyped_storage().data_ptr() for p in self._scorer.model.parameters()}

    def _measure(self) -> float:
        length = 64
        row = Row([1] * length, [0] * (length - 1) + [1], [0.0] * length, [0.0] * length)
        known = self._weights()
        found: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        def visit(_logprobs_T: Tensor, _terms_T: Tensor) -> None: ...

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.pack([row], CountedTokens.of([row]), length).sweep(self._scorer, visit)
        return max(1.0, sum(found.values()) / length)
