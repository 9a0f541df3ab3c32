from prometheus_client import generate_latest

from langchain_art.wire import TrainJob, TrainResult
from langchain_art_server.telemetry.log_context import CURRENT
from langchain_art_server.telemetry.metrics import JobWatch, Metrics
from tests.support.exclusion_reasons import sent_reasons


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
