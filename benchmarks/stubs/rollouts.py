"""Agents whose time is that of their tools: `benchmarks.workers` runs them, here and by workers."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_art import ChatART, Run, capture

_models: dict[asyncio.AbstractEventLoop, ChatART] = {}


async def tools(scenario: dict[str, Any]) -> Run:
    """``turns`` calls of the model, and after each a tool that takes ``seconds``."""
    loop = asyncio.get_running_loop()
    model = _models.setdefault(loop, ChatART(model="tiny", max_tokens=4))
    async with capture() as run:
        for turn in range(scenario["turns"]):
            await model.ainvoke(f"Question {scenario['id']}, turn {turn}")
            await asyncio.sleep(scenario["seconds"])
        run.reward = 1.0
    return run


#: One name for each number of workers, so that these are there at once and lease their own.
by_1 = by_2 = by_4 = by_8 = tools
