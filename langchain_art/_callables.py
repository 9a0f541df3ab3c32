"""Inspection of functions that a user passes in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_async(function: Callable[..., Any]) -> bool:
    """True for ``async def`` functions and for objects with an ``async def __call__``."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
