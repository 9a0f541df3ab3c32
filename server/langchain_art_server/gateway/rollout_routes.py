"""The routes of rollouts that are put up, leased by workers, completed and taken."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response

from langchain_art import wire
from langchain_art.errors import InvalidRequest
from langchain_art_server.gateway.auth import peer_of
from langchain_art_server.gateway.lists import Turns, look_turns
from langchain_art_server.gateway.openapi import body_docs
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.jobs.trajectory_assembly import assemble
from langchain_art_server.storage.rollout_queue import LOOK_SECONDS, wait_for


def rollout_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of rollouts."""
    looks = look_turns()
    _workers_routes(app, service, looks)
    _owners_routes(app, service, looks)


def _workers_routes(app: FastAPI, service: Service, looks: Turns[Any]) -> None:
    @app.post("/v1/rollouts/lease", openapi_extra=body_docs(wire.LeaseRequest))
    async def lease_rollouts(request: Request) -> wire.Leases:
        """Lease rollouts to a worker: as many as it has slots free, or its share of what waits.

        With `wait`, answers when there are some, or after so many seconds.
        """
        return await _lease(service, looks, request, await model_of(request, wire.LeaseRequest))

    @app.post("/v1/rollouts/heartbeat", openapi_extra=body_docs(wire.LeasesHeld))
    async def renew_leases(request: Request) -> wire.LeasesLost:
        """Renew a worker's leases. The answer names those that have ended: stop their runs."""
        lost = await service.store.rollouts.hold(await model_of(request, wire.LeasesHeld))
        return wire.LeasesLost(lost=tuple(lost))

    @app.post("/v1/rollouts/return", openapi_extra=body_docs(wire.LeasesReturned))
    async def return_leases(request: Request) -> dict[str, bool]:
        """Hand leases back: their rollouts are given to other workers at once. Idempotent."""
        await service.store.rollouts.give_back(await model_of(request, wire.LeasesReturned))
        return {"ok": True}

    @app.post("/v1/rollouts/{rollout_id}/complete", openapi_extra=body_docs(wire.AttemptOutcome))
    async def complete_rollout(rollout_id: str, request: Request) -> dict[str, str]:
        """End an attempt with a trajectory, a reward or an error. Idempotent.

        Without a trajectory and an error, it is assembled from the calls that were tagged with the
        lease's trajectory id. 409: the lease has gone to another attempt, and this is discarded.
        """
        service.health.require_space()
        outcome = await model_of(request, wire.AttemptOutcome)
        if outcome.trajectory is None and outcome.error is None:
            run = await _assembled(service, rollout_id, outcome)
            outcome = outcome.model_copy(update={"trajectory": run})
        await service.store.rollouts.complete(rollout_id, outcome)
        return {"completed": rollout_id}


def _owners_routes(app: FastAPI, service: Service, looks: Turns[Any]) -> None:
    @app.post("/v1/rollouts", openapi_extra=body_docs(wire.RolloutBatch))
    async def put_rollouts(request: Request) -> dict[str, int]:
        """Put rollouts up, for workers to lease. Idempotent by their ids."""
        service.health.require_space()
        return {"new": await service.store.rollouts.put(await model_of(request, wire.RolloutBatch))}

    @app.get("/v1/rollouts/batches/{batch}")
    async def get_batch(batch: str) -> wire.BatchStatus:
        """Get how far a batch of rollouts is."""
        return await service.store.rollouts.status(batch)

    @app.post(
        "/v1/rollouts/batches/{batch}/take",
        openapi_extra=body_docs(wire.TakeRequest),
        response_model=wire.TakenRollouts,
    )
    async def take_rollouts(batch: str, request: Request) -> Response:
        """Take finished rollouts of a batch; those named in `done` have arrived, and are deleted.

        With `wait`, answers when there are some, or after so many seconds. An answer has at most
        `limit` rollouts and, but for its first one, 8 MiB.
        """
        asked = await model_of(request, wire.TakeRequest)
        finished, status = await _take(service, looks, request, batch, asked)
        whole = b'{"finished":[' + b",".join(finished) + b'],"status":' + status + b"}"
        return Response(whole, media_type="application/json")

    @app.delete("/v1/rollouts/batches/{batch}")
    async def cancel_batch(batch: str) -> dict[str, str]:
        """Cancel a batch: its rollouts are deleted, whatever their state."""
        await service.store.rollouts.cancel(batch)
        return {"deleted": batch}


async def _lease(
    service: Service, looks: Turns[Any], request: Request, asked: wire.LeaseRequest
) -> wire.Leases:
    """Leases, as soon as there are some, or after the seconds that were asked for."""
    queue, deadline = service.store.rollouts, time.monotonic() + asked.wait
    while True:
        change = queue.work.next()
        found = await looks.take(peer_of(request.scope), lambda: queue.lease(asked))
        if found.leases or found.lost or not asked.free:
            return found
        is_due = False
        while not is_due:
            left = deadline - time.monotonic()
            if left <= 0 or service.is_stopping():
                return found
            await wait_for(change, min(left, LOOK_SECONDS))
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    is_due = await looks.take(
                        peer_of(request.scope), lambda: queue.is_due(asked.rollout)
                    )
            if await request.is_disconnected():  # one that has gone is given nothing
                return found


async def _take(
    service: Service, looks: Turns[Any], request: Request, batch: str, asked: wire.TakeRequest
) -> tuple[list[bytes], bytes]:
    """Finished rollouts as JSON, as soon as there are some, and the status of the batch."""
    queue, deadline = service.store.rollouts, time.monotonic() + asked.wait
    peer = peer_of(request.scope)
    change = queue.ends.next()
    found = await looks.take(peer, lambda: queue.take(batch, asked))
    while not (found[0] or service.is_stopping() or await request.is_disconnected()):
        if (left := deadline - time.monotonic()) <= 0:
            break
        await wait_for(change, min(left, LOOK_SECONDS))
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                change = queue.ends.next()
                found = await looks.take(peer, lambda: queue.finished(batch, asked.limit))
    return found


async def _assembled(
    service: Service, rollout_id: str, outcome: wire.AttemptOutcome
) -> wire.Trajectory:
    """The trajectory of the calls that an attempt has tagged.

    Raises:
        InvalidRequest: there are none.
    """
    calls = await service.store.tagged_calls(outcome.trajectory_id)
    if not calls:
        raise InvalidRequest(
            f"got neither a trajectory nor an error, and no call was tagged with "
            f"{outcome.trajectory_id!r}, the lease's trajectory_id "
            '("art": {"trajectory_id": …} in the body of a completion, or the header '
            "x-art-trajectory-id).",
            param="trajectory",
        )
    run = await asyncio.to_thread(assemble, outcome.trajectory_id, calls)
    name = await service.store.rollouts.lease_of(rollout_id, outcome.trajectory_id)
    return run.model_copy(update={"reward": outcome.reward, "scenario": name or run.scenario})
