"""The page's routes: `/` and the files below `/page/static`; what they read is below `/page`.

These routes are the page's own, may change with it, and are not in the OpenAPI document. What
programs use, too (pinning, reviews, a run's audit), the page asks of the public routes.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response

from langchain_art_server.gateway.service import Service
from langchain_art_server.page.evaluations import evaluation_routes
from langchain_art_server.page.files import PLACE, PageFiles
from langchain_art_server.page.jobs import job_routes
from langchain_art_server.page.live import live_routes
from langchain_art_server.page.login import login_routes
from langchain_art_server.page.overview import overview_routes
from langchain_art_server.page.runs import run_routes


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
