"""What a function that a user hands in is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_async(rollout: Callable[..., Any]) -> bool:
    """True for ``async def`` and for objects whose ``__call__`` is one."""
    call = getattr(rollout, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    return inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(call)
