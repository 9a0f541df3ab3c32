"""The routes of what is recorded of runs: trajectories, their groups and rewards."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from pydantic_core import to_json

from langchain_art import wire
from langchain_art_server.gateway.auth import access_of, peer_of
from langchain_art_server.gateway.lists import After, Limit, PageOf, page_turns
from langchain_art_server.gateway.openapi import body_docs
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.jobs.audit import chosen_calls
from langchain_art_server.storage.pages import Page


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
