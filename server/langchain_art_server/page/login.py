"""The login of the page: a key for a session's cookie. The page shows what the key's tenant has."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from langchain_art.errors import AuthenticationFailed, PermissionDenied
from langchain_art_server.gateway.auth import WrongKeys, peer_of
from langchain_art_server.gateway.keys.scopes import RULES
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.gateway.sessions import SESSION_SECONDS

_SEES = RULES["GET", "/page/overview"].allowed


class Login(BaseModel):
    """Credentials with which a person logs in."""

    key: str = Field(min_length=1, max_length=1000)


class Session(BaseModel):
    """A browser's session."""

    locked: bool
    """True if the server has a key."""
    open: bool
    """True if this browser may see the rest of the page."""
    token: str
    """Token for the header X-ART-Token of requests that change something; empty if not needed."""


def login_routes(router: APIRouter, service: Service) -> None:
    """Add the routes of a session."""
    sessions, keys, wrong = service.sessions, service.keys, WrongKeys()

    @router.get("/session")
    async def session(request: Request) -> Session:
        """True if this browser is logged in."""
        if sessions is None:
            return Session(locked=False, open=True, token="")
        token = sessions.token(dict(request.headers.raw))
        return Session(locked=True, open=token is not None, token=token or "")

    @router.post("/login")
    async def login(request: Request, response: Response) -> dict[str, bool]:
        """Open a session. Wrong keys are slowed by peer, as everywhere."""
        sent = await model_of(request, Login)
        if sessions is not None and keys is not None:
            access = keys.find(f"Bearer {sent.key.strip()}".encode())
            if access is None or access.ends <= time.time():
                await wrong.note(peer_of(request.scope))
                raise access.refusal() if access else AuthenticationFailed("The API key is wrong.")
            if _SEES.isdisjoint(access.scopes):
                raise PermissionDenied(
                    f"The key {access.id} has the scopes {sorted(access.scopes)}, and the page "
                    f"needs one of {sorted(_SEES)}."
                )
            response.set_cookie(
                sessions.cookie,
                sessions.new(access.hash),
                max_age=SESSION_SECONDS,
                secure=request.url.scheme == "https",
                httponly=True,
                samesite="strict",
            )
        return {"open": True}

    @router.post("/logout")
    async def logout(request: Request, response: Response) -> dict[str, bool]:
        """End this browser's session: its cookie opens nothing any more."""
        if sessions is not None:
            sessions.end(dict(request.headers.raw))
            response.delete_cookie(sessions.cookie, httponly=True, samesite="strict")
        return {"open": False}
