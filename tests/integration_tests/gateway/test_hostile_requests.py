"""Requests that no client of good will sends: each is refused by name, in OpenAI's shape."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.support.live_server import LiveServer
from tests.support.steps_of_a_fit import new_id

SAY = [{"role": "user", "content": "When is the falcon review?"}]
JSON = {"Content-Type": "application/json"}


def refused(answer: httpx.Response, status: int = 400) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    return error["message"]


def chat(http: httpx.Client, **body: Any) -> httpx.Response:
    base = {"model": "tiny", "messages": SAY, "max_tokens": 4}
    return http.post("/v1/chat/completions", json=base | body)


def train(http: httpx.Client, **body: Any) -> httpx.Response:
    headers = {"Idempotency-Key": new_id("k")}
    return http.post("/v1/train", json={"policy": "tiny"} | body, headers=headers)


@pytest.mark.wall_clock  # 0.1 s; counted one by one: 44 s, in which nobody is answered
def test_ids_that_are_given_twice_are_found_at_once(http: httpx.Client) -> None:
    groups = [[f"run-{group}-{one}" for one in range(1000)] for group in range(32)]
    groups[-1][-1] = groups[0][0]
    begun = time.monotonic()
    assert "'run-0-0'" in refused(train(http, groups=groups))
    assert time.monotonic() - begun < 20


def test_what_is_not_there_is_refused_in_the_same_shape(http: httpx.Client) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/policies", 405, "method_not_allowed"),
    ):
        answer = http.request(method, path)
        assert path in refused(answer, status)
        assert answer.json()["error"]["code"] == code
        assert (status == 405) == ("allow" in answer.headers)


def test_foreign_origins_and_hosts_and_what_is_none_stay_out(http: httpx.Client) -> None:
    for value in ("evil.example", "["):
        refused(http.get("/v1/models", headers={"Host": value}), 401)
    for value in ("https://evil.example", "http://[", "["):
        refused(http.get("/v1/models", headers={"Origin": value}), 401)


def test_an_adapter_that_no_engine_can_make_is_refused(http: httpx.Client) -> None:
    for name, value in (
        *(("seed", 2**64), ("alpha", 1e308), ("alpha", "8")),
        *(("rank", 10**30), ("rank", True)),
    ):
        answer = http.post("/v1/policies", json={"name": "odd", "lora": {name: value}})
        assert name in refused(answer)


def test_a_value_of_another_type_is_not_made_to_fit(http: httpx.Client) -> None:
    for field, value in (
        ("reward", "true"),
        ("reward", '"1_0"'),
        ("reward", "1e308"),
        ("reward", "-1e10"),
        ("scores", '{"a": true}'),
        ("scores", '{"a": 1e300}'),
        ("metadata", '{"a": [{"b": 1e400}]}'),
        ("output", "-1e999"),
        ("turns", '[{"reward": true}]'),
        ("turns", '[{"latency": "1"}]'),
        ("turns", '[{"step": "1"}]'),
        ("turns", '[{"ours": "yes"}]'),
    ):
        run = new_id("t")
        body = f'{{"id": "{run}", "{field}": {value}}}'
        assert field in refused(http.post("/v1/trajectories", content=body, headers=JSON))
        assert http.get(f"/v1/trajectories/{run}").status_code == 404


def test_a_chat_option_of_another_type_is_not_made_to_fit(http: httpx.Client) -> None:
    for option, value in (
        ("n", True),
        ("max_tokens", "5"),
        ("temperature", True),
        ("temperature", "1"),
        ("stream", "no"),
        ("logprobs", 1),
        ("seed", "7"),
        ("seed", 1.0),
        ("art", {"step": "2"}),
        ("art", {"attempt": True}),
    ):
        assert option in refused(chat(http, **{option: value}))


def test_a_training_option_that_would_overflow_is_refused(http: httpx.Client) -> None:
    constant = {"kind": "constant", "value": 1e-300}
    for config, words in (
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"learning_rate": True}, "learning_rate"),
        ({"max_grad_norm": 1e300}, "max_grad_norm"),
        ({"kl": {"estimator": "k3", "coefficient": 1e300}}, "coefficient"),
        ({"credit": {"kind": "anchor", "weight": 1e300}}, "weight"),
        ({"advantage": {"kind": "standardized", "scores": {"a": 1e300}}}, "scores"),
        ({"loss": {"kind": "clip", "aggregation": constant}}, "value"),
        ({"loss": {"kind": "cispo", "clip_high": 1e300}}, "clip_high"),
        ({"optimizer_steps": "2"}, "optimizer_steps"),
        ({"tokens_per_microbatch": 10**30}, "tokens_per_microbatch"),
    ):
        assert words in refused(train(http, groups=[["a"]], config=config))


def test_without_a_key_another_page_cannot_post(http: httpx.Client, art_server: LiveServer) -> None:
    body = json.dumps({"name": "from-a-page"})
    for headers in ({"Content-Type": "text/plain"}, {}, {"Content-Type": "application/jsonp"}):
        message = refused(http.post("/v1/policies", content=body, headers=headers))
        assert "application/json" in message
    for origin in ("http://localhost:3000", f"https://127.0.0.1:{art_server.port}", "null"):
        for path in ("/v1/policies", "/v1/chat/completions"):
            answer = http.post(path, content=body, headers=JSON | {"Origin": origin})
            assert "Origin" in refused(answer, 401)
    assert "from-a-page" not in [p["name"] for p in http.get("/v1/policies").json()["data"]]
    typed = {"Content-Type": "application/json; charset=utf-8", "Origin": art_server.root}
    run = {"id": new_id("t")}
    answer = http.post("/v1/trajectories", content=json.dumps(run), headers=typed)
    assert answer.status_code == 200
