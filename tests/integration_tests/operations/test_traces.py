"""Spans as a collector receives them, by OTLP over HTTP, from a server that samples and trains."""

from __future__ import annotations

import gzip
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.support.hot_swap import train_once
from tests.support.live_server import ForkedServer

CHAT = "/v1/chat/completions"
SAY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "When, sire?"}]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Span:
    def __init__(self, raw: Any, resource: dict[str, Any]) -> None:
        self.name, self.resource, self.kind = raw.name, resource, raw.kind
        self.trace, self.id = raw.trace_id.hex(), raw.span_id.hex()
        self.parent, self.failed = raw.parent_span_id.hex(), raw.status.code == 2
        self.begun, self.ended = raw.start_time_unix_nano, raw.end_time_unix_nano
        self.attributes = {one.key: plain(one.value) for one in raw.attributes}


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collector() -> Iterator[tuple[str, list[Span], list[bytes]]]:
    """A receiver of OTLP on loopback: its address, the spans, and what was sent as it came."""
    spans: list[Span] = []
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            bodies.append(body)
            for of in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {one.key: plain(one.value) for one in of.resource.attributes}
                spans.extend(Span(one, resource) for some in of.scope_spans for one in some.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans, bodies
    finally:
        server.shutdown()
        server.server_close()


def traced(folder: Path, endpoint: str) -> ForkedServer:
    file = folder / "server.toml"
    file.write_text("traces = true\n")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_SERVICE_NAME": "art-of-the-test"}
    env |= {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}  # seconds for which a dead one is tried again
    return ForkedServer(folder / "data", "--config", str(file), env=env)


def test_a_clients_trace_goes_on_in_the_server(tmp_path: Path) -> None:
    with collector() as (endpoint, spans, bodies):
        server = traced(tmp_path, endpoint).start()
        with server.http() as http:
            caller = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = SAY | {"max_tokens": 4, "n": 2, "art": {"trajectory_id": "run-7"}}
            answer = http.post(CHAT, json=body, headers=caller | {"x-request-id": "mine"})
            usage = answer.json()["usage"]
            with http.stream("POST", CHAT, json=SAY | {"stream": True, "max_tokens": 4}) as s:
                s.read()
            http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
            train_once(http, 0)
            del http.headers["traceparent"]
            http.get("/v1/jobs/none", headers={"traceparent": "nonsense"})
        server.stop()
    assert {one.resource["service.name"] for one in spans} == {"art-of-the-test"}
    [call] = [one for one in spans if one.attributes.get("langchain_art.request_id") == "mine"]
    assert (call.name, call.trace, call.parent) == (f"POST {CHAT}", TRACE, PARENT)
    assert call.kind == 2 and not call.failed and call.begun < call.ended
    wanted = {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny@0",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "langchain_art.run_id": "run-7",
        "langchain_art.tenant": "default",
    }
    assert call.attributes.items() >= wanted.items()
    assert len(call.attributes["gen_ai.response.finish_reasons"]) == 2
    streamed = next(one for one in spans if one.name == call.name and one.trace != TRACE)
    assert streamed.parent == "" and streamed.attributes["gen_ai.usage.output_tokens"] >= 1

    [asked] = [one for one in spans if one.name == "POST /v1/train"]
    [job] = [one for one in spans if one.name == "train"]
    assert (job.trace, job.parent) == (TRACE, asked.id)
    assert asked.attributes["langchain_art.job_id"] == job.attributes["langchain_art.job_id"]
    assert job.attributes["langchain_art.job.state"] == "succeeded" and not job.failed
    phases = sorted((one for one in spans if one.parent == job.id), key=lambda one: one.begun)
    assert [one.name for one in phases] == ["prepare", "learn", "check", "publish"]
    for one, following in itertools.pairwise(phases):
        assert job.begun <= one.begun <= one.ended <= following.begun <= job.ended

    [unknown] = [one for one in spans if one.name == "GET /v1/jobs/{job_id}" and one.parent == ""]
    assert unknown.attributes["http.response.status_code"] == 404 and not unknown.failed
    assert not [body for body in bodies if b"When, sire?" in body], "no prompt is in a span"


def test_a_collector_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    server = traced(tmp_path, "http://127.0.0.1:9").start()
    with server.http() as http:
        assert http.post(CHAT, json=SAY | {"max_tokens": 2}).status_code == 200
    process = server.process
    assert process is not None
    process.terminate()
    assert process.wait(120) == 0
