"""The HTTP API: `create_app` makes its routes. Every error has the form of OpenAI's API."""

from __future__ import annotations

import time
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from langchain_art import wire
from langchain_art._version import __version__
from langchain_art.errors import ArtError, EngineUnavailable, InvalidRequest, UnknownModel
from langchain_art_server.gateway.auth import CHAT, AccessControl, peer_of
from langchain_art_server.gateway.chat_completions import ChatCompletions
from langchain_art_server.gateway.chat_request import parse_json, refuse_overflow
from langchain_art_server.gateway.lists import After, Limit, ListOf, PageOf, PageTurns
from langchain_art_server.gateway.openapi import body_docs, document
from langchain_art_server.gateway.refusals import answer, no_such_route, refuse
from langchain_art_server.gateway.service import Service
from langchain_art_server.jobs.audit import chosen_calls

MAX_WAIT = 30.0
MAX_NUMBER = 2**31 - 1  # what every database can hold
Number = Annotated[int, Path(ge=0, le=MAX_NUMBER)]
M = TypeVar("M", bound=BaseModel)


class RollbackTo(BaseModel):
    """The version that is to serve again."""

    version: int = Field(ge=0, le=MAX_NUMBER)


def create_app(service: Service) -> ASGIApp:
    """The server's ASGI application over a started `Service`."""
    app = FastAPI(title="langchain-art", version=__version__, docs_url=None, redoc_url=None)

    async def refused(_request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):  # of a path, a query or a header
            error = refuse([e | {"loc": e["loc"][1:] or e["loc"]} for e in error.errors()])
        return answer(error)

    async def nowhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return no_such_route(request.method, request.url.path, error)

    for kind in (ArtError, RequestValidationError, Exception):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(HTTPException, nowhere)
    _openai_routes(app, service)
    _policy_routes(app, service)
    _trajectory_routes(app, service)
    _job_routes(app, service)
    _status_routes(app, service)
    app.openapi = lambda: document(app)
    chat = ChatCompletions(service)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        # FastAPI's layers would add 40 µs to each completion, a tenth of its cost to the server.
        completes = scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", CHAT)
        await (chat if completes else app)(scope, receive, send)

    return AccessControl(front, service.settings, service.sampler.info.max_model_len)


async def _model(request: Request, kind: type[M]) -> M:
    """The body as a wire model. FastAPI's own parser would accept NaN."""
    raw = parse_json(await request.body())
    if isinstance(raw, dict):
        refuse_overflow(raw)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise refuse(error.errors(), kind) from error


def _openai_routes(app: FastAPI, service: Service) -> None:
    # POST goes past this, by `front`; other methods are answered 405 here.
    app.router.routes.append(Route(CHAT, ChatCompletions(service), methods=["POST"]))

    def card(name: str, parent: str | None) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": int(time.time()), "parent": parent}
        return known | {"owned_by": "langchain-art"}

    async def names() -> list[dict[str, Any]]:
        base = service.router.base_name
        cards = [card(base, None)]
        for policy in service.router.serving:
            cards.append(card(policy, base))
            cards += [card(c.name, policy) for c in await service.store.checkpoints(policy)]
        return cards

    @app.get("/v1/models")
    async def list_models() -> ListOf[dict[str, Any]]:
        """List the base model, the policies, and every version that is kept."""
        return ListOf(data=await names())

    @app.get("/v1/models/{name}")
    async def get_model(name: str) -> dict[str, Any]:
        """Get one model by its name: the base model, a policy, or POLICY@VERSION."""
        for one in await names():
            if one["id"] == name:
                return one
        raise UnknownModel(f"got model {name!r}; GET /v1/models lists what there is", param="model")

    @app.get("/v1/calls/{call_id}")
    async def get_call(call_id: str) -> dict[str, Any]:
        """Get a call's record: request, reply, token ids, logprobs, whether it may be trained."""
        return (await service.store.call(call_id)).public()


def _policy_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/policies", openapi_extra=body_docs(wire.PolicySpec))
    async def create_policy(request: Request) -> wire.PolicyStatus:
        """Create a policy. Its version 0 answers as the base model does. Idempotent."""
        return await service.policies.create(await _model(request, wire.PolicySpec))

    @app.get("/v1/policies")
    async def list_policies() -> ListOf[wire.PolicyStatus]:
        """List the policies, by name."""
        return ListOf(data=await service.policies.all())

    @app.get("/v1/policies/{name}")
    async def get_policy(name: str) -> wire.PolicyStatus:
        """Get a policy, and the version that its name is routed to."""
        return await service.policies.get(name)

    @app.delete("/v1/policies/{name}")
    async def delete_policy(name: str) -> dict[str, str]:
        """Delete a policy that no job and no call uses, with all its versions."""
        await service.policies.delete(name)
        return {"deleted": name}

    @app.get("/v1/policies/{name}/checkpoints")
    async def list_checkpoints(name: str) -> ListOf[wire.Checkpoint]:
        """List the checkpoints (versions) of a policy that are kept, oldest first."""
        await service.policies.get(name)
        return ListOf(data=await service.store.checkpoints(name))

    @app.put("/v1/policies/{name}/checkpoints/{version}/pin")
    async def pin_checkpoint(name: str, version: Number) -> wire.Checkpoint:
        """Pin a version: retention does not delete it."""
        return await service.policies.set_pinned(name, version, True)

    @app.delete("/v1/policies/{name}/checkpoints/{version}/pin")
    async def unpin_checkpoint(name: str, version: Number) -> wire.Checkpoint:
        """Unpin a version: retention may delete it."""
        return await service.policies.set_pinned(name, version, False)

    @app.delete("/v1/policies/{name}/checkpoints/{version}")
    async def delete_checkpoint(name: str, version: Number) -> dict[str, str]:
        """Delete a version that neither serves, nor is pinned, nor answers a call."""
        await service.policies.delete_version(name, version)
        return {"deleted": f"{name}@{version}"}

    @app.post("/v1/policies/{name}/rollback", openapi_extra=body_docs(RollbackTo))
    async def roll_back(name: str, request: Request) -> wire.PolicyStatus:
        """Serve a kept version again. The next training step starts from it."""
        return await service.policies.rollback(name, (await _model(request, RollbackTo)).version)

    @app.get("/v1/policies/{name}/checkpoints/{version}/adapter")
    async def get_adapter(name: str, version: Number) -> Response:
        """Download a version's adapter: a tar archive in PEFT's format."""
        data = await service.policies.archive(name, version)
        return Response(data, media_type="application/x-tar")


def _trajectory_routes(app: FastAPI, service: Service) -> None:
    turns = PageTurns()

    @app.post("/v1/trajectories", openapi_extra=body_docs(wire.Trajectory))
    async def add_trajectory(request: Request) -> dict[str, Any]:
        """Store a trajectory. Idempotent by id; the answer is sent when it is on disk."""
        service.health.require_space()
        trajectory = await _model(request, wire.Trajectory)
        stored = await service.store.add_trajectories([trajectory])
        return {"id": trajectory.id, "stored": bool(stored)}

    @app.post("/v1/groups", openapi_extra=body_docs(wire.TrajectoryGroup))
    async def add_group(request: Request) -> dict[str, Any]:
        """Store the trajectories of a group, all or none. Idempotent by their ids."""
        service.health.require_space()
        group = await _model(request, wire.TrajectoryGroup)
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
        about = {"object": "list", "last_id": page.last_id, "has_more": page.has_more}
        whole = to_json(about)[:-1] + b',"data":[' + b",".join(page.items) + b"]}"
        return Response(whole, media_type="application/json")

    @app.get("/v1/trajectories/{trajectory_id}")
    async def get_trajectory(trajectory_id: str) -> wire.Trajectory:
        """Get a trajectory."""
        return (await service.store.trajectory(trajectory_id)).trajectory

    @app.delete("/v1/trajectories/{trajectory_id}")
    async def delete_trajectory(trajectory_id: str) -> dict[str, str]:
        """Delete a trajectory that no open job uses, and its calls but for other trajectories'."""
        await service.store.delete_trajectory(trajectory_id)
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
        return await service.reward(trajectory_id, await _model(request, wire.Reward))


def _job_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/train", status_code=202, openapi_extra=body_docs(wire.TrainRequest))
    async def train(
        request: Request, idempotency_key: Annotated[str | None, Header()] = None
    ) -> wire.TrainJob:
        """Queue a training job. The same Idempotency-Key gives the same job.

        If that is ``retryable``, it is queued again.
        """
        if not idempotency_key or not wire.ID.fullmatch(idempotency_key):
            raise InvalidRequest(
                f"got Idempotency-Key {idempotency_key!r}, expected 1-128 characters from "
                "A-Z a-z 0-9 . _ : @ / + = -; the same key never trains twice",
                param="Idempotency-Key",
            )
        return await service.train(await _model(request, wire.TrainRequest), idempotency_key)

    @app.get("/v1/jobs")
    async def list_jobs(
        limit: Limit = 100, policy: str | None = None, after: After = None
    ) -> PageOf[wire.TrainJob]:
        """List jobs, oldest first; with `policy`, those of that policy."""
        page = await service.store.jobs.page(limit, after, policy)
        return PageOf(data=page.items, last_id=page.last_id, has_more=page.has_more)

    @app.get("/v1/jobs/{job_id}")
    async def get_job(
        job_id: str, wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0
    ) -> wire.TrainJob:
        """Get a job. With `wait`, answers when it has ended, or after so many seconds."""
        deadline = time.monotonic() + wait
        while True:
            found = await service.store.jobs.get(job_id)
            left = deadline - time.monotonic()
            if found.ended or left <= 0:
                return found
            await service.jobs.wait(min(left, 1.0))

    @app.post("/v1/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str) -> wire.TrainJob:
        """Cancel a job that waits or runs: its step is stopped, and nothing is published."""
        return await service.jobs.cancel(job_id)

    @app.get("/v1/jobs/{job_id}/events")
    async def list_job_events(
        job_id: str,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=0, le=MAX_NUMBER)] = 0,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0,
    ) -> PageOf[wire.JobEvent]:
        """List a job's events after event number `after`, oldest first.

        With `wait`, answers when there are some, when the job has ended, or after so many seconds.
        """
        deadline = time.monotonic() + wait
        while True:
            job = await service.store.jobs.get(job_id)
            page = await service.store.jobs.events(job_id, after, limit)
            left = deadline - time.monotonic()
            if page.items or left <= 0 or job.ended:
                return PageOf(data=page.items, last_id=page.last_id, has_more=page.has_more)
            await service.jobs.wait(min(left, 1.0))


def _status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/status")
    async def get_status() -> wire.ServerStatus:
        """Get the server's model, device, policies, and counts of calls, trajectories and jobs."""
        return await service.status()

    @app.get("/healthz")
    async def is_alive() -> dict[str, bool]:
        """200 while the process runs."""
        return {"ok": True}

    @app.get("/readyz")
    async def is_ready() -> Response:
        """200 while calls are answered and jobs run; 503 otherwise, with the reasons by part."""
        if not (reasons := service.health.reasons):
            return JSONResponse({"ready": True})
        why = "; ".join(f"{part}: {reason}" for part, reason in reasons.items())
        error = EngineUnavailable(f"The server is not ready. {why}.").body()
        found = {"ready": False, "reasons": reasons} | error
        return JSONResponse(found, status_code=503, headers={"Retry-After": "2"})
