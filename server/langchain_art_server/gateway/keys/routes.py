"""The routes of API keys and of the log, which are the administrator's."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request

from langchain_art import wire
from langchain_art.errors import InvalidRequest
from langchain_art_server.gateway.auth import access_of
from langchain_art_server.gateway.keys.keyring import Keyring
from langchain_art_server.gateway.lists import Limit, ListOf, PageOf
from langchain_art_server.gateway.openapi import body_docs
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.service import Service


def key_routes(app: FastAPI, service: Service) -> None:
    """Add them. Only the default tenant's application is asked: `keys.scopes`."""

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
        page = await service.store.keys.actions(limit, after)
        return PageOf.of(page)


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
