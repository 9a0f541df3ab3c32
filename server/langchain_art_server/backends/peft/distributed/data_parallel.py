"""Data parallel training: several GPUs or processes, each with its share of the rows.

As in PyTorch DDP (arXiv 2006.15704): the step's loss is a weighted sum over tokens, so the sum of
the ranks' gradients is the gradient of one rank with all rows, up to the order of additions. Only
LoRA's gradients are exchanged. Every rank then takes the same optimizer step; rank 0 (`rank_zero`)
talks to the parent and writes the files. Each rank has the whole base model, or a shard of it
(`fsdp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from langchain_art.wire import StepConfig
from langchain_art_server.algorithms.loss.logprob_gap import Suspect
from langchain_art_server.algorithms.loss.loss_stats import LossStats
from langchain_art_server.algorithms.sequences.training_rows import Row, shares
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.models.device import torch_device
from langchain_art_server.backends.peft.distributed.fsdp import sharded_base, sharded_forward
from langchain_art_server.backends.peft.distributed.process_group import Ranks
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import Progress, Scorer
from langchain_art_server.backends.peft.packer import Packer
from langchain_art_server.backends.peft.training_batch import TrainingBatch


class DataParallelCore(LearnerCore):
    """The core of one rank: a `LearnerCore` that trains on its share of the rows.

    All of `ranks` must be made at the same time. With `shard`, each holds a part of the base's
    layers (`fsdp`). `options` are the other ones of `LearnerCore`.

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

    def logprobs(self, adapter: Path | None, rows: Sequence[Row]) -> list[np.ndarray]:
        """See `LearnerCore.logprobs`. With a sharded base, all ranks must come here."""
        with self._ranks.together() if self._shard else nullcontext():
            return super().logprobs(adapter, rows)

    def batch(
        self, rows: Sequence[Row], config: StepConfig, reference: Path | None = None
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
            return super().batch(own, config, reference)

    def accumulate(self, batch: TrainingBatch, progress: Progress) -> tuple[float, LossStats]:
        """Add the gradient of all ranks' rows; returns their loss and its statistics."""
        with self._ranks.together():
            own = super().accumulate(batch, progress)
        self._ranks.add_gradients(self.parameters.values())
        return self._ranks.add_stats(*own)

    def look(self, batch: TrainingBatch) -> LossStats:
        """See `LearnerCore.look`; of all ranks' rows."""
        with self._ranks.together():
            own = super().look(batch)
        return self._ranks.add_stats(0.0, own)[1]

    def _load(self) -> PreTrainedModel:
        if not self._shard:
            return super()._load()
        with self._ranks.together():
            return sharded_base(self.name, self.dtype, self._ranks)

    def _forward(self) -> tuple[Scorer, Packer]:
        return sharded_forward(self.base, self._ranks) if self._shard else super()._forward()

    def _begin(self, request: LearnerStep) -> None:
        with self._ranks.together():
            super()._begin(request)

    def _update(self) -> None:
        with self._ranks.together():
            super()._update()

    def _write(self, out: Path) -> None:
        with self._ranks.together():
            if self._ranks.rank == 0:
                super()._write(out)

    def _suspects(self, batch: TrainingBatch) -> list[Suspect]:
        with self._ranks.together():
            return super()._suspects(batch)
