"""The page's routes: `/` and the files below `/page/static`; what they read is below `/page`.

These routes are the page's own, may change with it, and are not in the OpenAPI document. What
programs use, too (pinning, reviews, a run's audit), the page asks of the public routes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles

from langchain_art.errors import AuthenticationFailed, PermissionDenied
from langchain_art_server.gateway.auth import WrongKeys, peer_of
from langchain_art_server.gateway.keys.scopes import RULES
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.gateway.sessions import SESSION_SECONDS
from langchain_art_server.page.evaluations import evaluation_routes
from langchain_art_server.page.live import live_routes
from langchain_art_server.page.overview import overview_routes
from langchain_art_server.page.runs import run_routes

FILES = Path(__file__).parent / "static"
PLACE = "/page/static"
#: Scripts and styles are files of this server, and nothing is asked of another host. What a string
#: could still become a script by, trusted types refuse.
_LOCKED = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again, and answered 304 while it is the same
    "Vary": "Accept-Encoding",
}
_SEES = RULES["GET", "/page/overview"].allowed


class PageFiles(StaticFiles):
    """The files below `FILES`, each with the headers of `_LOCKED`."""

    def __init__(self) -> None:
        super().__init__(directory=FILES)

    def file_response(self, *args: Any, **options: Any) -> Response:
        """See Starlette."""
        response = super().file_response(*args, **options)
        response.headers.update(_LOCKED)
        return response


def page_routes(app: FastAPI, service: Service) -> None:
    """Add the page to the server's routes."""
    files = PageFiles()

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount(PLACE, GZipMiddleware(files, minimum_size=1))
    router = APIRouter(prefix="/page", include_in_schema=False)
    login_routes(router, service)
    overview_routes(router, service)
    evaluation_routes(router, service)
    live_routes(router, service)
    run_routes(router, service)
    app.include_router(router)


class Login(BaseModel):
    """Credentials with which a person logs in."""

    key: str = Field(min_length=1, max_length=1000)


def login_routes(router: APIRouter, service: Service) -> None:
    """Add the routes of a session."""
    sessions, keys, wrong = service.sessions, service.keys, WrongKeys()

    @router.get("/session")
    async def session(request: Request) -> dict[str, bool | str]:
        """Get a browser's session.

        ``locked``: the server has a key; ``open``: this browser may see the rest of the page;
        ``token``: for the header X-ART-Token of requests that change something, or empty.
        """
        if sessions is None:
            return {"locked": False, "open": True, "token": ""}
        token = sessions.token(dict(request.headers.raw))
        return {"locked": True, "open": token is not None, "token": token or ""}

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
