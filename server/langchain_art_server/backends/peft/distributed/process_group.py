"""The process group of the ranks that learn together. Child side only.

Gradients are summed by torch.distributed: gloo between CPUs, NCCL between GPUs. Everything else
goes over gloo. An exception on one rank is raised on all. A rank that dies ends the others at their
next collective, and the parent starts the step again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from langchain_art.errors import ArtError
from langchain_art_server.algorithms.loss.loss_stats import LossStats

log = logging.getLogger(__name__)
#: Bytes of an error's message that other ranks get.
MESSAGE = 2000
#: Of one collective. Ranks wait for the slowest; one that died is noticed by its closed connection.
TIMEOUT = timedelta(hours=6)
#: Exit status of a rank that lost the others, or failed where they cannot go on without it.
LOST = 70


class _OtherRankFailedError(Exception):
    """Another rank failed and waits in `Ranks.together`."""


class Ranks:
    """This process among those that learn together.

    Args:
        rank: its number, from 0.
        size: how many there are.
        meeting: a file that does not exist yet, in a folder that only this user can enter, by which
            the ranks find each other.
        device: where the gradients are.
    """

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
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
            timeout=TIMEOUT,
        )

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Work that this rank alone may fail at; all ranks must come here.

        Raises:
            ArtError: another rank failed; says which one and why.
            Exception: whatever was raised in the block.
        """
        failure: Exception | None = None
        try:
            yield
            self.agree()
            return
        except _OtherRankFailedError:
            pass
        except Exception as error:  # noqa: BLE001  raised again when the others know of it
            failure = error
            self.agree(failed=True)
        messages = self._exchange("" if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure
        rank, message = next((rank, text) for rank, text in enumerate(messages) if text)
        raise ArtError(f"Rank {rank} of the learner's {self.size} failed: {message}")

    def agree(self, number: int = 0, *, failed: bool = False) -> int:
        """The highest number of all ranks. For work within `together`: each rank must come here.

        Raises:
            Exception: another rank has failed; `together` handles it.
        """
        highest = torch.tensor([int(failed), number])
        self._sum(highest, dist.ReduceOp.MAX)
        if highest[0] and not failed:
            raise _OtherRankFailedError
        return int(highest[1])

    @contextlib.contextmanager
    def one_pass(self) -> Generator[None]:
        """A forward or backward pass through a sharded base, which all ranks make at the same time.

        If this rank fails in it, its process ends, since the others wait for its weights; the
        parent then starts all of them again.

        Raises:
            ArtError: the model is refused, which is the same on every rank.
            Exception: another rank has failed; `together` handles it.
        """
        self.agree()
        try:
            yield
        except ArtError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, the ranks are out of step
            log.error("Rank %d failed in a pass of all ranks: %s", self.rank, error)
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
        """The loss and its statistics over all ranks."""
        values = {"loss": loss} | vars(stats)
        peaks = {name: values.pop(name) for name in list(values) if name.endswith("_max")}
        highest = torch.tensor(list(peaks.values()), dtype=torch.float64)
        self._sum(highest, dist.ReduceOp.MAX)
        sums = self.add(values)
        return sums.pop("loss"), LossStats(
            **sums, **dict(zip(peaks, highest.tolist(), strict=True))
        )

    def add(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The sum over all ranks of each number."""
        total = torch.tensor(list(numbers.values()), dtype=torch.float64)
        self._sum(total)
        return dict(zip(numbers, total.tolist(), strict=True))

    def _exchange(self, message: str) -> list[str]:
        """Each rank's message."""
        encoded = list(message.encode()[:MESSAGE])
        own = torch.zeros(MESSAGE, dtype=torch.uint8)
        own[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
        found = [torch.zeros(MESSAGE, dtype=torch.uint8) for _ in range(self.size)]
        self._collective(dist.all_gather, found, own)
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in found]

    def _sum(self, tensor: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        self._collective(dist.all_reduce, tensor, how)

    def _collective(self, collective: Callable[..., Any], *args: Any) -> None:
        try:
            collective(*args)
        except RuntimeError as error:
            # The state of the others is unknown now. The parent starts all of them again.
            log.error("Rank %d lost the others: %s", self.rank, error)
            os._exit(LOST)
