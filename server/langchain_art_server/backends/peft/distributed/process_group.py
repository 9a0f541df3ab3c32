"""The process group of the ranks that learn together. Child side only.

Gradients are summed by torch.distributed: gloo between CPUs, NCCL between GPUs. Everything else
goes over gloo. An exception on one rank is raised on all. A rank that dies ends the others at their
next collective, one that is stopped is killed by rank 0, and the parent starts the step again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import timedelta
from typing import Any, NoReturn
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from langchain_art.errors import ArtError, ConfigError
from langchain_art_server.algorithms.loss.loss_stats import LossStats

log = logging.getLogger(__name__)
MESSAGE = 1000  # characters of an error's message that other ranks get
#: Bytes of what a rank gives the others, padded: JSON takes up to twelve for a character.
FRAME = 1 << 14
#: Of one collective. Ranks wait for the slowest; one that died is noticed by its closed connection.
TIMEOUT = timedelta(hours=6)
#: Exit status of a rank that lost the others, or failed where they cannot go on without it.
LOST = 70
#: Folders that the ranks of this machine share. No rank goes on without the others: one that ends
#: (rank 0 mostly by SIGKILL) leaves it to each of them to `leave`.
shared_folders: list[str] = []


def leave(status: int = LOST) -> NoReturn:
    """End this process, and remove what the ranks of this machine share."""
    for folder in shared_folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


class _OtherRankFailedError(Exception):
    """Another rank failed and waits in `Ranks.together`; perhaps its memory ran out."""

    def __init__(self, message: str, *, of_memory: bool) -> None:
        super().__init__(message)
        self.of_memory = of_memory


def listening_store(host: str, size: int) -> tuple[TCPStore, str]:
    """Rank 0's store, which listens on a port that was free, and its ``tcp://HOST:PORT``."""
    store = TCPStore(host, 0, size, True, TIMEOUT, wait_for_workers=False)
    return store, f"tcp://{host}:{store.port}"


class Ranks:
    """This process among those that learn together: number `rank`, from 0, of `size`.

    They find each other by `meeting`: ``file://PATH``, of a file that does not exist yet, in a
    folder that only this user can enter; or ``tcp://HOST:PORT`` of rank 0, whose `store` listens
    there (`listening_store`). Gradients are on `device`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: str,
        device: torch.device,
        store: TCPStore | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        where = urlsplit(meeting)
        # On one machine, nothing listens on an interface that others can reach.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        interface = interface_towards(where.hostname) if where.hostname else loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if store is None and where.hostname and where.port:
            store = TCPStore(where.hostname, where.port, size, False, TIMEOUT)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=meeting if store is None else None,
            store=store,
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Work that this rank alone may fail at; all ranks must come here.

        Raises:
            ArtError: another rank failed; says which one and why.
            torch.OutOfMemoryError: another rank ran out of memory.
            Exception: whatever was raised in the block.
        """
        try:
            yield
            self.agree()
        except _OtherRankFailedError as other:
            if other.of_memory:
                raise torch.OutOfMemoryError(str(other)) from None
            raise ArtError(str(other)) from None
        except Exception as error:  # the others learn of it before it is raised
            of_memory = isinstance(error, torch.OutOfMemoryError)
            self._gather([0, str(error)[:MESSAGE] or type(error).__name__, of_memory])
            raise

    def agree(self, number: float = 0) -> float:
        """The highest number of all ranks. For work within `together`: each rank must come here.

        Raises Exception: another rank has failed; `together` handles it.
        """
        found = self._gather([number, "", False])
        for rank, (_, failure, of_memory) in enumerate(found):
            if failure:
                raise _OtherRankFailedError(
                    f"Rank {rank} of the learner's {self.size} failed: {failure}",
                    of_memory=of_memory,
                )
        return max(highest for highest, *_ in found)

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
            leave()

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each parameter's gradient by the sum over all ranks, the same bits on each.

        In one message: hundreds of small ones would cost more than their bytes.
        """
        chosen = list(parameters)
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in chosen]
        )
        self._collective(dist.all_reduce, flat)
        for parameter, part in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def add_stats(self, loss: float, stats: LossStats) -> tuple[float, LossStats]:
        """The loss and its statistics over all ranks."""
        found = self._gather([loss, *vars(stats).values()])
        every = (LossStats(*numbers) for _, *numbers in found)
        return sum(one for one, *_ in found), sum(every, LossStats())

    def add(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The sum over all ranks of each number."""
        found = self._gather(dict(numbers))
        return {name: sum(one[name] for one in found) for name in numbers}

    def _gather(self, own: Any) -> list[Any]:
        """Gather JSON from each rank: ranks unpickle nothing that comes over a socket."""
        data = bytearray(json.dumps(own).encode().ljust(FRAME))
        found = [torch.zeros(FRAME, dtype=torch.uint8) for _ in range(self.size)]
        self._collective(dist.all_gather, found, torch.frombuffer(data, dtype=torch.uint8))
        return [json.loads(bytes(one.tolist())) for one in found]

    def _collective(self, collective: Callable[..., Any], *args: Any) -> None:
        try:
            collective(*args)
        except RuntimeError as error:
            log.error("Rank %d lost the others: %s", self.rank, error)
            leave()


def interface_towards(host: str) -> str:
    """The network interface by which this machine reaches a host, which may be itself.

    Raises ConfigError: none has the address from which it is reached.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    raise ConfigError(
        f"got no network interface with the address {own}, by which {host} is reached; set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that the machines reach each other by"
    )
