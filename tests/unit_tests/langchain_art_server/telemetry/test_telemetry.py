import json
import logging
import sys
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.types import Receive, Scope, Send

from langchain_art.wire import TrainJob, TrainResult
from langchain_art_server.gateway.request_watch import CLIENT_LEFT, RequestWatch
from langchain_art_server.telemetry.log_context import (
    CURRENT,
    JsonLines,
    LogContext,
    TextLines,
    request_id_of,
)
from langchain_art_server.telemetry.metrics import JobWatch, Metrics
from tests.support.exclusion_reasons import sent_reasons

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


KEY = "9DDaF9GcuMTOUT3uFE8Tb4x-ltJHoEHX5eesrK_ofOk"
SECRET = "sk-art-0123456789abcdefghijklmnop"


def line(message: str, *args: Any, **extra: Any) -> dict[str, Any]:
    record = logging.LogRecord("art", logging.WARNING, "f.py", 1, message, args, None)
    vars(record).update(extra)
    said = JsonLines().format(record)
    assert "\n" not in said
    return json.loads(said)


def test_a_traceback_is_a_field_and_no_line_has_a_secret() -> None:
    try:
        raise ValueError(f"with {SECRET}")
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord("art", logging.ERROR, "f.py", 1, f"key {SECRET}", (), raised)
    vars(record)["fields"] = {"route": f"/{SECRET}"}
    said = JsonLines().format(record)
    assert "\n" not in said and json.loads(said)["time"].endswith("Z")
    assert "ValueError" in json.loads(said)["exception"]
    assert SECRET not in said and SECRET not in TextLines("%(message)s").format(record)


@pytest.mark.parametrize("key", [KEY, f"sk-art-{KEY}"])
def test_a_key_in_a_path_is_in_no_field_no_line_and_no_span(key: str) -> None:
    context = LogContext(request_id=key, model=key, path_params={"name": key, "job_id": f"a:{key}"})
    assert key not in str(context.fields()) and context.fields()["job_id"] == "a:[redacted]"
    token = CURRENT.set(context)
    try:
        said = line(f"GET /v1/policies/{key} failed.", fields={"path": f"/{key}/x"})
    finally:
        CURRENT.reset(token)
    assert key not in str(said) and said["message"] == "GET /v1/policies/[redacted] failed."
    record = logging.LogRecord("art", logging.ERROR, "f.py", 1, f"no /{key}", (), None)
    assert TextLines("%(message)s").format(record) == "no /[redacted]"


@pytest.mark.parametrize("name", ["0123456789abcdef" * 4, f"trajectory-{'0a' * 16}", "A1b" * 14])
def test_a_name_that_is_no_key_stays(name: str) -> None:
    assert LogContext(run_id=name).fields() == {"run_id": name}
    assert line(name)["message"] == name


@pytest.mark.parametrize("given", [None, b"", b"a b", b"x" * 129, b"a\n", "ä".encode(), b'"'])
def test_any_other_request_gets_an_id_of_its_own(given: bytes | None) -> None:
    one, other = request_id_of(given), request_id_of(given)
    assert one != other and one.startswith("req-") and len(one) == 28


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def job(state: str = "succeeded", **result: object) -> TrainJob:
    given = {"policy": "p", "version": 2, "metrics": {}, "excluded": {}, "nodes": {}} | result
    done = TrainResult.model_validate(given) if state == "succeeded" else None
    made = {"id": "j", "key": "k", "policy": "p", "state": state, "created_at": 1.0}
    return TrainJob.model_validate(made | {"result": done})


def test_a_client_makes_no_reasons() -> None:
    metrics = Metrics()
    sent = dict.fromkeys(sent_reasons(), 1)
    made = {f"calls.superseded_because_{n}": 1 for n in range(50)}
    metrics.job_ended("ana", job(metrics={"grad_norm": 1.0}, excluded=sent | made))
    text = generate_latest(metrics.registry).decode()
    for reason in sent:
        assert f'reason="{reason}"' in text
    assert 'reason="calls.superseded"' in text and "because_" not in text


def test_a_deleted_policy_leaves_no_series() -> None:
    metrics = Metrics()
    for policy in ("p", "q"):
        series = metrics.calls_of("ana", policy)
        assert metrics.calls_of("ana", policy) is series
        series.ended(3, 4, "stop", 0.5)
        series.first_token(0.1)
    metrics.job_ended("ana", job(metrics={"grad_norm": 1.0}, excluded={"calls.frozen": 1}))
    metrics.forget("ana", "p")
    text = generate_latest(metrics.registry).decode()
    assert '"p"' not in text and '"q"' in text
    metrics.calls_of("ana", "p").ended(3, 4, "stop", 0.5)
    mine = {"tenant": "ana", "model_name": "p"}
    assert value(metrics, "vllm:prompt_tokens_total", **mine) == 3


def test_methods_that_are_made_up_are_one() -> None:
    metrics = Metrics()
    for method in ("GET", "FOO", "BAR"):
        metrics.answered(method, "/status", 200, 0.1)
    of = {"http_route": "/status", "http_response_status_code": "200"}
    name = "http_server_request_duration_seconds_count"
    assert value(metrics, name, http_request_method="_OTHER", **of) == 2


def test_a_jobs_phases_follow_each_other_and_its_records_know_it() -> None:
    metrics = Metrics()
    watch = JobWatch(metrics, "ana")
    watch.enter("publish")  # of no job
    with watch.running(job("running")):
        context = CURRENT.get()
        assert context is not None
        assert context.fields() == {"tenant": "ana", "policy": "p", "job_id": "j"}
        watch.enter("learn")
    assert CURRENT.get() is None
    name = "langchain_art_job_phase_seconds_count"
    counts = {p: value(metrics, name, tenant="ana", phase=p) for p in ("prepare", "learn")}
    assert counts == {"prepare": 1, "learn": 1}
    assert value(metrics, name, tenant="ana", phase="publish") is None
