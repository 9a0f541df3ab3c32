"""Requests that no client of good will sends: each is refused by name, in OpenAI's shape."""

import json
import time
from collections.abc import Iterator
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


CALL = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
BROKEN = CALL | {"function": {"name": "search", "arguments": '{"query": "f'}}
SURROGATE = CALL | {"function": {"name": "search", "arguments": '"\\ud800"'}}
TOOL = {"type": "function", "function": {"name": "search"}}


def says(**message: Any) -> dict[str, Any]:
    return {"messages": [*SAY, message]}


def chooses(choice: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": choice}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return chooses({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})


#: Bodies of chat requests, and a word of the message, which is the parameter's name, too.
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", ""),
    (says(role="wizard", content="x"), "messages", "wizard"),
    (says(role="user", content=5), "messages", "content"),
    (says(role="user", text="Why?"), "messages", "messages.1.content: got none"),
    (says(role="function", name="f", content="x"), "messages", "function"),
    (says(role="assistant", audio={"id": "a"}), "messages", "audio"),
    (says(role="assistant", function_call={"name": "f"}), "messages", "tool_calls"),
    (says(role="assistant", tool_calls=CALL), "messages", "tool_calls"),
    (says(role="assistant", tool_calls=["search"]), "messages", "tool_calls"),
    (says(role="assistant", tool_calls=[BROKEN]), "messages", "malformed JSON"),
    (says(role="assistant", tool_calls=[SURROGATE]), "messages", "JSON object"),
    ({"frobnicate": 1}, "frobnicate", ""),
    ({"frequency_penalty": 0.5}, "frequency_penalty", ""),
    ({"functions": [{"name": "f"}]}, "functions", ""),
    ({"reasoning_effort": "high"}, "reasoning_effort", ""),
    ({"top_logprobs": 2}, "top_logprobs", ""),
    ({"stream_options": {"include_usage": True}}, "stream_options", ""),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", ""),
    ({"max_completion_tokens": 9}, "max_tokens", ""),
    ({"max_tokens": 0}, "max_tokens", ""),
    ({"max_tokens": "5"}, "max_tokens", ""),
    ({"n": True}, "n", ""),
    ({"temperature": True}, "temperature", ""),
    ({"temperature": "1"}, "temperature", ""),
    ({"logprobs": 1}, "logprobs", ""),
    ({"stream": "no"}, "stream", ""),
    ({"seed": 1.0}, "seed", ""),
    ({"seed": "7"}, "seed", ""),
    ({"tools": [{"type": "function"}]}, "tools", ""),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    (chooses("sometimes"), "tool_choice", "'sometimes'"),
    (chooses({"type": "custom", "custom": {"name": "search"}}), "tool_choice", "'custom'"),
    (chooses({"type": "function", "function": {"name": "write"}}), "tool_choice", "'write'"),
    (chooses({"type": "function", "function": {"name": ["search"]}}), "tool_choice", "search"),
    (allowed("auto"), "tool_choice", "allowed_tools"),
    (allowed("never", TOOL), "tool_choice", "'never'"),
    (allowed("auto", TOOL | {"function": {"name": "write"}}), "tool_choice", "'write'"),
    ({"art": {"trajectory_id": "a b"}}, "art", ""),
    ({"art": {"colour": 1}}, "art", "colour"),
    ({"art": {"step": "2"}}, "art", "step"),
    ({"art": {"attempt": True}}, "art", "attempt"),
    ({"art": ["t-1"]}, "art", ""),
]


def test_a_bad_chat_request_is_refused_by_name(http: httpx.Client) -> None:
    before = http.get("/status").json()["calls"]
    for body, param, words in CHATS:
        answer = chat(http, **body)
        said = refused(answer)
        named = answer.json()["error"]["param"] or ""
        assert words in said and named.startswith(param), (body, said)
    for status, code, body, words in (
        (404, "model_not_found", {"model": "nobody"}, "'tiny'"),
        (404, "model_not_found", {"model": "tiny@999"}, "kept"),
        (404, "model_not_found", {"model": "tiny@" + "9" * 5000}, "kept"),
        (400, "context_length_exceeded", prompt(5000), "tokens"),
        (400, "context_length_exceeded", prompt(100_000), "characters of messages and tools"),
        (400, "context_length_exceeded", prompt(7 << 20), ""),
    ):
        answer = chat(http, **body)
        assert words in refused(answer, status) and answer.json()["error"]["code"] == code
    assert http.get("/status").json()["calls"] == before


def prompt(words: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "word " * words}]}


def test_a_bad_step_policy_or_run_is_refused_by_name(http: httpx.Client) -> None:
    constant = {"kind": "constant", "value": 1e-300}
    for config, words in (
        ({"lr": 1}, "lr"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"learning_rate": True}, "learning_rate"),
        ({"max_grad_norm": 1e300}, "max_grad_norm"),
        ({"kl": {"estimator": "k3", "coefficient": 1e300}}, "coefficient"),
        ({"credit": {"kind": "anchor", "weight": 1e300}}, "weight"),
        ({"advantage": {"kind": "standardized", "scores": {"a": 1e300}}}, "scores"),
        ({"loss": {"kind": "clip", "aggregation": constant}}, "value"),
        ({"loss": {"kind": "cispo", "clip_high": 1e300}}, "clip_high"),
        ({"schedule": {"warmup_steps": 9, "decay_steps": 3}}, "decay_steps"),
        ({"optimizer_steps": "2"}, "optimizer_steps"),
        ({"tokens_per_microbatch": 10**30}, "tokens_per_microbatch"),
    ):
        assert words in refused(train(http, groups=[["a"]], config=config))
    for status, groups, policy, words in (
        (400, [], "tiny", "groups"),
        (404, [["nobody"]], "tiny", "POST /v1/groups"),
        (400, [["a", "a"]], "tiny", "more than once"),
        (404, [["a"]], "nobody", "nobody"),
    ):
        assert words in refused(train(http, groups=groups, policy=policy), status)
    missing = http.post("/v1/train", json={"policy": "tiny", "groups": [["a"]]})
    assert "Idempotency-Key" in refused(missing)
    for name, value in (
        ("seed", 2**64),
        ("alpha", 1e308),
        ("alpha", "8"),
        ("rank", True),
        ("rank", 10**30),
    ):
        answer = http.post("/v1/policies", json={"name": "odd", "lora": {name: value}})
        assert name in refused(answer)
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


def test_a_body_that_is_too_large_or_no_json_object_is_refused(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:  # no Content-Length: counted while it comes
        for _ in range(40):
            yield b" " * (1 << 20)

    answer = http.post("/v1/trajectories", content=pieces(), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    for body in (b"", b"{", b'"x"', b'{"temperature": NaN}', b"\xff", b"[" * 100_000):
        for path in ("/v1/chat/completions", "/v1/trajectories", "/v1/train"):
            headers = JSON | {"Idempotency-Key": new_id("k")}
            answer = http.post(path, content=body, headers=headers)
            refused(answer)
            assert answer.json()["error"]["code"] == "invalid_request"


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
