"""The server, which starts when the file ``START_WHEN`` is there."""

import asyncio
import os
from pathlib import Path

from langchain_art_server.__main__ import cli
from langchain_art_server.gateway.service import Service

_start = Service.start


async def _wait(service: Service) -> None:
    while not Path(os.environ["START_WHEN"]).exists():
        await asyncio.sleep(0.02)
    await _start(service)


Service.start = _wait  # type: ignore[reportAttributeAccessIssue]
if __name__ == "__main__":
    cli(prog_name="langchain-art serve")
