"""The processes of a server that hold its models."""

from __future__ import annotations

from pathlib import Path

from tests.support.live_server import LiveServer


def engines(server: LiveServer) -> list[int]:
    """Process ids of the server's children: the sampler and the learner."""
    assert server.process is not None
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]
