"""Calls of a judge: how many at once, how long each may take, and pauses that a provider asks for.

A call is synchronous, in a thread of its own. Chat models keep the connections of their
asynchronous clients across event loops, and share them with other models; if a program runs several
loops (``asyncio.run`` twice, `Trainer.fit_sync`, an evaluator that is invoked synchronously), these
connections belong to another loop. A call that is cancelled or takes too long is left to its
thread, which does not keep the program alive.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from threading import Lock, Thread
from typing import Any, TypeVar

from langchain_art._callables import called_in_thread

_AT_ONCE = 32

T = TypeVar("T")


class JudgeCalls:
    """The calls of one model, from any event loops: at most `at_once` together, in order."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._free = at_once
        self._waiting: deque[Future[None]] = deque()
        self._lock = Lock()
        self._resumed = 0.0

    async def run(self, function: Callable[[], T], timeout: float | None) -> T:
        """The result of `function`, in a thread. `timeout` is in seconds, without the waiting.

        Raises:
            TimeoutError: it took longer.
        """
        await self._enter()
        try:
            while (left := self._resumed - time.monotonic()) > 0:
                await asyncio.sleep(left)
            scope = asyncio.timeout(timeout)
            try:
                async with scope:
                    return await asyncio.wrap_future(_started(function))
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise TimeoutError(f"no answer in {timeout:g} s (`timeout`)") from error
        finally:
            self._leave()

    def pause(self, seconds: float) -> None:
        """Let no call begin for so long."""
        self._resumed = max(self._resumed, time.monotonic() + seconds)

    async def _enter(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn: Future[None] = Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it came at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1


def calls_of(identity: str) -> JudgeCalls:
    """The calls of the model of this `judge_model.identity`, whoever asks it."""
    return _calls_of(identity, os.getpid())


@cache
def _calls_of(identity: str, process: int) -> JudgeCalls:  # a fork does not copy the threads
    return JudgeCalls()


def _started(function: Callable[[], T]) -> Future[T]:
    """`function` in a thread that does not keep the program alive, with the caller's context."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    context = copy_context()

    def work() -> None:
        try:
            found = context.run(called_in_thread, function)
        except BaseException as error:  # noqa: BLE001 - the task that waits raises it
            done.set_exception(error)
        else:
            done.set_result(found)

    Thread(target=work, name="langchain-art-judge", daemon=True).start()
    return done


def retry_after(error: BaseException) -> float | None:
    """Seconds to wait that the answer behind an error asks for; None if it asks for nothing.

    Read are ``retry-after-ms`` and ``Retry-After`` (seconds or a date, RFC 9110 section 10.2.3) of
    the error's response, as the SDKs of OpenAI, Anthropic, httpx and litellm keep it, and the
    attribute `retry_after` of our own errors; of the error, or of its causes.
    """
    one: BaseException | None = error
    while one is not None:
        own: object = getattr(one, "retry_after", None)
        if isinstance(own, int | float):
            return max(0.0, float(own))
        response: object = getattr(one, "response", None)
        for headers in (
            getattr(response, "headers", None),
            getattr(one, "litellm_response_headers", None),
        ):
            if isinstance(headers, Mapping) and (asked := _seconds(headers)) is not None:
                return asked
        one = one.__cause__
    return None


def _seconds(headers: Mapping[Any, Any]) -> float | None:
    known = {str(name).lower(): str(value) for name, value in headers.items()}
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            asked = float(known[name]) * unit
        except (KeyError, ValueError):
            continue
        if 0 <= asked < float("inf"):
            return asked
    try:
        until = parsedate_to_datetime(known["retry-after"])
    except (KeyError, ValueError):
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
