"""``GET /metrics``: what was counted (`telemetry.metrics`), and what is read when it is asked for.

A key of the tenant ``default`` sees the whole server; one of another tenant sees the series that
have its tenant's label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from langchain_art._version import __version__
from langchain_art.wire.api_keys import DEFAULT_TENANT
from langchain_art_server.backends.base import SamplerState

if TYPE_CHECKING:
    from langchain_art_server.gateway.service import Service

#: A sample's labels, and its value.
_Samples = Iterable[tuple[Mapping[str, str], float]]


def metrics_route(app: FastAPI, service: Service) -> None:
    """Add it."""

    @app.get("/metrics", response_class=Response)
    async def get_metrics() -> Response:
        """Get the server's metrics, in Prometheus' text format."""
        # Not in OpenMetrics: prometheus-client would write vLLM's names without their colon.
        mine, found = None, list[Metric]()
        if service.tenant != DEFAULT_TENANT:
            mine, found = service.tenant, await _of_tenant(service)
        else:
            for one in service.tenants:
                found += await _of_tenant(one)
            found += await _of_server(service)
        # For many policies it takes a tenth of a second.
        text = await asyncio.to_thread(_text, service.metrics.registry, found, mine)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Families(Collector):
    """Metrics of a moment; with a `tenant`, those of its samples that have its label."""

    def __init__(self, metrics: Iterable[Metric], tenant: str | None) -> None:
        self._metrics, self._tenant = metrics, tenant

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            if self._tenant is None:
                yield metric
                continue
            mine = Metric(metric.name, metric.documentation, metric.type)
            mine.samples = [s for s in metric.samples if s.labels.get("tenant") == self._tenant]
            if mine.samples:
                yield mine


def _text(counted: CollectorRegistry, read: list[Metric], tenant: str | None) -> bytes:
    """Text of counters and current values: one metric of each name, with the samples of all."""
    by_name: dict[str, Metric] = {}
    for one in [*counted.collect(), *read]:
        if (first := by_name.setdefault(one.name, one)) is not one:
            first.samples += one.samples
    return generate_latest(_Families(by_name.values(), tenant))


def _gauge(name: str, about: str, samples: _Samples) -> Metric:
    family = GaugeMetricFamily(name, about)
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


async def _of_tenant(service: Service) -> list[Metric]:
    mine = {"tenant": service.tenant}
    jobs = (await service.store.counts())[2]
    serving = dict(service.router.serving)
    newest = dict(sorted((await service.store.served())[1]))
    found = [
        _gauge(
            "langchain_art_calls",
            "Calls that wait or run; a request for n choices is n.",
            [(mine, service.running_calls)],
        ),
        _gauge(
            "langchain_art_jobs",
            "Training jobs that wait (queued) or run.",
            [(mine | {"state": s}, jobs.get(s, 0)) for s in ("queued", "running")],
        ),
        _gauge(
            "langchain_art_stored_bytes",
            "Bytes of the database and the adapters.",
            [(mine, service.stored_bytes)],
        ),
        _gauge(
            "langchain_art_policy_serving_version",
            "Version that a policy's name is routed to.",
            [(mine | {"policy": name}, version) for name, version in serving.items()],
        ),
        _gauge(
            "langchain_art_policy_published_version",
            "Newest version of a policy that is kept; above the serving one after a rollback.",
            [(mine | {"policy": name}, version) for name, version in newest.items()],
        ),
    ]
    return found + _of_keys(service)


def _of_keys(service: Service) -> list[Metric]:
    """The limits of its valid keys, and what is left of them now."""
    limits: list[tuple[Mapping[str, str], float]] = []
    left: list[tuple[Mapping[str, str], float]] = []
    for access in service.keys.valid() if service.keys is not None else ():
        if access.tenant == service.tenant and access.meter is not None:
            for name, most, free in access.meter.state(service.stored_bytes):
                labels = {"tenant": access.tenant, "key": access.id, "limit": name}
                limits.append((labels, most))
                left.append((labels, free))
    return [
        _gauge("langchain_art_key_limit", "A limit of an API key, by the key's id.", limits),
        _gauge("langchain_art_key_left", "What is left of it now.", left),
    ]


async def _of_server(service: Service) -> list[Metric]:
    sampler, info = service.sampler, service.sampler.info
    state = await sampler.state()
    engines = {"sampler": sampler, "learner": service.learner}
    restarts = CounterMetricFamily(
        "langchain_art_engine_restarts", "Starts after an engine's process had ended."
    )
    for name, engine in engines.items():
        restarts.add_sample(
            "langchain_art_engine_restarts_total", {"engine": name}, engine.restarts
        )
    about = {"version": __version__, "model_name": info.name, "device": info.device}
    pauses = [({"loop": "gateway"}, service.lag.seconds)]
    pauses += [({"loop": "sampler"}, state.loop_lag)] if state is not None else []
    return [
        _gauge("langchain_art_info", "Always 1; the labels say what runs.", [(about, 1)]),
        _gauge(
            "langchain_art_ready",
            "1 if calls are answered and jobs run, as /readyz says.",
            [({}, float(not service.health.reasons))],
        ),
        _gauge(
            "langchain_art_engine_ready",
            "1 if the engine answers.",
            [({"engine": name}, float(one.problem is None)) for name, one in engines.items()],
        ),
        _gauge(
            "langchain_art_replica_ready",
            "1 if the replica of the sampler answers.",
            [({"replica": one.name}, float(one.problem is None)) for one in sampler.replicas],
        ),
        restarts,
        _gauge(
            "langchain_art_loop_longest_pause_seconds",
            "Longest time in the last minute or two that a loop did not turn.",
            pauses,
        ),
        _gauge(
            "langchain_art_stored_bytes_limit",
            "The setting max_stored_bytes, of all tenants together.",
            [({}, service.settings.max_stored_bytes)],
        ),
        *_of_engine(info.name, state),
    ]


def _of_engine(model: str, state: SamplerState | None) -> list[Metric]:
    """Metrics under vLLM's names; nothing while the sampler does not answer."""
    if state is None:
        return []
    of_model = {"model_name": model}
    return [
        _gauge(
            "vllm:num_requests_running", "Calls that are sampled now.", [(of_model, state.running)]
        ),
        _gauge(
            "vllm:num_requests_waiting",
            "Calls that wait for a row of the sampler's batch.",
            [(of_model, state.waiting)],
        ),
    ]
