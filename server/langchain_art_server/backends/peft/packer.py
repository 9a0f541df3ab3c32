"""How rows go through a model: as a forest or side by side, and in which parts. Child side only.

Neither changes a result beyond rounding; both decide what a step costs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.peft.forest.packing import ForestRows, token_cost
from langchain_art_server.backends.peft.forest.support_check import has_plain_head, use_forest
from langchain_art_server.backends.peft.logprob_scoring import Counted, Packing, Scorer
from langchain_art_server.backends.peft.padded_rows import PaddedRows

log = logging.getLogger(__name__)
#: Tokens alive at once on a CPU, where more are slower: less of them stays in the caches.
CPU_TOKENS = 3072
#: Share of the free memory that what a backward pass needs may take; the rest is for its work.
MEMORY_SHARE = 0.6


class Packer:
    """Lays rows out for a model, and says how much of it to remember.

    Args:
        scorer: of the model; set up for forests if the model can take them.

    Attributes:
        padded_because: why rows go side by side and not as a forest; None: they are a forest.
        token_cost: see `forest.grow`.
        checkpoints: whether the last batch for training is computed again for its backward pass,
            layer by layer, since memory does not hold it otherwise.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        scorer.plain_head = has_plain_head(scorer.base)
        self.padded_because = use_forest(scorer)
        self.token_cost = 0.0 if self.padded_because else token_cost(scorer.base)
        self.checkpoints = False
        self._bytes_per_token: tuple[object, float] | None = None

    def pack(self, rows: Sequence[Row], counted: Counted, budget: int) -> Packing:
        """Rows for a forward pass.

        Args:
            rows: with at least one counted token among them.
            counted: those tokens.
            budget: most tokens alive at a time.
        """
        base = self._scorer.base
        if base.device.type == "cpu":
            budget = min(budget, CPU_TOKENS)
        number = torch.float64 if base.dtype == torch.float64 else torch.float32
        if self.padded_because is not None:
            return PaddedRows(rows, counted, budget, number, base.device)
        return ForestRows(rows, counted, budget, self.token_cost, number, base)

    def pack_to_learn(self, rows: Sequence[Row], counted: Counted, budget: int) -> Packing:
        """Rows for forward and backward passes: those that memory cannot hold are checkpointed.

        On a CPU the free memory decides on nothing else, so that the same rows give the same bits.
        On other devices parts are made smaller first, which costs less.
        """
        fits = int(MEMORY_SHARE * free_bytes(self._scorer.base.device) / self._measured())
        packing = self.pack(rows, counted, budget)
        if packing.alive > fits and self._scorer.base.device.type != "cpu":
            packing = self.pack(rows, counted, max(fits, 1))
        checkpoints = packing.alive > fits
        if checkpoints and not self.checkpoints:
            log.warning(
                "%d tokens are alive at once and memory holds what %d need: layers are computed "
                "twice.",
                packing.alive,
                fits,
            )
        self._checkpoint(checkpoints)
        return packing

    def _checkpoint(self, on: bool) -> None:
        self.checkpoints, base = on, self._scorer.base
        if on and base.supports_gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        for module in base.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = on  # what transformers asks for; its parts stay as they are

    def _measured(self) -> float:
        """Bytes that a backward pass needs of the forward pass, per token."""
        model = self._scorer.model
        if self._bytes_per_token is None or self._bytes_per_token[0] is not model:
            self._checkpoint(False)
            self._bytes_per_token = model, self._measure()
        return self._bytes_per_token[1]

    def _weights(self) -> set[int]:
        """Where the model's weights lie, which are no part of what is measured."""
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

        def visit(logprobs_T: Tensor, _terms_T: Tensor) -> None:
            del logprobs_T

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.pack([row], Counted.of([row]), length).sweep(self._scorer, visit)
        return max(1.0, sum(found.values()) / length)


def free_bytes(device: torch.device) -> float:
    """Memory that is free for tensors on a device, in bytes; infinite if that cannot be told."""
    if device.type == "cuda":
        free: Any = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    path = Path("/proc/meminfo")
    if device.type != "cpu" or not path.exists():
        return float("inf")
    lines = dict(line.split(":") for line in path.read_text().splitlines())
    return float(lines["MemAvailable"].split()[0]) * 1024
