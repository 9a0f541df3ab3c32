"""Whatever is sent, the answer is one that the OpenAPI document names, and its schema.

Answers in the formats of calls are what the models of the formats' own SDKs take, too.
"""

import copy
import json
import random
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from langchain_art.wire.api_keys import new_api_key
from tests.conformance.suite.scripts import script
from tests.support.live_server import ForkedServer, RuleServer, small_model
from tests.support.mutations import Sent, Valid, mutants, sent_as_is
from tests.support.seeds import drawn_seed
from tests.support.soak import count

REQUESTS = count(100, 20_000)
#: Of each route: an answer, and an event of a streamed one.
MODELS: dict[str, tuple[TypeAdapter[Any], TypeAdapter[Any] | None]] = {
    "/v1/chat/completions": (TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)),
    "/v1/responses": (TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)),
    "/v1/messages": (TypeAdapter(Message), TypeAdapter(RawMessageStreamEvent)),
    "/v1/messages/count_tokens": (TypeAdapter(MessageTokensCount), None),
}
ERROR = TypeAdapter(ErrorResponse)
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


class Document:
    """What the OpenAPI document promises of an answer, and the SDKs expect of it."""

    def __init__(self, http: httpx.Client) -> None:
        self.whole = http.get("/openapi.json").json()
        self.responses: dict[str, dict[str, Any]] = {
            f"{method.upper()} {path}": about["responses"]
            for path, methods in self.whole["paths"].items()
            for method, about in methods.items()
        }
        self.seen = Counter[str]()

    def problem(self, answer: httpx.Response, sent: Sent) -> str:
        """What is wrong with an answer; empty if nothing is."""
        status, kind = answer.status_code, answer.headers.get("content-type", "").partition(";")[0]
        if status >= 500 and (status != 503 or "Retry-After" not in answer.headers):
            return f"{status} without Retry-After"
        known = self.responses[f"{sent.method} {sent.path}"]
        # A name that is empty, or has a slash, is another path (307: one slash less).
        if str(status) not in known:
            if status in (307, 404, 405) and "{" in sent.path:
                return ""
            return f"{status} is not among {sorted(known)}"
        content = known[str(status)].get("content", {})
        if content and kind not in content:
            return f"{kind} is not among {sorted(content)}"
        if kind == "application/json" and "schema" in content.get(kind, {}):
            schema = content[kind]["schema"] | {"components": self.whole["components"]}
            if error := best_match(Draft202012Validator(schema).iter_errors(answer.json())):
                return f"{status}: {error.message[:300]} at {error.json_path}"
        if status >= 400 and not answer.json()["error"]["message"]:
            return f"{status} without words"
        try:
            if status == 200 and sent.path in MODELS:
                self.seen[take(answer, sent.path)] += 1
            elif sent.path.startswith("/v1/messages"):
                ERROR.validate_python(answer.json())
        except ValidationError as error:
            return str(error)
        return ""


def take(answer: httpx.Response, path: str) -> str:
    """Read an answer, which is none of an error, as the format's SDK does; returns its kind."""
    whole, piece = MODELS[path]
    if not answer.headers["content-type"].startswith("text/event-stream"):
        whole.validate_python(answer.json())
        return f"{path} whole"
    assert piece is not None
    for line in answer.text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event or event.get("type") == "error":
            if path != "/v1/chat/completions":
                (ERROR if path == "/v1/messages" else piece).validate_python(event)
            return f"{path} error in a stream"
        piece.validate_python(event)
    return f"{path} streamed"


def send(http: httpx.Client, sent: Sent) -> httpx.Response:
    headers = [(name, value.encode("latin-1")) for name, value in sent.headers]
    return http.request(sent.method, sent.url, content=sent.content, headers=headers)


@pytest.mark.slow
@pytest.mark.soak("S4", REQUESTS, "mutated requests")
def test_no_mutated_request_breaks_the_server(tmp_path: Path) -> None:
    short = small_model(max_position_embeddings=256)  # of a call whose limit is mutated away
    env = {"ART_API_KEY": new_api_key()}
    with ForkedServer(tmp_path / "data", model=short, env=env) as server:
        found: dict[str, str] = {}
        with server.http() as http:
            document = Document(http)
            call = http.post("/v1/chat/completions", json=chat().body).json()["id"]
            run = f"run-{uuid.uuid4().hex}"
            body = chat().body | {"art": {"trajectory_id": run}}
            http.post("/v1/chat/completions", json=body).raise_for_status()
            http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0}).raise_for_status()
            train = {"policy": "tiny", "groups": [[run]]}
            job = http.post("/v1/train", json=train, headers={"Idempotency-Key": "first"}).json()
            few = {"name": "few", "tenant": "default", "scopes": ["metrics"]}
            key = http.post("/v1/keys", json=few).raise_for_status().json()["key"]
            requests = valid_requests(call, run, job["id"])
            assert {f"{one.method} {one.path}" for one in requests} == document.responses.keys()
            plain = [sent_as_is(one) for one in requests]
            with server.http(key) as allowed_little, httpx.Client(base_url=server.root) as nobody:
                for sent in plain:
                    for client in (http, allowed_little, nobody):
                        if problem := document.problem(answer := send(client, sent), sent):
                            found[f"{sent.method} {sent.path}: {problem}"] = answer.text[:300]
            for sent in mutants(requests, drawn_seed(), REQUESTS):
                try:
                    answer = send(http, sent)
                except httpx.TransportError as error:  # no answer
                    found[f"{sent.method} {sent.path}: {error!r}"] = str(sent)
                    continue
                if problem := document.problem(answer, sent):
                    found[f"{sent.method} {sent.path}: {problem}"] = f"{sent} {answer.text[:300]}"
            assert not found, "\n".join(f"{said}\n    {last}" for said, last in found.items())
            assert http.get("/status").json()["engine_restarts"] == 0
            assert http.post("/v1/chat/completions", json=chat().body).status_code == 200


CALL = {"call": "search", "args": {"what": "a door"}}
REPLIES: list[Any] = [
    "In May.",
    "",
    "<think>A door, or two.</think>",
    "<think></think>In May.",
    "<think>It never ends",
    "1 < 2, <thin and <tool_call",
    "é ✓ 日本 🙂",
    CALL,
    CALL | {"say": "I look."},
    CALL | {"say": "<think>A door?</think>\n\nI look."},
    {"calls": [CALL, CALL | {"args": {}}]},
    {"error": "the template fails"},
]


def drawn(rng: random.Random, one: Valid, stream: bool) -> Valid:
    """The request with another reply and limit."""
    one = copy.deepcopy(one)
    said = script(rng.choice(REPLIES), intro=rng.choice(["", "When?", "x" * 300]))
    body: dict[str, Any] = one.body
    turns = body.get("messages", body.get("input"))
    turns += [{"role": "user", "content": said}]
    for limit in body.keys() & {"max_tokens", "max_output_tokens"}:
        body[limit] = rng.choice([1, 2, 5, 200])
    if one.path != "/v1/messages/count_tokens":
        body["stream"] = stream
        if not body["stream"]:
            body.pop("stream_options", None)
    return one


def has_grammar(one: Valid) -> bool:
    """Whether the reply must follow one, which a script does not."""
    choice = one.body.get("tool_choice")
    forced = choice == "required" or (isinstance(choice, dict) and choice["type"] == "any")
    text = one.body.get("text") or one.body.get("output_config") or one.body.get("response_format")
    return forced or text is not None or any(t.get("strict") for t in one.body.get("tools") or ())


@pytest.mark.slow
@pytest.mark.soak("S4", REQUESTS, "drawn and mutated requests in the three formats of calls")
@pytest.mark.timeout(count(300, 3600))
def test_the_sdks_models_take_each_answer(tmp_path: Path) -> None:
    """Replies follow a script."""
    with RuleServer(tmp_path / "data") as server, server.http() as http:
        rng, found, document = random.Random(drawn_seed()), dict[str, str](), Document(http)
        call = http.post("/v1/chat/completions", json=chat().body).json()["id"]
        several = {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["."]}
        of = [chat(tools=[TOOL]), chat(**several), *other_formats(call)]
        of += [chat(stream_options={"include_usage": True})]
        of = [one for one in of if not has_grammar(one)]
        for number in range(REQUESTS // 2):
            turn, at = divmod(number, len(of))
            one = drawn(rng, of[at], stream=(turn + at) % 2 == 0)
            for sent in (sent_as_is(one), *mutants([one], rng.getrandbits(32), 1)):
                if problem := document.problem(answer := send(http, sent), sent):
                    found[problem] = f"{sent}\n    {answer.text[:2000]}"
        assert http.get("/status").json()["engine_restarts"] == 0
    assert not found, "\n".join(f"{said}\n    {last}" for said, last in list(found.items())[:5])
    kinds = {f"{path} {how}" for path in list(MODELS)[:3] for how in ("whole", "streamed")}
    assert all(document.seen[kind] > REQUESTS // 100 for kind in kinds), document.seen
    print(f"{REQUESTS:,} requests; {dict(document.seen)}")  # noqa: T201
