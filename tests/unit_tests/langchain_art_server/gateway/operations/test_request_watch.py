import logging
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from langchain_art_server.gateway.request_watch import CLIENT_LEFT, RequestWatch
from langchain_art_server.telemetry.metrics import Metrics

SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/jobs", "headers": []}


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
