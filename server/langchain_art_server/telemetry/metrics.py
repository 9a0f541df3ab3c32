"""The numbers that are counted as things happen. What is read when they are asked for is beside it.

Names are vLLM's where vLLM counts the same (its ``model_name`` is a policy here, or the base
model), OpenTelemetry's for HTTP, and ``langchain_art_…`` otherwise. Labels have few values: tenants
are the administrator's, policies are bounded by `max_policies` and lose their series when they are
deleted, and no run, call, job or version is one.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from langchain_art.wire import TrainJob
from langchain_art.wire.api_keys import DEFAULT_TENANT
from langchain_art_server.telemetry.log_context import CURRENT, LogContext

#: Upper bounds of vLLM's own histograms, in seconds, so that both can be put into one query.
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
#: Those that OpenTelemetry's conventions advise for ``http.server.request.duration``.
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PHASE = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
#: Values of `Turn.excluded_because` that are labels: a client may send any other.
_SUPERSEDED = {"retried", "interrupted", "error", "unchosen"}
_METHODS = {"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"}
#: Metric of a step -> name and meaning of its gauge.
_OF_STEP = {
    "reward_mean": ("reward_mean", "Mean reward of the runs that the last step compared."),
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("grad_norm", "Norm of the last step's gradient, before clipping."),
    "staleness_mean": ("staleness", "Versions that the last step's calls were old, on average."),
    "logprob_gap_mean": (
        "logprob_gap_mean",
        "Mean difference of a token's log-probability, sampler to learner, in nats; last step.",
    ),
    "logprob_gap_max": (
        "logprob_gap_max",
        "Largest difference of a token's log-probability, sampler to learner, in nats; last step.",
    ),
}


class CallSeries:
    """Counters of calls to one model of one tenant."""

    __slots__ = ("_finished", "_first", "_generated", "_labels", "_latency", "_of", "_prompt")

    def __init__(self, metrics: Metrics, tenant: str, model: str) -> None:
        labels = self._labels = (tenant, model)
        self._of = metrics.finished
        self._finished: dict[str, Counter] = {}
        self._prompt = metrics.prompt_tokens.labels(*labels)
        self._generated = metrics.generation_tokens.labels(*labels)
        self._latency = metrics.latency.labels(*labels)
        self._first = metrics.first_token.labels(*labels)

    def first_token(self, seconds: float) -> None:
        """The first token of a streamed reply came so long after its request."""
        self._first.observe(seconds)

    def ended(self, prompt: int, generated: int, reason: str, seconds: float) -> None:
        """A reply was sampled: tokens of its prompt and its own, why it ended, and how long."""
        finished = self._finished.get(reason)
        if finished is None:
            finished = self._finished[reason] = self._of.labels(*self._labels, reason)
        finished.inc()
        self._prompt.inc(prompt)
        self._generated.inc(generated)
        self._latency.observe(seconds)


class Metrics:
    """All that is counted, of all tenants of one server."""

    def __init__(self) -> None:
        disable_created_metrics()  # each counter would be two
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        model, policy = ("tenant", "model_name"), ("tenant", "policy")

        def counter(name: str, about: str, labels: tuple[str, ...]) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def histogram(
            name: str, about: str, labels: tuple[str, ...], buckets: tuple[float, ...]
        ) -> Histogram:
            return Histogram(name, about, labels, buckets=buckets, registry=registry)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.", model)
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens sampled.", model)
        self.finished = counter(
            "vllm:request_success",
            "Calls answered, by why they ended.",
            (*model, "finished_reason"),
        )
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "From a streamed call's request to its first token.",
            model,
            _FIRST_TOKEN,
        )
        self.latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "From a call's request to the end of its reply.",
            model,
            _LATENCY,
        )
        self._http = histogram(
            "http_server_request_duration_seconds",
            "From a request's header to the end of its answer; status 499: the client left before.",
            ("http_request_method", "http_route", "http_response_status_code"),
            _HTTP,
        )
        self._refusals = counter(
            "langchain_art_refusals",
            "Requests that were answered with an error, by its status and code.",
            ("tenant", "status", "code"),
        )
        self._jobs = counter(
            "langchain_art_jobs_ended", "Training jobs that ended.", (*policy, "state")
        )
        self._steps = counter("langchain_art_steps", "Versions that jobs published.", policy)
        self._trained = counter(
            "langchain_art_trained_tokens", "Sampled tokens that steps learned from.", policy
        )
        self._excluded = counter(
            "langchain_art_excluded",
            "Groups, runs and calls of jobs that were not trained, by reason.",
            (*policy, "reason"),
        )
        self.phases = histogram(
            "langchain_art_job_phase_seconds",
            "Time of jobs' phases: prepare, learn, check, publish.",
            ("tenant", "phase"),
            _PHASE,
        )
        self._of_step = {
            metric: Gauge(f"langchain_art_step_{name}", about, policy, registry=registry)
            for metric, (name, about) in _OF_STEP.items()
        }
        self._of_models = (
            *(self.prompt_tokens, self.generation_tokens, self.finished),
            *(self.first_token, self.latency),
        )
        self._of_policies = (self._jobs, self._steps, self._trained, self._excluded)
        self._calls: dict[tuple[str, str], CallSeries] = {}
        self._routes: dict[tuple[str, str, int], Histogram] = {}

    def calls_of(self, tenant: str, model: str) -> CallSeries:
        """Series of calls to a policy, or to the base model by its name."""
        series = self._calls.get((tenant, model))
        if series is None:
            series = self._calls[tenant, model] = CallSeries(self, tenant, model)
        return series

    def forget(self, tenant: str, policy: str) -> None:
        """A policy was deleted: whoever makes and deletes them makes no series for ever."""
        self._calls.pop((tenant, policy), None)
        for one in self._of_models:
            one.remove_by_labels({"tenant": tenant, "model_name": policy})
        for one in (*self._of_policies, *self._of_step.values()):
            one.remove_by_labels({"tenant": tenant, "policy": policy})

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered; `route` is its template, empty if there is none."""
        series = self._routes.get((method, route, status))
        if series is None:
            known = method if method in _METHODS else "_OTHER"
            series = self._http.labels(known, route, str(status))
            if known == method:
                self._routes[method, route, status] = series
        series.observe(seconds)

    def refused(self, tenant: str, status: int, code: str) -> None:
        """A request was answered with an error; `tenant` is empty if its key is not known."""
        self._refusals.labels(tenant, str(status), code).inc()

    def job_ended(self, tenant: str, job: TrainJob) -> None:
        """A job has ended, with what it says of itself."""
        labels = (tenant, job.policy)
        self._jobs.labels(*labels, job.state).inc()
        if (result := job.result) is None:
            return
        for reason, count in result.excluded.items():
            self._excluded.labels(*labels, _label(reason)).inc(count)
        if "grad_norm" not in result.metrics:
            return  # there was nothing to train on
        self._steps.labels(*labels).inc()
        self._trained.labels(*labels).inc(result.metrics.get("tokens_trained", 0.0))
        for metric, gauge in self._of_step.items():
            if (value := result.metrics.get(metric)) is not None:
                gauge.labels(*labels).set(value)


def _label(reason: str) -> str:
    kind, superseded, why = reason.partition("superseded_")
    return f"{kind}superseded" if superseded and why not in _SUPERSEDED else reason


class JobWatch:
    """Watches one tenant's jobs, of which one runs at a time."""

    def __init__(self, metrics: Metrics | None = None, tenant: str = DEFAULT_TENANT) -> None:
        self._metrics, self._tenant = metrics or Metrics(), tenant
        self._phase: tuple[str, float] | None = None

    @contextmanager
    def running(self, job: TrainJob) -> Generator[None]:
        """A context in which a job runs, from its first phase, ``prepare``, to its last."""
        token = CURRENT.set(LogContext(tenant=self._tenant, policy=job.policy, job_id=job.id))
        self._phase = "prepare", time.monotonic()
        try:
            yield
        finally:
            self._leave()
            CURRENT.reset(token)

    def enter(self, phase: str) -> None:
        """The phase that ran is over, and another begins."""
        if self._phase is not None:
            self._leave()
            self._phase = phase, time.monotonic()

    def ended(self, job: TrainJob) -> None:
        """A job has ended in the store."""
        self._metrics.job_ended(self._tenant, job)

    def _leave(self) -> None:
        if self._phase is not None:
            phase, begun = self._phase
            self._metrics.phases.labels(self._tenant, phase).observe(time.monotonic() - begun)
            self._phase = None
