"""The learner on several GPUs, or processes: each learns from its share of rows.

Data parallel, as in PyTorch DDP (arXiv 2006.15704): the step's loss is a weighed sum over tokens,
so the sum of the ranks' gradients is the gradient of one rank with all rows, up to the order of
additions. Only LoRA's gradients are exchanged. Every rank then takes the same optimizer step; rank
0 talks to the parent and writes the files. Each rank has the whole base, or a part of it
(`sharding`).

Run as a module, this is a rank other than 0, told by rank 0 what to do.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import JobConfig
from langchain_art_server.algorithms.loss.logprob_gap import Suspect
from langchain_art_server.algorithms.loss.loss_stats import LossStats
from langchain_art_server.algorithms.loss.step_loss import StepLoss, StepTokens
from langchain_art_server.algorithms.sequences.rank_shares import shares
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.ipc.step_codec import pack_step, unpack_step, write_rows
from langchain_art_server.backends.models.device import set_threads, torch_device
from langchain_art_server.backends.peft.distributed.fsdp import sharded_base, sharded_forward
from langchain_art_server.backends.peft.distributed.process_group import LOST, Ranks
from langchain_art_server.backends.peft.learner_core import LearnerCore, Progress, process_core
from langchain_art_server.backends.peft.logprob_scoring import Scorer, Visit
from langchain_art_server.backends.peft.packer import Packer
from langchain_art_server.backends.peft.training_batch import TrainingBatch

log = logging.getLogger(__name__)


class DataParallelCore(LearnerCore):
    """One rank's core: what `LearnerCore` does, on a share of the rows.

    Args:
        model: as for `LearnerCore`.
        device: of this rank.
        dtype: as for `LearnerCore`.
        ranks: this rank among the others, which must all be made at the same time.
        shard: each rank holds a part of the base's layers, see `sharding`.

    Raises:
        ConfigError: the model does not load on this rank.
        ArtError: it does not load on another one.
    """

    def __init__(
        self, model: str, device: str, dtype: str | None, ranks: Ranks, *, shard: bool = False
    ) -> None:
        self._ranks, self._shard = ranks, shard
        ranks.together(lambda: torch_device(device))
        ranks.together(lambda: super(DataParallelCore, self).__init__(model, device, dtype))

    def step(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """See `LearnerCore.step`; counts of rows, tokens and CPU seconds are sums over ranks."""
        self._ranks.together(lambda: self._hold(request.parent))
        metrics = super().step(request, progress)
        counts = ("rows", "tokens_processed", "cpu_seconds")
        return metrics | self._ranks.add({name: metrics[name] for name in counts})

    def batch(self, rows: Sequence[Row], config: JobConfig) -> TrainingBatch:
        """This rank's share of the rows, made ready; may be empty."""
        equal = 1.0 / sum(sum(row.mask) for row in rows)
        merged = self.packer.padded_because is None
        chosen = shares([row.token_ids for row in rows], self._ranks.size, merged=merged)
        mine = [
            rows[index] if rows[index].weights else _weighed(rows[index], equal)
            for index in chosen[self._ranks.rank]
        ]
        make = super().batch if mine else self._nothing
        return self._ranks.together(lambda: make(mine, config), on_ways=True)

    def accumulate(self, batch: TrainingBatch, progress: Progress) -> tuple[float, LossStats]:
        """Add the gradient of all ranks' rows; their loss, and what it says of the step."""
        own = self._ranks.together(
            lambda: super(DataParallelCore, self).accumulate(batch, progress), on_ways=True
        )
        self._ranks.add_gradients(self.parameters.values())
        return self._ranks.add_stats(*own)

    def assist(self) -> None:
        """Take part in what another rank computes alone."""
        self._ranks.together(lambda: None, on_ways=True)

    def _load(self) -> PreTrainedModel:
        if not self._shard:
            return super()._load()
        return self._ranks.together(lambda: sharded_base(self.name, self.dtype, self._ranks))

    def _forward(self) -> tuple[Scorer, Packer]:
        return sharded_forward(self.base, self._ranks) if self._shard else super()._forward()

    def _write(self, out: Path) -> None:
        def write() -> None:
            if self._ranks.rank == 0:
                super(DataParallelCore, self)._write(out)

        self._ranks.together(write)

    def _suspects(self, batch: TrainingBatch) -> list[Suspect]:
        def suspects() -> list[Suspect]:
            return super(DataParallelCore, self)._suspects(batch) if self._ranks.rank == 0 else []

        return self._ranks.together(suspects, on_ways=True)

    def _nothing(self, rows: Sequence[Row], config: JobConfig) -> TrainingBatch:
        none = torch.zeros(0, dtype=self._number, device=self.device)
        calls = torch.zeros(0, dtype=torch.int64, device=self.device)
        return TrainingBatch(rows, _NoRows(), StepLoss(StepTokens(none, none, none, calls), config))


class RankZero(DataParallelCore):
    """Rank 0: starts the others, tells them each step, and is what the parent talks to.

    Args:
        model: as for `LearnerCore`.
        device: of the first rank; None: cuda or cpu. Rank k takes the k-th GPU from there on.
        dtype: as for `LearnerCore`.
        threads: of each rank; None: all ranks together take half of the cores.
        ranks: how many.
        shard: as for `DataParallelCore`.

    Raises:
        ConfigError: there are not that many GPUs, or a rank cannot load the model.
    """

    def __init__(
        self,
        model: str,
        device: str | None,
        dtype: str | None,
        threads: int | None,
        ranks: int,
        *,
        shard: bool = False,
    ) -> None:
        devices = rank_devices(torch_device(device), ranks)
        self._folder = tempfile.TemporaryDirectory(prefix="art-ranks-")  # mode 0700
        meeting = Path(self._folder.name, "meeting")
        self._others: list[subprocess.Popen[str]] = []
        for rank in range(1, ranks):
            told = {"model": model, "device": devices[rank], "dtype": dtype, "threads": threads}
            told |= {"rank": rank, "ranks": ranks, "meeting": str(meeting), "shard": shard}
            other = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "langchain_art_server.backends.peft.distributed.data_parallel",
                ],
                stdin=subprocess.PIPE,
                text=True,
            )
            self._others.append(other)
            self._say(other, told)
            threading.Thread(target=_end_with, args=(other, rank), daemon=True).start()
        try:
            group = Ranks(0, ranks, meeting, torch.device(devices[0]))
            super().__init__(model, devices[0], dtype, group, shard=shard)
        except ArtError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error

    def step(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """See `DataParallelCore.step`."""
        rows = Path(self._folder.name, "rows.npz")
        write_rows(rows, request.rows)
        for other in self._others:
            self._say(other, pack_step(request, rows))
        return super().step(request, progress)

    def logprobs(self, adapter: Path | None, rows: Sequence[Row]) -> list[np.ndarray]:
        """See `LearnerCore.logprobs`; rank 0 reads the rows, and the others assist if need be."""
        if not self._shard:
            return super().logprobs(adapter, rows)
        for other in self._others:
            self._say(other, {"assist": True})
        return self._ranks.together(
            lambda: super(RankZero, self).logprobs(adapter, rows), on_ways=True
        )

    def _say(self, other: subprocess.Popen[str], words: dict[str, Any]) -> None:
        assert other.stdin is not None
        try:
            other.stdin.write(json.dumps(words) + "\n")
            other.stdin.flush()
        except OSError:
            os._exit(LOST)


class _NoRows:
    """What a rank without rows does."""

    tokens, alive = 0, 0

    def sweep(self, scorer: Scorer, visit: Visit, progress: Progress | None = None) -> None:
        """Visit nothing."""


def rank_devices(first: torch.device, ranks: int) -> list[str]:
    """The device of each rank.

    Raises:
        ConfigError: there are not as many of them.
    """
    if first.type == "cpu":
        return ["cpu"] * ranks
    start, there = first.index or 0, torch.cuda.device_count() if first.type == "cuda" else 1
    if start + ranks > there:
        raise ConfigError(
            f"got learner.ranks={ranks} from the device {first} on, expected at most "
            f"{there - start}: each rank needs a device of its own"
        )
    return [f"{first.type}:{start + rank}" for rank in range(ranks)]


def make_core(
    model: str,
    device: str | None,
    dtype: str | None,
    threads: int | None,
    ranks: int,
    shard: bool,
) -> LearnerCore:
    """The core of a process that does nothing else, on one rank or several.

    Args:
        model: as for `RankZero`.
        device: as for `RankZero`.
        dtype: as for `RankZero`.
        threads: as for `RankZero`.
        ranks: how many processes learn together.
        shard: as for `RankZero`; with several ranks only.
    """
    if ranks == 1:
        return process_core(lambda: LearnerCore(model, device, dtype), threads)
    return process_core(
        lambda: RankZero(model, device, dtype, threads, ranks, shard=shard),
        _threads(threads, ranks),
    )


def _threads(threads: int | None, ranks: int) -> int:
    """Torch threads of one rank: all ranks together take half of the processors by default."""
    if threads is not None:
        return threads
    set_threads(None)
    return max(1, torch.get_num_threads() // ranks)


def _weighed(row: Row, weight: float) -> Row:
    return replace(row, weights=[weight] * len(row.mask))


def _end_with(other: subprocess.Popen[str], rank: int) -> None:
    """End this process when that one ends: alone, it would wait for it."""
    log.error("Rank %d of the learner ended (exit status %s).", rank, other.wait())
    os._exit(LOST)


def rank_main() -> None:
    """Entry point of a rank other than 0; its first line says what it is, each other a step."""
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(0)  # rank 0 is gone

    threading.Thread(target=read, daemon=True, name="rank-0").start()
    told = lines.get()
    group = Ranks(told["rank"], told["ranks"], Path(told["meeting"]), torch.device(told["device"]))
    try:
        core = process_core(
            lambda: DataParallelCore(
                told["model"], told["device"], told["dtype"], group, shard=told["shard"]
            ),
            _threads(told["threads"], told["ranks"]),
        )
    except ArtError:
        lines.get()  # rank 0 says why, and then ends, and this process with it
        return
    while True:
        p = lines.get()
        try:
            if "assist" in p:
                core.assist()
            else:
                core.step(unpack_step(p), lambda _fraction, _message: None)
        except ArtError as error:
            log.debug("Rank %d: %s", group.rank, error)  # rank 0 says the same


if __name__ == "__main__":
    rank_main()
