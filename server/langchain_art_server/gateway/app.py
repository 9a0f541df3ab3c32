"""The HTTP API: `create_app` makes its routes. Every error has the form of OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from langchain_art import wire
from langchain_art._version import __version__
from langchain_art.errors import ArtError, EngineUnavailable, InvalidRequest, UnknownModel
from langchain_art_server.gateway.auth import CALLS, AccessControl, access_of, peer_of
from langchain_art_server.gateway.chat.completions import ModelCalls
from langchain_art_server.gateway.keys.keyring import Keyring
from langchain_art_server.gateway.keys.scopes import require_rules
from langchain_art_server.gateway.lists import After, Limit, ListOf, PageOf, look_turns
from langchain_art_server.gateway.metrics import metrics_route
from langchain_art_server.gateway.openapi import body_docs, document_route
from langchain_art_server.gateway.record_routes import record_routes, rollout_routes
from langchain_art_server.gateway.refusals import answer, no_such_route, refuse
from langchain_art_server.gateway.request_bodies import checked_key, model_of
from langchain_art_server.gateway.request_watch import RequestWatch
from langchain_art_server.gateway.review_routes import review_routes
from langchain_art_server.gateway.service import Service
from langchain_art_server.storage.queries import Page
from langchain_art_server.telemetry.log_context import CURRENT

T = TypeVar("T")
MAX_WAIT = 30.0
MAX_NUMBER = 2**31 - 1  # what every database can hold
Number = Annotated[int, Path(ge=0, le=MAX_NUMBER)]


class RollbackTo(wire.Wire):
    """The version that is to serve again, and why."""

    version: int = Field(ge=0, le=MAX_NUMBER)
    why: str = Field(default="", max_length=4096, pattern=r"^[^\x00]*$")


def create_app(service: Service, page: Callable[[FastAPI, Service], None]) -> RequestWatch:
    """The server's ASGI application over a started `Service`; `page` adds the page's routes."""
    tenants = service.tenants
    tenants.make_app = lambda one: _app_of(one, page)
    tenants.app_of(service.tenant)
    # The context bounds texts alone: an image's bytes are more than those of its tokens.
    context = service.sampler.info.max_model_len if service.no_images else None
    guarded = AccessControl(
        tenants.app_of,
        service.settings,
        context,
        service.keys,
        service.sessions,
        tenants.stored_bytes_of,
    )
    log_requests = service.settings.log_format == "json"
    return RequestWatch(guarded, service.metrics, log_requests=log_requests)


def _app_of(service: Service, page: Callable[[FastAPI, Service], None]) -> ASGIApp:
    """One tenant's application, behind the check of access."""
    app = FastAPI(title="langchain-art", version=__version__, openapi_url=None)

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):  # of a path, a query or a header
            error = refuse([e | {"loc": e["loc"][1:] or e["loc"]} for e in error.errors()])
        return answer(error, request.url.path)

    async def nowhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return no_such_route(request.method, request.url.path, error)

    for kind in (ArtError, RequestValidationError, Exception):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(HTTPException, nowhere)
    _openai_routes(app, service)
    _policy_routes(app, service)
    record_routes(app, service)
    review_routes(app, service)
    rollout_routes(app, service)
    job_routes(app, service)
    _status_routes(app, service)
    key_routes(app, service)
    metrics_route(app, service)
    page(app, service)
    require_rules(app.routes)
    document_route(app)
    calls = ModelCalls(service)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        # FastAPI's layers would add 40 µs to each completion, a tenth of its cost to the server.
        is_call = scope["type"] == "http" and scope["path"] in CALLS and scope["method"] == "POST"
        await (calls if is_call else app)(scope, receive, send)

    return front


def _openai_routes(app: FastAPI, service: Service) -> None:
    # POST goes past this, by `front`; other methods are answered 405 here.
    for path in sorted(CALLS):
        app.router.routes.append(Route(path, ModelCalls(service), methods=["POST"]))

    def card(name: str, parent: str | None) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": int(time.time()), "parent": parent}
        return known | {"owned_by": "langchain-art"}

    async def names() -> list[dict[str, Any]]:
        base = service.router.base_name
        cards = [card(base, None)]
        for policy in list(service.router.serving):
            cards.append(card(policy, base))
            cards += [card(c.name, policy) for c in await service.store.checkpoints(policy)]
        return cards

    @app.get("/v1/models")
    async def list_models() -> ListOf[dict[str, Any]]:
        """List the base model, the policies, and every version that is kept."""
        return ListOf(data=await names())

    @app.get("/v1/models/{name:model}")  # `ModelName`
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
        return await service.policies.create(await model_of(request, wire.PolicySpec))

    @app.get("/v1/policies")
    async def list_policies() -> ListOf[wire.PolicyStatus]:
        """List the policies, by name."""
        return ListOf(data=await service.policies.all())

    @app.get("/v1/policies/{name}")
    async def get_policy(name: str) -> wire.PolicyStatus:
        """Get a policy, and the version that its name is routed to."""
        return await service.policies.get(name)

    @app.delete("/v1/policies/{name}")
    async def delete_policy(name: str, request: Request) -> dict[str, str]:
        """Delete a policy that no job and no call uses, with all its versions."""
        await service.policies.delete(name)
        await service.note(access_of(request.scope), "deleted_policy", name)
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
    async def delete_checkpoint(name: str, version: Number, request: Request) -> dict[str, str]:
        """Delete a version that neither serves, nor is pinned, nor answers a call."""
        await service.policies.delete_version(name, version)
        await service.note(access_of(request.scope), "deleted_version", f"{name}@{version}")
        return {"deleted": f"{name}@{version}"}

    @app.post("/v1/policies/{name}/rollback", openapi_extra=body_docs(RollbackTo))
    async def roll_back(name: str, request: Request) -> wire.PolicyStatus:
        """Serve a kept version again. The next training step starts from it."""
        to = await model_of(request, RollbackTo)
        status = await service.policies.rollback(name, to.version, to.why)
        because = f": {to.why}" if to.why else ""
        subject = f"{name}@{to.version}{because}"
        await service.note(access_of(request.scope), "rolled_back", subject)
        return status

    @app.get(
        "/v1/policies/{name}/checkpoints/{version}/adapter",
        response_class=Response,
        responses={200: {"content": {"application/x-tar": {}}}},
    )
    async def get_adapter(name: str, version: Number) -> Response:
        """Download a version's adapter: a tar archive in PEFT's format."""
        data = await service.policies.archive(name, version)
        return Response(data, media_type="application/x-tar")


def job_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of training jobs."""
    looks = look_turns()

    async def look(
        request: Request,
        wait: float,
        read: Callable[[], Awaitable[T]],
        is_over: Callable[[T], bool],
    ) -> T:
        deadline, found = time.monotonic() + wait, await read()
        while not (is_over(found) or service.is_stopping()):
            if (left := deadline - time.monotonic()) <= 0:
                break
            await service.jobs.wait(min(left, 1.0))
            found = await looks.take_by(deadline, peer_of(request.scope), read, found)
        return found

    @app.post("/v1/train", status_code=202, openapi_extra=body_docs(wire.TrainRequest))
    async def train(
        request: Request, idempotency_key: Annotated[str | None, Header()] = None
    ) -> wire.TrainJob:
        """Queue a training job. The same Idempotency-Key gives the same job.

        If that is ``retryable``, it is queued again.
        """
        key = checked_key(idempotency_key, 128)
        job = await service.train(await model_of(request, wire.TrainRequest), key)
        if (context := CURRENT.get()) is not None:
            context.policy, context.job_id = job.policy, job.id
        await service.note(access_of(request.scope), "trained", f"{job.policy} by {job.id}")
        return job

    @app.get("/v1/jobs")
    async def list_jobs(
        limit: Limit = 100, policy: str | None = None, after: After = None
    ) -> PageOf[wire.TrainJob]:
        """List jobs, oldest first; with `policy`, those of that policy."""
        return PageOf.of(await service.store.jobs.page(limit, after, policy))

    @app.get("/v1/jobs/{job_id}")
    async def get_job(
        job_id: str, request: Request, wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0
    ) -> wire.TrainJob:
        """Get a job. With `wait`, answers when it has ended, or after so many seconds."""
        return await look(
            request, wait, lambda: service.store.jobs.get(job_id), lambda job: job.ended
        )

    @app.post("/v1/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str, request: Request) -> wire.TrainJob:
        """Cancel a job that waits or runs: its step is stopped, and nothing is published."""
        job = await service.jobs.cancel(job_id)
        await service.note(access_of(request.scope), "cancelled", f"{job.policy} by {job.id}")
        return job

    @app.get("/v1/jobs/{job_id}/events")
    async def list_job_events(
        job_id: str,
        request: Request,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=0, le=MAX_NUMBER)] = 0,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0,
    ) -> PageOf[wire.JobEvent]:
        """List a job's events after event number `after`, oldest first.

        With `wait`, answers when there are some, when the job has ended, or after so many seconds.
        """

        async def read() -> tuple[wire.TrainJob, Page[wire.JobEvent]]:
            job = await service.store.jobs.get(job_id)
            return job, await service.store.jobs.events(job_id, after, limit)

        _, page = await look(
            request, wait, read, lambda found: found[0].ended or bool(found[1].items)
        )
        return PageOf.of(page)


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
        replicas = {one.name: one.problem for one in service.sampler.replicas}
        told: dict[str, Any] = {"replicas": replicas} if replicas else {}
        if not (reasons := service.health.reasons):
            return JSONResponse({"ready": True} | told)
        why = "; ".join(f"{part}: {reason}" for part, reason in reasons.items())
        error = EngineUnavailable(f"The server is not ready. {why}.").body()
        found = {"ready": False, "reasons": reasons} | told | error
        return JSONResponse(found, status_code=503, headers={"Retry-After": "2"})


def key_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of keys. Only the default tenant's application is asked: `keys.scopes`."""

    @app.post("/v1/keys", status_code=201, openapi_extra=body_docs(wire.KeySpec))
    async def make_key(request: Request) -> wire.NewApiKey:
        """Make an API key. The answer has the key itself, which is shown nowhere else."""
        spec = await model_of(request, wire.KeySpec)
        return await _keys_of(service).make(spec, by=_who(request))

    @app.get("/v1/keys")
    async def list_keys() -> ListOf[wire.ApiKey]:
        """List all keys that were ever made, oldest first, without the keys themselves."""
        return ListOf(data=await service.store.keys.all())

    @app.delete("/v1/keys/{key_id}")
    async def revoke_key(key_id: str, request: Request) -> wire.ApiKey:
        """Revoke a key: it is refused from now on. Idempotent."""
        return await _keys_of(service).revoke(key_id, by=_who(request))

    @app.get("/v1/log")
    async def list_actions(
        limit: Limit = 100, after: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None
    ) -> PageOf[wire.LoggedAction]:
        """List who did what, newest first: training, rollbacks, deletions, reviews, keys."""
        return PageOf.of(await service.store.keys.actions(limit, after))


def _keys_of(service: Service) -> Keyring:
    if service.keys is None:
        raise InvalidRequest(
            "This server has no key of its own, so it asks nobody for one. Start it with "
            "ART_API_KEY (`langchain-art key new` makes one), then make keys for others."
        )
    return service.keys


def _who(request: Request) -> str | None:
    access = access_of(request.scope)
    return access.id if access is not None else None
