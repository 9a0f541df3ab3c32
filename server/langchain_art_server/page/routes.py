"""The page's routes: `/` and the files below `/page/static`; what they read is below `/page`.

These routes are the page's own, may change with it, and are not in the OpenAPI document. What
programs use, too (pinning, reviews, a run's audit), the page asks of the public routes.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import time
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from langchain_art.errors import AuthenticationFailed, PermissionDenied
from langchain_art_server.gateway.auth import WrongKeys, peer_of
from langchain_art_server.gateway.keys.scopes import RULES
from langchain_art_server.gateway.request_bodies import model_of
from langchain_art_server.gateway.service import Service
from langchain_art_server.gateway.sessions import SESSION_SECONDS
from langchain_art_server.page.evaluations import evaluation_routes
from langchain_art_server.page.live import live_routes
from langchain_art_server.page.overview import job_routes, overview_routes
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
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_SEES = RULES["GET", "/page/overview"].allowed


@dataclass(frozen=True)
class _File:
    written: int
    body: bytes
    packed: bytes
    headers: dict[str, str]


class PageFiles:
    """An ASGI application: GET of a file below `FILES`, or of `index.html` where it is mounted."""

    def __init__(self) -> None:
        self._paths = {
            path.relative_to(FILES).as_posix(): path for path in FILES.rglob("*") if path.is_file()
        }
        self._known: dict[str, _File] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path: str = scope["path"]
        name = path.removeprefix(PLACE).strip("/") or "index.html"
        await self.answer(Request(scope), name)(scope, receive, send)

    def answer(self, request: Request, name: str) -> Response:
        """The file `name`, 304 if the browser has it, 404 if there is none."""
        file = self._read(name)
        if file is None:
            return Response("There is no such file.", 404, _LOCKED)
        if request.method not in ("GET", "HEAD"):
            return Response("Files are read by GET.", 405, _LOCKED | {"Allow": "GET, HEAD"})
        if file.headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(None, 304, file.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.packed, 200, file.headers | {"Content-Encoding": "gzip"})
        return Response(file.body, 200, file.headers)

    def _read(self, name: str) -> _File | None:
        path, known = self._paths.get(name), self._known.get(name)
        if path is None:
            return None
        try:
            written = path.stat().st_mtime_ns
            if known is None or known.written != written:
                known = self._known[name] = _file(path, written)
        except FileNotFoundError:
            return None
        return known


def _file(path: Path, written: int) -> _File:
    body = path.read_bytes()
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    headers = _LOCKED | {
        "Content-Type": f"{kind or 'application/octet-stream'}; charset=utf-8",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return _File(written, body, gzip.compress(body, mtime=0), headers)


def page_routes(app: FastAPI, service: Service) -> None:
    """Add the page to the server's routes."""
    files = PageFiles()

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files.answer(request, "index.html")

    app.mount(PLACE, files)
    router = APIRouter(prefix="/page", include_in_schema=False)
    login_routes(router, service)
    overview_routes(router, service)
    evaluation_routes(router, service)
    live_routes(router, service)
    job_routes(router, service)
    run_routes(router, service)
    app.include_router(router)


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
