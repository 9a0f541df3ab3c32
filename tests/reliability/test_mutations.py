"""Whatever is sent, the answer is one that the OpenAPI document names; 503 says when to retry."""

import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import ForkedServer, small_model
from tests.support.mutations import Sent, Valid, mutants
from tests.support.seeds import drawn_seed
from tests.support.soak import count

REQUESTS = count(100, 20_000)
SAY = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "text", "text": "When?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Monday."},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}


def chat(**more: Any) -> Valid:
    body = {"model": "tiny", "messages": SAY, "max_tokens": 2, "temperature": 1.0, "seed": 1}
    art = {"trajectory_id": "t", "node": "n", "path": ["a"], "tags": ["b"]}
    return Valid("POST", "/v1/chat/completions", body=body | {"art": art} | more)


#: Of a request whose reply has a schema: no tools.
FREE: dict[str, Any] = {"tools": None, "tool_choice": None}


def other_formats(call: str) -> list[Valid]:
    """Requests of Responses and Messages, with each kind of item and block."""
    use = {"type": "tool_use", "id": "c1", "name": "search", "input": {}}
    thinking = {"type": "thinking", "thinking": "x", "signature": ""}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "x"}],
    }
    tools = [{"name": "search", "input_schema": TOOL["function"]["parameters"]}]
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "x"}, use]},
        {"role": "user", "content": [result]},
    ]
    prompt = {"model": "tiny", "system": "Answer.", "messages": messages, "tools": tools}
    prompt |= {"tool_choice": {"type": "any"}, "thinking": {"type": "adaptive"}}
    message = prompt | {"max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1}
    form = {"type": "json_schema", "name": "x", "schema": {"type": "string"}}
    text = [{"type": "input_text", "text": "When?"}]
    items = [
        {"role": "user", "content": text},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": text},
    ]
    function = TOOL["function"] | {"type": "function", "strict": True}
    response = {"model": "tiny", "input": items, "instructions": "x", "max_output_tokens": 2}
    response |= {"temperature": 1.0, "top_p": 0.9, "seed": 1, "art": {"trajectory_id": "t"}}
    path = "/v1/messages"
    return [
        Valid("POST", path, body=message | {"stop_sequences": ["."], "art": {"node": "n"}}),
        Valid("POST", path, body=message | {"stream": True, "tool_choice": {"type": "auto"}}),
        Valid("POST", path, body=message | {"output_config": {"format": form}} | FREE),
        Valid("POST", f"{path}/count_tokens", body=prompt),
        Valid("POST", "/v1/responses", body=response | {"tools": [function], "stream": True}),
        Valid("POST", "/v1/responses", body=response | {"text": {"format": form}}),
        Valid("POST", "/v1/responses", body=response | {"previous_response_id": call}),
    ]


def valid_requests(call: str, run: str, job: str) -> list[Valid]:
    turn = {"call_id": call, "messages": SAY[:2], "reply": {"role": "assistant", "content": "x"}}
    run_body = {"id": "new", "scenario": "s", "turns": [turn], "reward": 0.5, "scores": {"a": 1.0}}
    version = {"name": "tiny", "version": 0}
    policy = "/v1/policies/{name}"
    one = policy + "/checkpoints/{version}"
    batch, worker = "/v1/rollouts/batches/{batch}", {"worker": "w"}
    lease = worker | {"rollout": "m:f", "slots": 2, "free": 1}
    train = {"policy": "tiny", "groups": [[run]], "config": {"learning_rate": 1e-4}}
    by_reviews: dict[str, Any] = {"policy": "tiny", "name": "human_reward", "min_agreement": -1.0}
    by_reviews |= {"config": {"credit": "call", "max_staleness": 4}, "preference": {"beta": 0.1}}
    by_reviews |= {"held_out_too": ["s"], "correction_steps": 1}
    chats = [
        chat(),
        chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False),
        chat(response_format=SCHEMA),
        chat(n=2, logprobs=True, top_logprobs=2, stop=["."], top_p=0.9, top_k=5),
        chat(stream=True, stream_options={"include_usage": True}),
    ]
    said = {"source": "api", "trajectory": run, "at": 1.5, "reviewer": "ann", "comment": "no"}
    reward = said | {"id": "r-1", "kind": "reward", "name": "human_reward", "value": 1.0}
    correction = said | {"id": "r-2", "kind": "correction", "name": "output", "call_id": call}
    correction |= {"correction": {"role": "assistant", "content": "In May."}}
    return [
        *chats * 3,
        *other_formats(call),
        Valid("GET", "/v1/models"),
        Valid("GET", "/v1/models/{name}", {"name": "tiny"}),
        Valid("GET", "/v1/calls/{call_id}", {"call_id": call}),
        Valid("GET", "/v1/policies"),
        Valid("POST", "/v1/policies", body={"name": "tiny", "lora": {"rank": 8, "alpha": 16.0}}),
        Valid("GET", policy, {"name": "tiny"}),
        Valid("GET", policy + "/checkpoints", {"name": "tiny"}),
        Valid("PUT", one + "/pin", version),
        Valid("DELETE", one + "/pin", version),
        Valid("DELETE", one, version),
        Valid("GET", one + "/adapter", version),
        Valid("POST", policy + "/rollback", {"name": "tiny"}, body={"version": 0}),
        Valid("POST", "/v1/trajectories", body=run_body),
        Valid("POST", "/v1/groups", body={"id": "g", "trajectories": [run_body]}),
        Valid("GET", "/v1/trajectories", query={"limit": 2, "scenario": "s"}),
        Valid("GET", "/v1/trajectories/{trajectory_id}", {"trajectory_id": run}),
        Valid(
            "GET",
            "/v1/trajectories/{trajectory_id}/audit",
            {"trajectory_id": run},
            {"policy": "tiny", "trainable": "n:true", "sft": "false"},
        ),
        Valid(
            "PUT",
            "/v1/trajectories/{trajectory_id}/reward",
            {"trajectory_id": run},
            body={"reward": 1.0, "scores": {"a": 0.5}, "metadata": {"x": 1}},
        ),
        Valid("PUT", "/v1/reviews", body={"reviews": [correction, reward]}),
        Valid("GET", "/v1/reviews", query={"policy": "tiny", "trajectory": run, "source": "api"}),
        Valid("POST", "/v1/reviews/plan", body=by_reviews),
        Valid("POST", "/v1/reviews/foresee", body={"runs": [run, "t"]}),
        Valid("POST", "/v1/reviews/train", body=by_reviews, headers={"Idempotency-Key": "again"}),
        Valid("POST", "/v1/train", body=train, headers={"Idempotency-Key": "once"}),
        Valid("GET", "/v1/jobs", query={"policy": "tiny"}),
        Valid("GET", "/v1/jobs/{job_id}", {"job_id": job}, {"wait": 0}),
        Valid("GET", "/v1/jobs/{job_id}/events", {"job_id": job}, {"after": 0, "wait": 0}),
        Valid(
            "POST",
            "/v1/rollouts",
            body={"batch": "b", "rollout": "m:f", "rollouts": [{"id": "r", "scenario": {"q": 1}}]},
        ),
        Valid("POST", "/v1/rollouts/lease", body=lease),
        Valid("POST", "/v1/rollouts/heartbeat", body=worker | {"holds": ["x"]}),
        Valid("POST", "/v1/rollouts/return", body=worker | {"holds": ["x"], "leaving": True}),
        Valid(
            "POST",
            "/v1/rollouts/{rollout_id}/complete",
            {"rollout_id": "r"},
            body={"trajectory_id": "x", "error": "TimeoutError: slow"},
        ),
        Valid("POST", batch + "/take", {"batch": "b"}, body={"done": [], "limit": 2, "wait": 0}),
        Valid("GET", batch, {"batch": "b"}),
        # What is deleted and cancelled is not what the others ask for.
        Valid("POST", "/v1/jobs/{job_id}/cancel", {"job_id": "job-of-nobody"}),
        Valid("DELETE", policy, {"name": "of-nobody"}),
        Valid("DELETE", batch, {"batch": "of-nobody"}),
        Valid("DELETE", "/v1/trajectories/{trajectory_id}", {"trajectory_id": "run-of-nobody"}),
        Valid("POST", "/v1/keys", body={"name": "x", "tenant": "ana", "scopes": ["infer"]}),
        Valid("GET", "/v1/keys"),
        Valid("DELETE", "/v1/keys/{key_id}", {"key_id": "key-of-nobody"}),
        Valid("GET", "/v1/log", query={"limit": 2}),
        Valid("GET", "/status"),
        Valid("GET", "/metrics"),
        Valid("GET", "/healthz"),
        Valid("GET", "/readyz"),
    ]


def wrong(answer: httpx.Response, sent: Sent, documented: dict[str, set[str]]) -> str:
    """What is wrong with an answer; empty if nothing is."""
    status = answer.status_code
    if status >= 500 and (status != 503 or "Retry-After" not in answer.headers):
        return f"{status} without Retry-After"
    known = documented[f"{sent.method} {sent.path}"]
    # A name that is empty, or has a slash, is another path (307: one slash less).
    if str(status) not in known and not (status in (307, 404, 405) and "{" in sent.path):
        return f"{status} is not among {sorted(known)}"
    if status >= 400:
        error = answer.json().get("error")
        if not isinstance(error, dict) or not error.get("message"):
            return f"{status} without OpenAI's error"
    return ""


@pytest.mark.slow
@pytest.mark.soak("S4", REQUESTS, "mutated requests")
def test_no_mutated_request_breaks_the_server(tmp_path: Path) -> None:
    short = small_model(max_position_embeddings=256)  # of a call whose limit is mutated away
    with ForkedServer(tmp_path / "data", model=short) as server:
        found: dict[str, str] = {}
        with server.http() as http:
            call = http.post("/v1/chat/completions", json=chat().body).json()["id"]
            run = f"run-{uuid.uuid4().hex}"
            body = chat().body | {"art": {"trajectory_id": run}}
            http.post("/v1/chat/completions", json=body).raise_for_status()
            http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0}).raise_for_status()
            train = {"policy": "tiny", "groups": [[run]]}
            job = http.post("/v1/train", json=train, headers={"Idempotency-Key": "first"}).json()
            routes = http.get("/openapi.json").json()["paths"]
            documented = {
                f"{method.upper()} {path}": set(about["responses"])
                for path, methods in routes.items()
                for method, about in methods.items()
            }
            requests = valid_requests(call, run, job["id"])
            assert {f"{one.method} {one.path}" for one in requests} == documented.keys()
            for sent in mutants(requests, drawn_seed(), REQUESTS):
                headers = [(name, value.encode("latin-1")) for name, value in sent.headers]
                try:
                    answer = http.request(
                        sent.method, sent.url, content=sent.content, headers=headers
                    )
                except httpx.TransportError as error:  # no answer
                    found[f"{sent.method} {sent.path}: {error!r}"] = str(sent)
                    continue
                if problem := wrong(answer, sent, documented):
                    found[f"{sent.method} {sent.path}: {problem}"] = f"{sent} {answer.text[:300]}"
            assert not found, "\n".join(f"{said}\n    {last}" for said, last in found.items())
            assert http.get("/status").json()["engine_restarts"] == 0
            assert http.post("/v1/chat/completions", json=chat().body).status_code == 200
