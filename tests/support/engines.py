"""The processes of a server that hold its models."""

from __future__ import annotations

from pathlib import Path

from tests.support.live_server import LiveServer


def engines(server: LiveServer) -> list[int]:
    """Process ids of a server's sampler and learner, which are forked from a child of its own."""
    assert server.process is not None
    return [pid for child in _children(server.process.pid) for pid in _children(child)]


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]
