"""The routes of runs: trajectories, groups and rewards; rollouts that workers lease."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from pydantic_core import to_json

from langchain_art import wire
from langchain_art.errors import InvalidRequest
from langchain_art_server.gateway.auth import access_of, peer_of
from langchain_art_server.gateway.lists import After, Limit, PageOf, Turns, look_turns, page_turns
from langchain_art_server.gateway.openapi import body_docs
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.jobs.audit import chosen_calls
from langchain_art_server.jobs.trajectory_assembly import assemble
from langchain_art_server.storage.queries import Page
from langchain_art_server.storage.rollout_queue import LOOK_SECONDS, wait_for


def record_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of trajectories, their groups and rewards."""
    turns = page_turns()

    @app.post("/v1/trajectories", openapi_extra=body_docs(wire.Trajectory))
    async def add_trajectory(request: Request) -> dict[str, Any]:
        """Store a trajectory. Idempotent by id; the answer is sent when it is on disk."""
        service.health.require_space()
        trajectory = await model_of(request, wire.Trajectory)
        stored = await service.store.add_trajectories([trajectory])
        return {"id": trajectory.id, "stored": bool(stored)}

    @app.post("/v1/groups", openapi_extra=body_docs(wire.TrajectoryGroup))
    async def add_group(request: Request) -> dict[str, Any]:
        """Store the trajectories of a group, all or none. Idempotent by their ids."""
        service.health.require_space()
        group = await model_of(request, wire.TrajectoryGroup)
        stored = await service.store.add_trajectories(group.trajectories, group.id)
        return {"id": group.id, "stored": stored}

    @app.get("/v1/trajectories", response_model=PageOf[wire.Trajectory])
    async def list_trajectories(
        request: Request,
        limit: Limit = 50,
        scenario: str | None = None,
        after: After = None,
        prefix: After = None,
    ) -> Response:
        """List trajectories, newest first.

        With `scenario`, those of that scenario; with `prefix`, those whose id begins so. A page has
        at most `limit` items and, but for its first one, 8 MiB.
        """
        page = await turns.take(
            peer_of(request.scope),
            lambda: service.store.recent_trajectories(limit, scenario, after, prefix),
        )
        return whole(page)

    @app.get("/v1/trajectories/{trajectory_id}")
    async def get_trajectory(trajectory_id: str) -> wire.Trajectory:
        """Get a trajectory."""
        return (await service.store.trajectory(trajectory_id)).trajectory

    @app.delete("/v1/trajectories/{trajectory_id}")
    async def delete_trajectory(trajectory_id: str, request: Request) -> dict[str, str]:
        """Delete a trajectory that no open job uses, and its calls but for other trajectories'."""
        await service.store.delete_trajectory(trajectory_id)
        await service.note(access_of(request.scope), "deleted_run", trajectory_id)
        return {"deleted": trajectory_id}

    @app.get("/v1/trajectories/{trajectory_id}/audit")
    async def audit_trajectory(
        trajectory_id: str,
        policy: str | None = None,
        trainable: Annotated[list[str] | None, Query(max_length=256)] = None,
        sft: bool = False,
    ) -> wire.TrajectoryAudit:
        """Report which tokens of a trajectory are trained, and why the others are excluded.

        Without a policy each call is judged for the one that sampled it. ``trainable=NAME:true``
        and ``trainable=NAME:false``, any number of them, choose calls as `trainable` does in a
        request to train. With ``sft`` the audit is that of a supervised step (``loss: sft``).
        """
        return await service.audit(trajectory_id, policy, chosen_calls(trainable or []), sft=sft)

    @app.put("/v1/trajectories/{trajectory_id}/reward", openapi_extra=body_docs(wire.Reward))
    async def set_reward(trajectory_id: str, request: Request) -> wire.Trajectory:
        """Set the reward of a trajectory.

        If only calls tagged with its id are stored, it is assembled from them.
        """
        return await service.reward(trajectory_id, await model_of(request, wire.Reward))


def whole(page: Page[bytes]) -> Response:
    """A page whose items are JSON already."""
    known: dict[str, Any] = {"last_id": page.last_id, "has_more": page.has_more}
    about = {"object": "list", **known, "damaged": page.damaged}
    whole = to_json(about)[:-1] + b',"data":[' + b",".join(page.items) + b"]}"
    return Response(whole, media_type="application/json")


def rollout_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of rollouts: for workers, and for those who put them up."""
    looks = look_turns()

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
    peer = peer_of(request.scope)
    while True:
        change = queue.work.next()
        found = await looks.take(peer, lambda: queue.lease(asked))
        if found.leases or found.lost or not asked.free:
            return found
        is_due = False
        while not is_due:
            left = deadline - time.monotonic()
            if left <= 0 or service.is_stopping():
                return found
            await wait_for(change, min(left, LOOK_SECONDS))
            is_due = await looks.take_by(
                deadline, peer, lambda: queue.is_due(asked.rollout), otherwise=False
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
        change = queue.ends.next()
        found = await looks.take_by(
            deadline, peer, lambda: queue.finished(batch, asked.limit), found
        )
    return found


async def _assembled(
    service: Service, rollout_id: str, outcome: wire.AttemptOutcome
) -> wire.Trajectory:
    """The trajectory of the calls that an attempt has tagged. Raises InvalidRequest: no call."""
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
