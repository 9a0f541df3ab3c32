"""Server-sent events of what happens on the server: one reader of the store for all viewers.

An event names the kinds of facts that changed (``runs``, ``calls``, ``rewards``: a stored run was
changed or deleted, ``reviews``, ``jobs``, ``event``: a job's log, ``workers`` or ``health``), and
what runs now. The page asks for those again. A stream begins with ``hello``: a page that has
reconnected asks for everything.
Format: HTML, section 9.2 (html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from itertools import takewhile
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import StreamingResponse

from langchain_art.errors import ArtError, Overloaded
from langchain_art_server.gateway.service import Service
from langchain_art_server.storage.queries import counts_by
from langchain_art_server.storage.rollout_queue import ChangeSignal, wait_for
from langchain_art_server.storage.tables import CALLS, EVENTS, JOBS, REVIEWS, TRAJECTORIES

log = logging.getLogger(__name__)
#: Seconds between two looks, and between two signs of life of an idle stream.
LOOK_SECONDS, ALIVE_SECONDS = 0.5, 10.0
#: Seconds for each viewer that lie between two looks at least: each asks for what has changed.
EACH_SECONDS = 0.04
MAX_VIEWERS = 256
_KEPT = 512

#: What there is of each kind, two equal ones if nothing happened; the end of the running job's log.
_Activity = tuple[dict[str, object], dict[str, Any]]


class Live:
    """The events of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.viewers = 0
        self._task: asyncio.Task[None] | None = None
        #: Set when there was a first look: what comes after it is an event.
        self._ready = asyncio.Event()
        self._news = ChangeSignal()
        self._number = 0
        self._events: deque[tuple[int, str]] = deque(maxlen=_KEPT)

    async def stream(self) -> AsyncGenerator[str]:
        """The events from now on, for ever."""
        self.viewers += 1
        try:
            if self._task is None or self._task.done():
                self._ready = asyncio.Event()
                self._task = asyncio.create_task(self._watch(self._ready))
            await self._ready.wait()
            at = self._number
            yield "retry: 1000\nevent: hello\ndata: {}\n\n"
            while not (self._service.is_stopping() or self._task.done()):
                change = self._news.next()
                found = list(takewhile(lambda one, at=at: one[0] > at, reversed(self._events)))
                for number, text in reversed(found):
                    yield f"data: {text}\n\n"
                    at = number
                if not found and not await wait_for(change, ALIVE_SECONDS):
                    yield ": alive\n\n"
        finally:
            self.viewers -= 1

    async def _watch(self, ready: asyncio.Event) -> None:
        before: dict[str, object] | None = None
        while self.viewers and not self._service.is_stopping():
            try:
                now, job = await self._look()
            except ArtError as error:  # the database does not answer; health says so
                log.warning("What happens could not be read: %s", error)
            else:
                if before is not None and before != now:
                    self._note([kind for kind in now if now[kind] != before[kind]], job)
                before = now
            finally:
                ready.set()
            pause = self.viewers * EACH_SECONDS
            await asyncio.sleep(pause)
            await self._service.jobs.wait(max(0.0, LOOK_SECONDS - pause))
        ready.set()
        self._news.notify()

    async def _look(self) -> _Activity:
        service = self._service
        restarts = service.sampler.restarts + service.learner.restarts
        replicas = [one.problem for one in service.sampler.replicas]
        health = (service.health.reasons, restarts, replicas, dict(service.router.serving))
        rollouts, workers = await service.store.rollouts.counts()
        done = [one.model_dump(exclude={"heard_seconds"}) for one in workers]
        found, job = await service.store.read(read_activity)
        kept = {"health": health, "workers": (rollouts, done), "rewards": service.store.changes}
        return found | kept, job

    def _note(self, changed: list[str], job: dict[str, Any]) -> None:
        happened = job | {
            "changed": changed,
            "running_calls": self._service.running_calls,
            "ready": not self._service.health.reasons,
        }
        self._number += 1
        self._events.append((self._number, to_json(happened).decode()))
        self._news.notify()


def read_activity(connection: sa.Connection) -> _Activity:
    """Read what there is now. Rows are not checked: only numbers and a message are read."""

    def newest(column: sa.Column[int]) -> int:
        return connection.scalar(sa.select(sa.func.max(column))) or 0

    running = sa.select(JOBS.c.id).where(JOBS.c.state == "running").order_by(JOBS.c.number)
    job = connection.scalar(running.limit(1))
    events = sa.select(EVENTS.c.seq, EVENTS.c.message).where(EVENTS.c.job_id == job)
    last = connection.execute(events.order_by(EVENTS.c.seq.desc()).limit(1)).first()
    known = sa.select(EVENTS.c.progress).where(
        EVENTS.c.job_id == job, EVENTS.c.progress.is_not(None)
    )
    found: dict[str, object] = {
        "runs": newest(TRAJECTORIES.c.number),
        "calls": newest(CALLS.c.number),
        "reviews": newest(REVIEWS.c.number),
        "jobs": counts_by(connection, JOBS.c.state),
        "event": (job, last.seq if last else 0),
    }
    progress = connection.scalar(known.order_by(EVENTS.c.seq.desc()).limit(1))
    return found, {"job": job, "message": last.message if last else "", "progress": progress}


def live_routes(router: APIRouter, service: Service) -> None:
    """Add the stream of events."""
    live = Live(service)

    @router.get("/events")
    async def events() -> StreamingResponse:
        """Server-sent events."""
        if live.viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} pages watch this server already.", retry_after=5)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        kind = "text/event-stream"
        return StreamingResponse(live.stream(), headers=headers, media_type=kind)
