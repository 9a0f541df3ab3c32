"""Names of a user's functions, and calls of ours from programs without an event loop."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from threading import current_thread, main_thread
from typing import Any, TypeVar
from weakref import WeakSet

from langchain_art.errors import ArtError, ConfigError

T = TypeVar("T")
#: Event loops that `let_all_nodes_run` has seen.
_LOOPS = WeakSet[asyncio.AbstractEventLoop]()
#: By process, since a forked one must not touch its parent's: the main thread's runner.
_RUNNERS: dict[int, asyncio.Runner] = {}


def is_async(function: Callable[..., Any]) -> bool:
    """True for ``async def`` functions and for objects with an ``async def __call__``."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def call(function: Callable[..., Any], *given: Any, threads: Executor | None = None) -> Any:
    """The result of a user's function: ``async def`` is awaited, a plain ``def`` runs in a thread.

    The thread has the caller's context variables. `threads`: None is the event loop's own.

    Raises:
        ArtError: it raised something that is no error (`only_errors`).
    """
    if is_async(function):
        found = function(*given)
    else:
        run = copy_context().run
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(threads, lambda: run(called_in_thread, function, *given))
    if inspect.isawaitable(found):
        with only_errors(function):
            return await found
    return found


def let_all_nodes_run() -> None:
    """Give the running event loop a thread for each synchronous node that runs.

    LangGraph runs those of an ``ainvoke`` in the loop's default executor. Asyncio's own has as many
    threads as cores, and four; this one has as many as are needed at once. One that the program has
    set stays.
    """
    loop = asyncio.get_running_loop()
    if loop in _LOOPS:
        return
    _LOOPS.add(loop)
    there = getattr(loop, "_default_executor", None)
    if there is None or getattr(there, "_thread_name_prefix", "") == "asyncio":
        # More than could run at once; a thread is made where none is idle.
        loop.set_default_executor(ThreadPoolExecutor(4096, "nodes"))


def called_in_thread(function: Callable[..., Any], *given: Any) -> Any:
    """The result of a function in a thread that a task waits for.

    Raises:
        ArtError: it raised something that is no error, a cancellation of its own included.
    """
    with only_errors(function):
        try:
            return function(*given)
        except asyncio.CancelledError as error:  # the waiting task would count as cancelled
            raise _no_error(function, error) from error


@contextmanager
def only_errors(source: object) -> Generator[None, None, None]:
    """Turns StopIteration, SystemExit and KeyboardInterrupt of a user's code into an error.

    Futures of older Pythons take no StopIteration, and the others end the event loop of the task
    that raised them: whoever waits for it would wait for ever. A KeyboardInterrupt on the main
    thread is the user's Ctrl-C, and is raised as it is.

    Raises:
        ArtError: the code raised one of these; it is the error's cause.
    """
    try:
        yield
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
            raise
        raise _no_error(source, error) from error


def _no_error(source: object, error: BaseException) -> ArtError:
    source = source.func if isinstance(source, partial) else source
    name = getattr(source, "__qualname__", None) or type(source).__name__
    said = f"{type(error).__name__}({str(error)!r:.200})" if str(error) else type(error).__name__
    why = ": next() was called on something that had ended"
    return ArtError(
        f"{name} raised {said}, expected a result or an error"
        f"{why if isinstance(error, StopIteration) else ''}"
    )


def run_sync(work: Coroutine[Any, Any, T], name: str) -> T:
    """Run a coroutine to its end; a ConfigError names what to await where a loop runs already.

    The main thread's calls share an event loop: `ChatOpenAI` and others keep connections of the
    loop that opened them.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # as it is to be
        pass
    else:
        work.close()
        raise ConfigError(f"An event loop runs here already; write `await {name}(...)`")
    if current_thread() is not main_thread():
        return asyncio.run(work)
    runner = _RUNNERS.get(os.getpid())
    if runner is None:
        runner = _RUNNERS[os.getpid()] = asyncio.Runner()
        atexit.register(_close, os.getpid())
    try:
        return runner.run(work, context=copy_context())
    except (KeyboardInterrupt, SystemExit):  # other tasks may raise it, too: only closing ends all
        _RUNNERS.pop(os.getpid()).close()
        raise
    finally:
        if os.getpid() in _RUNNERS:
            runner.run(_end_others())


async def _end_others() -> None:
    """Cancel the tasks that a call left, and wait for them, as `asyncio.run` does at its end."""
    left = list(asyncio.all_tasks() - {asyncio.current_task()})
    for task in left:
        task.cancel()
    for task, ended in zip(left, await asyncio.gather(*left, return_exceptions=True), strict=True):
        if isinstance(ended, Exception):
            about = {"message": "a task raised at its end", "exception": ended, "task": task}
            asyncio.get_running_loop().call_exception_handler(about)


def _close(process: int) -> None:
    """Close the loop as its process ends, when no thread may be started, as the runner would."""
    if os.getpid() == process and (runner := _RUNNERS.pop(process, None)) is not None:
        loop = runner.get_loop()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
