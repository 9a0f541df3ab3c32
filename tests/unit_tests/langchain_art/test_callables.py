"""Calls from programs without an event loop: one loop for the main thread, as if run by itself."""

import asyncio
import multiprocessing
import subprocess
import sys
import threading
from contextlib import nullcontext
from contextvars import ContextVar

import pytest

from langchain_art._callables import run_sync

_NAME: ContextVar[str] = ContextVar("_NAME", default="none")


async def _loop() -> tuple[int, str]:
    return id(asyncio.get_running_loop()), _NAME.get()


def test_calls_of_the_main_thread_share_a_loop_and_each_has_its_callers_context() -> None:
    first, _ = run_sync(_loop(), "call")
    token = _NAME.set("mine")
    assert run_sync(_loop(), "call") == (first, "mine")
    _NAME.reset(token)
    asyncio.run(_loop())  # a loop of the program's own, between two calls
    assert run_sync(_loop(), "call") == (first, "none")


@pytest.mark.parametrize(
    "kind", [None, ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError]
)
def test_what_a_call_leaves_ends_with_it_however_it_ends(kind: type[BaseException] | None) -> None:
    ended: list[bool] = []

    async def left() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def raises() -> None:
        await asyncio.sleep(0)
        if kind is not None:
            raise kind

    async def call() -> str:
        tasks.append(asyncio.create_task(left()))
        await asyncio.gather(*(raises() for _ in range(3)))  # in tasks, not in the call
        return "done"

    tasks: list[asyncio.Task[None]] = []
    for _ in range(2):
        with pytest.raises(kind) if kind else nullcontext():
            assert run_sync(call(), "call") == "done"
    assert ended == [True, True] and all(task.cancelled() for task in tasks)


def test_what_a_task_raises_at_its_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def left() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("not closed")

    async def call() -> None:
        tasks.append(asyncio.create_task(left()))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    run_sync(call(), "call")
    assert "not closed" in caplog.text


def test_other_threads_and_a_forked_process_have_loops_of_their_own() -> None:
    mine = run_sync(_loop(), "call")
    seen: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: seen.append(run_sync(_loop(), "call")))
    thread.start()
    thread.join()
    assert len(seen) == 1
    child = multiprocessing.get_context("fork").Process(target=_in_a_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert run_sync(_loop(), "call") == mine  # its selector is as it was


def _in_a_child() -> None:
    assert run_sync(_loop(), "call")[1] == "none"


def test_a_program_ends_without_a_word() -> None:
    program = """if True:
        import asyncio
        from langchain_art._callables import let_all_nodes_run, run_sync

        async def main():
            let_all_nodes_run()
            items = generator()
            await anext(items)
            await asyncio.to_thread(print, "done")
            left.append(items)

        async def generator():
            try:
                yield
            finally:
                print("closed")

        left = []
        run_sync(main(), "main")
    """
    argv = [sys.executable, "-X", "dev", "-c", program]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\nclosed\n", "")
