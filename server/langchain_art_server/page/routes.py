"""The page's routes: `/` and the files below `/page/static`; what they read is below `/page`.

These routes are the page's own, may change with it, and are not in the OpenAPI document. What
programs use, too (pinning, reviews, a run's audit), the page asks of the public routes.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from langchain_art_server.gateway.service import Service
from langchain_art_server.page.jobs import job_routes
from langchain_art_server.page.live import live_routes
from langchain_art_server.page.login import login_routes
from langchain_art_server.page.overview import overview_routes
from langchain_art_server.page.runs import run_routes

FILES = Path(__file__).parent / "static"
#: Scripts and styles are files of this server, and nothing is asked of another host. What a string
#: could still become a script by, trusted types refuse.
_HEADERS = {
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
}


class PageFiles(StaticFiles):
    """The page's files, each with the headers that lock it."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, or 304 if the browser has it."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def page_routes(app: FastAPI, service: Service) -> None:
    """Add the page to the server's routes."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(FILES / "index.html", headers=_HEADERS)

    app.mount("/page/static", PageFiles(directory=FILES))
    router = APIRouter(prefix="/page", include_in_schema=False)
    login_routes(router, service)
    overview_routes(router, service)
    live_routes(router, service)
    job_routes(router, service)
    run_routes(router, service)
    app.include_router(router)
