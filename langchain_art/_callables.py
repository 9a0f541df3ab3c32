"""What a user's functions are, and calls of ours from programs without an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from langchain_art.errors import ConfigError

T = TypeVar("T")


def is_async(function: Callable[..., Any]) -> bool:
    """True for ``async def`` functions and for objects with an ``async def __call__``."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def run_sync(work: Coroutine[Any, Any, T], name: str) -> T:
    """Run a coroutine to its end; a ConfigError names what to await where a loop runs already."""
    if _in_event_loop():
        work.close()
        raise ConfigError(f"An event loop runs here already; write `await {name}(...)`")
    return asyncio.run(work)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
