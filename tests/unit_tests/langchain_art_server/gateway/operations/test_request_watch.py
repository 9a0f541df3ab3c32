"""What is told of a request that has no answer, and what is answered while the server drains."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from langchain_art_server.gateway.operations.request_watch import CLIENT_LEFT, RequestWatch
from langchain_art_server.telemetry.metrics import Metrics

SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/jobs", "headers": []}


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://art")


async def silent(_scope: Scope, _receive: Receive, _send: Send) -> None: ...


async def test_a_client_that_left_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    watch = RequestWatch(silent, metrics := Metrics(), log_requests=True)
    with caplog.at_level(logging.INFO):
        await watch(SCOPE, None, None)  # type: ignore[arg-type]
    [record] = caplog.records
    assert record.message == "GET /v1/jobs 499"
    labels = {"http_request_method": "GET", "http_route": "/v1/jobs"}
    labels |= {"http_response_status_code": str(CLIENT_LEFT)}
    name = "http_server_request_duration_seconds_count"
    assert metrics.registry.get_sample_value(name, labels) == 1


async def test_new_requests_are_refused_while_the_server_drains() -> None:
    watch = RequestWatch(PlainTextResponse("in"), metrics := Metrics())
    watch.draining = True
    async with client(watch) as http:
        refused = await http.post("/v1/train")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert refused.headers["x-request-id"].startswith("req-")
        for path in ("/healthz", "/readyz", "/metrics", "/status"):
            assert (await http.get(path)).text == "in"
    assert (watch.refused, watch.running) == (1, 0)
    labels = {"tenant": "", "status": "503", "code": "engine_unavailable"}
    assert metrics.registry.get_sample_value("langchain_art_refusals_total", labels) == 1


@pytest.mark.parametrize("draining", [True, False])
async def test_what_is_cut_at_the_end_is_answered(draining: bool) -> None:
    async def endless(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await asyncio.Event().wait()

    watch = RequestWatch(endless, Metrics())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    task = asyncio.create_task(watch(SCOPE, receive, send))
    await asyncio.sleep(0)
    assert watch.running == 1
    watch.draining = draining
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() is not draining and watch.running == 0
    assert [m["status"] for m in sent if "status" in m] == ([503] if draining else [])
