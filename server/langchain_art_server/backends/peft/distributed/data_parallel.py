"""Data parallel training: several GPUs or processes, each with its share of the rows.

As in PyTorch DDP (arXiv 2006.15704): the step's loss is a weighted sum over tokens, so the sum of
the ranks' gradients is the gradient of one rank with all rows, up to the order of additions. Only
LoRA's gradients are exchanged. Every rank then takes the same optimizer step; rank 0 talks to the
parent and writes the files. Each rank has the whole base model, or a shard of it (`fsdp`).

Run as a module, this is a rank other than 0, which gets its work from rank 0 by standard input.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from langchain_art.errors import ArtError, ConfigError
from langchain_art.wire import StepConfig
from langchain_art_server.algorithms.loss.logprob_gap import Suspect
from langchain_art_server.algorithms.loss.loss_stats import LossStats
from langchain_art_server.algorithms.sequences.rank_shares import shares
from langchain_art_server.algorithms.sequences.training_rows import Row
from langchain_art_server.backends.base import LearnerStep
from langchain_art_server.backends.ipc.pulse import TICK_SECONDS, Pulse
from langchain_art_server.backends.ipc.step_codec import (
    pack_step,
    read_rows,
    unpack_step,
    write_rows,
)
from langchain_art_server.backends.models.device import free_cache, set_threads, torch_device
from langchain_art_server.backends.peft.core_process import process_core
from langchain_art_server.backends.peft.distributed.fsdp import sharded_base, sharded_forward
from langchain_art_server.backends.peft.distributed.process_group import LOST, Ranks
from langchain_art_server.backends.peft.learner_core import LearnerCore
from langchain_art_server.backends.peft.logprob_scoring import Scorer
from langchain_art_server.backends.peft.micro_batches import Progress
from langchain_art_server.backends.peft.packer import Packer
from langchain_art_server.backends.peft.training_batch import TrainingBatch

log = logging.getLogger(__name__)


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


class RankZero(DataParallelCore):
    """Rank 0: starts the others, sends them each step, and answers the parent.

    Args as for `make_core`, `base` being those of `LearnerCore`. Rank k takes the k-th GPU from
    `device` on.

    Raises:
        ConfigError: there are not that many GPUs, or a rank cannot load the model.
    """

    def __init__(self, threads: int, ranks: int, shard: bool, **base: Any) -> None:
        devices = rank_devices(torch_device(base["device"]), ranks)
        self._folder = tempfile.TemporaryDirectory(prefix="art-ranks-")  # mode 0700
        self._rows, meeting = (Path(self._folder.name, name) for name in ("rows.npz", "meeting"))
        self._others: list[subprocess.Popen[str]] = []
        self._ready = threading.Event()
        for rank in range(1, ranks):
            beats, alive = os.pipe()
            other = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                text=True,
                pass_fds=(alive,),
            )
            os.close(alive)
            self._others.append(other)
            watch = partial(end_with, other, rank, beats, self._ready.is_set)
            threading.Thread(target=watch, daemon=True).start()
            core = base | {"device": devices[rank], "shard": shard}
            group = {"rank": rank, "size": ranks, "meeting": str(meeting)}
            start = {"threads": threads, "group": group, "core": core, "alive": alive}
            self._send(start, other)
        try:
            own = Ranks(0, ranks, meeting, torch.device(devices[0]))
            mine: dict[str, Any] = base | {"device": devices[0]}
            super().__init__(**mine, ranks=own, shard=shard)
            self._ready.set()
        except ArtError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error

    def step(self, request: LearnerStep, progress: Progress) -> dict[str, float]:
        """See `DataParallelCore.step`."""
        write_rows(self._rows, request.rows)
        self._send({"step": pack_step(request, self._rows)}, *self._others)
        return super().step(request, progress)

    def logprobs(self, adapter: Path | None, rows: Sequence[Row]) -> list[np.ndarray]:
        """See `LearnerCore.logprobs`; with a sharded base, every rank computes all rows."""
        if self._shard:
            write_rows(self._rows, rows)
            message = {"logprobs": adapter and str(adapter), "rows": str(self._rows)}
            self._send(message, *self._others)
        return super().logprobs(adapter, rows)

    def _send(self, message: dict[str, Any], *others: subprocess.Popen[str]) -> None:
        for other in others:
            assert other.stdin is not None
            try:
                other.stdin.write(json.dumps(message) + "\n")
                other.stdin.flush()
            except OSError:
                os._exit(LOST)


def rank_devices(first: torch.device, ranks: int) -> list[str]:
    """The device of each rank. Raises ConfigError if there are not as many."""
    if first.type == "cpu":
        return ["cpu"] * ranks
    start, there = first.index or 0, torch.cuda.device_count() if first.type == "cuda" else 1
    if start + ranks > there:
        raise ConfigError(
            f"got learner.ranks={ranks} from the device {first} on, expected at most "
            f"{there - start}: each rank needs a device of its own"
        )
    return [f"{first.type}:{start + rank}" for rank in range(ranks)]


def make_core(threads: int | None, ranks: int, shard: bool, **base: Any) -> LearnerCore:
    """The core of a process that does nothing else, on one rank or several (`RankZero`).

    Args:
        threads: of each rank; None: all ranks together take half of the processors.
        ranks: how many.
        shard: as for `DataParallelCore`.
        base: as for `LearnerCore`, with the device of the first rank.
    """
    if ranks == 1:
        return process_core(lambda: LearnerCore(**base), threads)
    set_threads(threads)
    own = threads or max(1, torch.get_num_threads() // ranks)
    return process_core(lambda: RankZero(own, ranks, shard, **base), own)


def end_with(
    other: subprocess.Popen[str], rank: int, beats: int, is_ready: Callable[[], bool]
) -> None:
    """End this process when that one ends, or is silent: else it would wait for it forever.

    Args:
        other: another rank's process. It is killed if it is silent.
        rank: its number.
        beats: a pipe into which it writes at every tick of a pulse.
        is_ready: whether all ranks have loaded the model.
    """
    pulse = Pulse(math.inf)
    while True:
        if select.select([beats], [], [], TICK_SECONDS)[0]:
            if not os.read(beats, 4096):
                break
            pulse.answered(0)
        elif why := pulse.tick(ready=is_ready(), busy=False):
            log.error("Rank %d of the learner %s; all ranks are started again.", rank, why)
            other.kill()
            break
    log.error("Rank %d of the learner ended (exit status %s).", rank, other.wait())
    os._exit(LOST)


def _beat(alive: int) -> None:
    """Show rank 0 that this process is not stopped."""
    while True:
        os.write(alive, b".")
        time.sleep(TICK_SECONDS / 2)


def rank_main() -> None:
    """Entry point of a rank other than 0: reads its settings, then a message for each task."""
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(0)  # rank 0 is gone

    threading.Thread(target=read, daemon=True, name="rank-0").start()
    start = lines.get()
    threading.Thread(target=_beat, args=(start["alive"],), daemon=True, name="beat").start()
    core_args, group = start["core"], start["group"]
    ranks = Ranks(**group | {"device": torch.device(core_args["device"])})
    try:
        core = process_core(lambda: DataParallelCore(**core_args, ranks=ranks), start["threads"])
    except ArtError:
        lines.get()  # rank 0 reports why, and then ends, and this process with it
        return
    while True:
        message = lines.get()
        try:
            if "step" in message:
                core.step(unpack_step(message["step"]), lambda _fraction, _message: None)
            else:
                adapter = message["logprobs"] and Path(message["logprobs"])
                core.logprobs(adapter, read_rows(Path(message["rows"])))
        except ArtError as error:
            log.debug("Rank %d: %s", ranks.rank, error)  # rank 0 reports the same
        free_cache()


if __name__ == "__main__":
    rank_main()
