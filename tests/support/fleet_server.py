"""``python -m tests.support.fleet_server MODEL``: a server of a fleet that stops itself as told.

Its leases are short. The file of ``STOP_FILE`` names a moment of a job; the first server that comes
to it removes the file and stops (SIGSTOP), until somebody continues it. At ``the step`` it does not
stop and renews its lease; the step lasts until the file `lasting` is removed.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_art_server import __main__ as door
from langchain_art_server.backends.peft.learner import PeftLearner
from langchain_art_server.policies.adapter_store import AdapterStore
from langchain_art_server.storage import fleet, job_store

LEASE_SECONDS, RENEW_SECONDS = 3.0, 0.4


def lasting(stop_file: Path) -> Path:
    """The file that there is while a step lasts."""
    return stop_file.with_suffix(".lasting")


def is_told(moment: str) -> bool:
    """True for the first server that comes to the moment of ``STOP_FILE``, which is removed."""
    stop = Path(os.environ["STOP_FILE"])
    try:
        if stop.read_text() != moment:
            return False
        stop.unlink()
    except FileNotFoundError:
        return False
    return True


def come_to(moment: str) -> None:
    if is_told(moment):
        os.kill(os.getpid(), signal.SIGSTOP)


def _around(work: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    def watched(*args: Any, **options: Any) -> Any:
        come_to(before)
        done = work(*args, **options)
        come_to(after)
        return done

    return watched


def main() -> None:
    fleet.LEASE_SECONDS, fleet.RENEW_SECONDS = LEASE_SECONDS, RENEW_SECONDS
    AdapterStore.publish = _around(AdapterStore.publish, "before the rename", "after the rename")
    job_store.require_running = _around(job_store.require_running, "", "in the transaction")
    step = PeftLearner.step

    async def watched(*args: Any) -> Any:
        come_to("before the step")
        if is_told("the step"):
            (lasts := lasting(Path(os.environ["STOP_FILE"]))).touch()
            while lasts.exists():
                await asyncio.sleep(0.01)
        done = await step(*args)
        come_to("after the step")
        return done

    PeftLearner.step = watched  # type: ignore[reportAttributeAccessIssue]
    door.cli()


if __name__ == "__main__":
    main()
