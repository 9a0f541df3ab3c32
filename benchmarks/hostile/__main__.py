"""``python -m benchmarks.hostile``: one attack, for some seconds, at the lowest priority.

An attacker's own computer is not ours: at the lowest priority it takes nothing from the server.
Reads one JSON object from standard input (``port``, ``key``, ``attack``, ``seconds``), writes one:
how often each status was the answer; "None" is a connection that the server closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from typing import Any

from benchmarks.hostile.attacks import Target, attacks, statuses


async def attack(asked: dict[str, Any]) -> None:
    running = attacks()[asked["attack"]](Target(asked["port"], asked["key"]))
    print("ready", flush=True)
    try:
        await asyncio.wait_for(running, asked["seconds"])
    except TimeoutError:
        return


if __name__ == "__main__":
    os.nice(19)
    logging.disable()  # asyncio's warnings of connections that the server closed
    asyncio.run(attack(json.load(sys.stdin)))
    print(json.dumps(statuses()))
