"""``python -m tests.support.fleet_server MODEL``: a server of a fleet that stops itself as told.

Its leases are short, and so is its patience with an object store, which its event loop must not
wait for. The file of ``STOP_FILE`` names a moment of a job; the first server that comes to it
removes the file and stops (SIGSTOP), until somebody continues it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_art_server import __main__ as door
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.policies import adapter_objects
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.storage import fleet, job_store

LEASE_SECONDS, RENEW_SECONDS = 3.0, 0.4
REQUEST_SECONDS, RETRY_SECONDS = 2, 1


def come_to(moment: str) -> None:
    stop = Path(os.environ["STOP_FILE"])
    try:
        if stop.read_text() != moment:
            return
        stop.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)


def _around(work: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    def watched(*args: Any, **options: Any) -> Any:
        come_to(before)
        done = work(*args, **options)
        come_to(after)
        return done

    return watched


_starting = threading.local()


def _at_the_start(require: Callable[..., None]) -> Callable[..., None]:
    def watched(store: adapter_objects.ObjectStore) -> None:
        _starting.now = True
        try:
            require(store)
        finally:
            _starting.now = False

    return watched


def _off_the_loop(work: Callable[..., Any]) -> Callable[..., Any]:
    """What talks to the object store, and fails where the server's event loop would wait for it."""

    def watched(*args: Any) -> Any:
        if asyncio._get_running_loop() is not None and not getattr(_starting, "now", False):
            raise RuntimeError(f"{work.__name__} of {args[1:]} is on the event loop")
        return work(*args)

    return watched


def main() -> None:
    store = adapter_objects.ObjectStore
    store.require = _at_the_start(store.require)
    for name in ("put", "create", "read", "download", "list", "delete"):
        setattr(store, name, _off_the_loop(getattr(store, name)))
    fleet.LEASE_SECONDS, fleet.RENEW_SECONDS = LEASE_SECONDS, RENEW_SECONDS
    adapter_objects.REQUEST_SECONDS = REQUEST_SECONDS
    adapter_objects.RETRY_SECONDS = RETRY_SECONDS
    store.put = _around(store.put, "", "in the upload")
    AdapterStore.publish = _around(AdapterStore.publish, "before the rename", "after the rename")
    job_store.require_running = _around(job_store.require_running, "", "in the transaction")
    step = PeftLearner.step

    async def watched(learner: PeftLearner, *args: Any) -> Any:
        come_to("before the step")
        done = await step(learner, *args)
        come_to("after the step")
        return done

    PeftLearner.step = watched  # type: ignore[reportAttributeAccessIssue]
    door.cli()


if __name__ == "__main__":
    main()
