"""The processes of a server that hold its models."""

import os
from pathlib import Path

from tests.support.live_server import LiveServer


def engines(server: LiveServer) -> list[int]:
    """Process ids of a server's sampler and learner, forked from a child of its own or not."""
    assert server.process is not None
    own = _children(server.process.pid)
    forks = [pid for pid in own if "ipc.fork_server" in _read(pid, "cmdline")]
    forked = [pid for fork in forks for pid in _children(fork)]
    return [pid for pid in own if pid not in forks] + forked


def part_of(pid: int) -> str:
    """Whether an engine's process is the ``learner`` or the ``sampler``."""
    learns = "backends.peft" in _read(pid, "cmdline") or _read(pid, "comm") == "peft"
    return "learner" if learns else "sampler"


def children(pid: int) -> list[int]:
    """Process ids of all descendants, parents first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            mine = [int(one) for one in (task / "children").read_text().split()]
        except OSError:
            continue
        for child in mine:
            found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resident(pids: list[int]) -> int:
    """Bytes that the processes hold in memory, shared ones counted in each."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    return [int(child) for child in _read(pid, f"task/{pid}/children").split()]


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text().strip()
