"""The processes that learn together: what they add up, and how one's failure becomes all's.

Child side only. Gradients are summed by torch.distributed: gloo between CPUs, NCCL between GPUs.
Every other word goes over gloo as plain bytes. A rank that dies takes the others with it at their
next word, and the parent starts the step again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.loss.loss_stats import LossStats

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Bytes of an error's message that other ranks hear of.
MESSAGE = 2000
#: A step takes as long as it takes; a rank that died is noticed by its closed connection.
PATIENCE = timedelta(hours=6)
#: Exit status of a rank that lost another one.
LOST = 70


class Way(IntEnum):
    """What a rank is about to do with weights of which each rank has a part; the highest counts."""

    NONE = 0
    """It has done all of its work."""
    BACK = 1
    """Backward through the layers."""
    THERE = 2
    """Forward through them. First, so that those who are behind catch up."""
    FAILED = 3


class _OtherFailedError(Exception):
    """Another rank's work failed, so there are no more ways."""


class Ranks:
    """This process among those that learn together.

    Args:
        rank: its number, from 0.
        size: how many there are.
        meeting: a file that does not exist yet, in a folder that only this user can enter; the
            ranks find each other by it.
        device: where the gradients are.

    Attributes:
        idle: this rank's part in a way that it has nothing to compute on; None: each rank has all
            weights.
    """

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.idle: Callable[[Way], None] | None = None
        # All ranks are on this machine, so nothing listens on an interface that others can reach.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )

    def together(self, work: Callable[[], T], *, on_ways: bool = False) -> T:
        """Do something that only this rank may fail at; all ranks must come here.

        Args:
            work: what this rank does.
            on_ways: works of the ranks go ways together (`on_way`), if weights are in parts.

        Raises:
            ArtError: another rank failed; says which one and why.
            Exception: whatever `work` raised.
        """
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except _OtherFailedError:
            on_ways = False  # all know that there are no more
        except Exception as error:  # noqa: BLE001  raised again when the others know of it
            failure = error
        if on_ways and self.idle is not None:
            state = Way.NONE if failure is None else Way.FAILED
            while (way := self._agree(state)) in (Way.THERE, Way.BACK):
                self._idle(way)
        said = "" if failure is None else str(failure) or type(failure).__name__
        heard = self._tell(said)
        if failure is not None:
            raise failure
        for rank, words in enumerate(heard):
            if words:
                raise ArtError(f"Rank {rank} of the learner's {self.size} failed: {words}")
        return result  # pyright: ignore[reportReturnType] - work returned it

    @contextlib.contextmanager
    def on_way(self, way: Way) -> Generator[None]:
        """A way through weights of which each rank has a part: each rank goes it now.

        Whoever wants another way waits for its turn, and takes part in this one by `idle`. If this
        rank fails on the way, its process ends: the others wait for its weights. The parent then
        starts all of them again.

        Raises:
            Exception: another rank failed before; `together` says how.
        """
        while (chosen := self._agree(way)) != way:
            if chosen == Way.FAILED:
                raise _OtherFailedError
            self._idle(chosen)
        with self._never_alone():
            yield

    def _idle(self, way: Way) -> None:
        with self._never_alone():
            assert self.idle is not None
            self.idle(way)

    def _agree(self, way: Way) -> Way:
        highest = torch.tensor([way])
        self._sum(highest, dist.ReduceOp.MAX)
        return Way(int(highest.item()))

    @contextlib.contextmanager
    def _never_alone(self) -> Generator[None]:
        try:
            yield
        except ArtError:
            raise  # not of the way itself
        except Exception as error:  # noqa: BLE001  whatever it is, the ranks are out of step
            log.error("Rank %d failed where all ranks must go on: %s", self.rank, error)
            os._exit(LOST)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each parameter's gradient by the sum over all ranks, the same bits on each.

        In one message: hundreds of small ones would cost more than their bytes.
        """
        chosen = list(parameters)
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in chosen]
        )
        self._sum(flat)
        for parameter, part in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def add_stats(self, loss: float, stats: LossStats) -> tuple[float, LossStats]:
        """The loss and what is said of it, over all ranks."""
        names = [field.name for field in fields(stats)]
        values = {name: getattr(stats, name) for name in names}
        sums = self.add({"loss": loss} | {n: v for n, v in values.items() if n[-4:] != "_max"})
        peaks = {n: v for n, v in values.items() if n[-4:] == "_max"}
        highest = torch.tensor(list(peaks.values()), dtype=torch.float64)
        self._sum(highest, dist.ReduceOp.MAX)
        total = sums.pop("loss")
        return total, LossStats(**sums, **dict(zip(peaks, highest.tolist(), strict=True)))

    def add(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The sum over all ranks of each number."""
        total = torch.tensor(list(numbers.values()), dtype=torch.float64)
        self._sum(total)
        return dict(zip(numbers, total.tolist(), strict=True))

    def _tell(self, words: str) -> list[str]:
        """What each rank has to say."""
        said = list(words.encode()[:MESSAGE])
        mine = torch.zeros(MESSAGE, dtype=torch.uint8)
        mine[: len(said)] = torch.tensor(said, dtype=torch.uint8)
        heard = [torch.zeros(MESSAGE, dtype=torch.uint8) for _ in range(self.size)]
        self._meet(dist.all_gather, heard, mine)
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in heard]

    def _sum(self, tensor: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        self._meet(dist.all_reduce, tensor, how)

    def _meet(self, collective: Callable[..., Any], *what: Any) -> None:
        try:
            collective(*what)
        except RuntimeError as error:
            # What the others hold is unknown now. The parent starts all of them again.
            log.error("Rank %d lost the others: %s", self.rank, error)
            os._exit(LOST)
