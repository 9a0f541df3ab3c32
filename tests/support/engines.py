"""The processes of a server that hold its models."""

from pathlib import Path

from tests.support.live_server import LiveServer


def engines(server: LiveServer) -> list[int]:
    """Process ids of a server's sampler and learner, forked from a child of its own or not."""
    assert server.process is not None
    children = _children(server.process.pid)
    forks = [pid for pid in children if "ipc.fork_server" in _read(pid, "cmdline")]
    forked = [pid for fork in forks for pid in _children(fork)]
    return [pid for pid in children if pid not in forks] + forked


def part_of(pid: int) -> str:
    """Whether an engine's process is the ``learner`` or the ``sampler``."""
    learns = "backends.peft" in _read(pid, "cmdline") or _read(pid, "comm") == "peft"
    return "learner" if learns else "sampler"


def _children(pid: int) -> list[int]:
    return [int(child) for child in _read(pid, f"task/{pid}/children").split()]


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text().strip()
