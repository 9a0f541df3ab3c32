"""What a server that has trained says at /metrics, and the dashboard that reads it."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from langchain_art import ArtClient, KeyLimits
from langchain_art.wire.api_keys import new_api_key
from tests.support.hot_swap import train_once
from tests.support.live_server import REPO, ForkedServer
from tests.support.steps_of_a_fit import rewarded, trained

DASHBOARD = files("langchain_art_server.telemetry") / "grafana_dashboard.json"
CHAT = "/v1/chat/completions"
SAY = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 4}


class Scraped:
    """A server with two tenants, of which one has trained; what each key is shown of it."""

    def __init__(self, folder: Path) -> None:
        servers_key = new_api_key()
        self.server = ForkedServer(folder / "data", env={"ART_API_KEY": servers_key}).start()
        self.keys, self.ids = {"server": servers_key}, dict[str, str]()
        with ArtClient(self.server.base_url, api_key=servers_key) as administrator:
            for name, tenant, scopes in (
                ("ana", "ana", ("infer", "submit", "admin")),
                ("ana's prometheus", "ana", ("metrics",)),
                ("bob", "bob", ("infer", "submit")),
                ("bob's prometheus", "bob", ("metrics",)),
                ("prometheus", "default", ("metrics",)),
            ):
                limits = KeyLimits(calls_per_minute=1000, stored_bytes=1 << 40)
                made = administrator.create_key(name, tenant=tenant, scopes=scopes, limits=limits)
                self.keys[name], self.ids[name] = made.key, made.id
        for name in ("ana", "bob"):
            with ArtClient(self.server.base_url, api_key=self.keys[name]) as client:
                client.create_policy(f"{name}-tiny")
        with self.http("ana") as http:
            train_once(http, 0, "ana-tiny")
            asked: Any = {"model": "ana-tiny", "max_tokens": 4}
            equal = [rewarded(http, f"equal-{number}", 1.0, **asked) for number in range(2)]
            trained(http, [equal], "ana-tiny")  # a job that excludes its group
            with http.stream("POST", CHAT, json=SAY | {"model": "ana-tiny", "stream": True}) as s:
                s.read()
            http.post(CHAT, json=SAY | {"model": "nobody"})
        with self.http("bob") as http:
            assert http.post(CHAT, json=SAY | {"model": "bob-tiny"}).status_code == 200

    def http(self, key: str) -> httpx.Client:
        return self.server.http(self.keys[key])

    def text(self, key: str, accept: str = "text/plain") -> str:
        with self.http(key) as http:
            answer = http.get("/metrics", headers={"Accept": accept})
        assert answer.status_code == 200, answer.text
        return answer.text

    def samples(self, key: str) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Name of each sample -> its labels and values."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.text(key)):
            for one in family.samples:
                found.setdefault(one.name, []).append((one.labels, one.value))
        return found


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    one = Scraped(tmp_path_factory.mktemp("metrics"))
    yield one
    one.server.stop()


def test_what_was_done_is_what_is_counted(scraped: Scraped) -> None:
    seen = scraped.samples("prometheus")

    def value(name: str, **labels: str) -> float:
        [found] = [v for given, v in seen[name] if given.items() >= labels.items()]
        return found

    ana, bob = ({"tenant": name, "model_name": f"{name}-tiny"} for name in ("ana", "bob"))
    with scraped.http("ana") as http:
        calls = http.get("/status").json()["calls"]
    assert calls == 11
    ended = [v for labels, v in seen["vllm:request_success_total"] if labels["tenant"] == "ana"]
    assert sum(ended) == calls
    assert value("vllm:e2e_request_latency_seconds_count", **ana) == calls
    assert value("vllm:e2e_request_latency_seconds_count", **bob) == 1
    assert value("vllm:time_to_first_token_seconds_count", **ana) == 1
    assert 1 <= value("vllm:generation_tokens_total", **bob) <= 4
    assert value("vllm:num_requests_running", model_name="base_model") == 0
    policy = {"tenant": "ana", "policy": "ana-tiny"}
    assert value("langchain_art_steps_total", **policy) == 1
    assert value("langchain_art_jobs_ended_total", state="succeeded", **policy) == 2
    assert value("langchain_art_policy_published_version", **policy) == 1
    assert value("langchain_art_policy_serving_version", **policy) == 1
    assert value("langchain_art_step_reward_mean", **policy) == 0.5
    assert value("langchain_art_step_logprob_gap_max", **policy) < 1e-3
    assert value("langchain_art_trained_tokens_total", **policy) > 8
    assert value("langchain_art_excluded_total", reason="groups.zero_variance", **policy) == 1
    refused = {"status": "404", "code": "model_not_found", "tenant": "ana"}
    assert value("langchain_art_refusals_total", **refused) == 1
    chat = {"http_route": CHAT, "http_response_status_code": "200"}
    assert value("http_server_request_duration_seconds_count", **chat) == calls + 1
    key = {"key": scraped.ids["ana"], "limit": "calls_per_minute", "tenant": "ana"}
    assert value("langchain_art_key_limit", **key) == 1000
    assert value("langchain_art_key_left", **key) <= 1000
    assert value("langchain_art_ready") == 1
    # Names are the same for a scraper that prefers another format.
    wanted = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.3"
    assert "\nvllm:prompt_tokens_total{" in scraped.text("prometheus", wanted)


def test_a_tenants_key_sees_its_own_numbers_and_no_others(scraped: Scraped) -> None:
    for name, other in (("ana", "bob"), ("bob", "ana")):
        seen = scraped.samples(f"{name}'s prometheus")
        tenants = {labels.get("tenant") for of in seen.values() for labels, _ in of}
        assert tenants == {name}
        assert other not in scraped.text(f"{name}'s prometheus")
    whole = scraped.samples("prometheus")
    mine = scraped.samples("ana's prometheus")
    assert mine["langchain_art_steps_total"] == whole["langchain_art_steps_total"]
    assert scraped.samples("server").keys() == whole.keys()
    assert scraped.samples("ana").keys() == mine.keys(), "admin of a tenant"


def test_no_label_has_an_id_or_a_key_in_it(scraped: Scraped) -> None:
    samples = [one for of in scraped.samples("prometheus").values() for one in of]
    values = {value for labels, _ in samples for value in labels.values()}
    assert not [value for value in values if re.search(r"job-|chatcmpl|swap-|equal-|@", value)]
    assert not values & set(scraped.keys.values())


def queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    for one in board["templating"]["list"]:
        if one["type"] == "query":
            inner = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"])
            assert inner is not None
            found.append(f"count by ({inner[2]}) ({inner[1]})")
    assert len(found) >= 40
    return found


def parsed(query: str) -> Any:
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def parts(node: Any) -> Iterator[Any]:
    """The expression, and all in it."""
    yield node
    inner = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for one in (*inner, *(getattr(node, "args", None) or ())):
        if one is not None:
            yield from parts(one)


def selected(node: Any) -> list[Any]:
    return [one for one in parts(node) if isinstance(one, promql_parser.VectorSelector)]


def wrong(query: str, labels_of: dict[str, set[str]]) -> list[str]:
    """What the query names and the server does not have."""
    found: list[str] = []
    for one in selected(whole := parsed(query)):
        known = labels_of.get(one.name)
        if known is None:
            found.append(one.name)
            continue
        found += [f"{one.name}.{m.name}" for m in one.matchers.matchers if m.name not in known]
    for node in parts(whole):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            for one in selected(node.expr):
                given = labels_of.get(one.name, set())
                found += [f"{one.name} by {la}" for la in node.modifier.labels if la not in given]
    return found


def test_each_query_and_legend_of_the_dashboard_names_what_the_server_has(scraped: Scraped) -> None:
    seen = scraped.samples("prometheus")
    labels_of = {
        name: set.union(*(set(labels) for labels, _ in samples)) for name, samples in seen.items()
    }
    assert {query: bad for query in queries() if (bad := wrong(query, labels_of))} == {}
    # The check itself finds what is wrong.
    of_nothing = wrong("sum by (x) (rate(nothing_total[5m]))", labels_of)
    assert of_nothing == ["nothing_total", "nothing_total by x"]
    assert wrong('langchain_art_ready{x="y"}', labels_of) == ["langchain_art_ready.x"]
    with pytest.raises(ValueError, match="parenthesis"):
        wrong("rate(langchain_art_ready[5m]", labels_of)
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = parsed(target["expr"])
            sums = [one for one in parts(query) if isinstance(one, promql_parser.AggregateExpr)]
            kept = [one.modifier.labels for one in sums if one.modifier]
            known = kept[0] if kept else labels_of[selected(query)[0].name]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= {*known}, target


def test_the_documentation_lists_every_metric(scraped: Scraped) -> None:
    page = (REPO / "docs" / "operating.md").read_text()
    text = page.partition("{ #metrics }")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([a-z_:0-9]+)`", text, re.MULTILINE))
    families = {one.name for one in text_string_to_metric_families(scraped.text("prometheus"))}
    counters = {name for name in named if name.endswith("_total")}
    told = (named - counters) | {name.removesuffix("_total") for name in counters}
    assert {name for name in families if not name.startswith("process_")} == told
