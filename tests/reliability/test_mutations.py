"""Whatever is sent, the answer is one that the OpenAPI document names, and no weight is harmed.

Answers in the formats of calls are what the models of the formats' own SDKs take, too.
"""

import copy
import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import load_file

from langchain_art.wire import KLPenalty, TrainConfig
from langchain_art.wire.api_keys import new_api_key
from tests.conformance.suite.scripts import script
from tests.reliability.test_hostile_numbers import HOSTILE
from tests.support.live_server import ForkedServer, LiveServer, RuleServer, small_model
from tests.support.mutations import Sent, Valid, mutants, places, sent_as_is
from tests.support.seeds import drawn_seed
from tests.support.soak import count
from tests.support.steps_of_a_fit import ended, ok, trained

REQUESTS, NUMBERS = count(100, 20_000), count(30, 2_000)
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


class Stored:
    """A server with two runs, that every job trains anew, and a valid request of each kind."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.http = server, server.http()
        self.document = Document(self.http)
        self.calls, self.runs = list[str](), ["run-0", "run-1"]
        for seed, run in enumerate(self.runs):
            asked = chat(art={"trajectory_id": run}, max_tokens=4, seed=seed)
            self.calls.append(ok(send(self.http, sent_as_is(asked)))["id"])
            ok(self.http.put(f"/v1/trajectories/{run}/reward", json={"reward": seed}))
        job = trained(self.http, [self.runs[:1]])["id"]
        self._known = {"name": "tiny", "version": 0, "call_id": self.calls[0], "job_id": job}
        self._known |= {"trajectory_id": self.runs[0], "batch": "b", "rollout_id": "r"}
        requests = [*self._trains(), *self._stores(), *self._others()]
        self.requests = [*self._chats() * 3, *other_formats(self.calls[0]), *requests]

    def _of(self, what: str, body: Any = None, nobodys: bool = False, **query: Any) -> Valid:
        method, path = what.split()
        holes = re.findall(r"\{(\w+)\}", path)
        names = {hole: "of-nobody" if nobodys else self._known[hole] for hole in holes}
        key = {"Idempotency-Key": uuid.uuid4().hex} if path.endswith("/train") else {}
        return Valid(method, path, names, query, body, key)

    def _chats(self) -> list[Valid]:
        return [
            chat(),
            chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False),
            chat(response_format=SCHEMA),
            chat(n=2, logprobs=True, top_logprobs=2, stop=["."], top_p=0.9, top_k=5),
            chat(stream=True, stream_options={"include_usage": True}),
        ]

    def _trains(self) -> list[Valid]:
        one, other = self.runs
        train = {"policy": "tiny", "groups": [[one, other]], "retrain": True, "schedule_step": 1}
        train |= {"seconds": {"rollout": 1.0, "judge": 1.0}}
        given = {one: [[0.5, 0.5, -0.5, 0.1]], other: [-1.0]}
        kl = KLPenalty(estimator="k3", coefficient=0.1)
        learn = TrainConfig(learning_rate=1e-3, max_kl=0.1, entropy_bonus=0.001, kl=kl)
        config = learn.model_dump(mode="json")
        optimizer = {name: config[name] for name in ("schedule", "max_grad_norm")}
        optimizer |= {"learning_rate": 1e-3, "tokens_per_microbatch": 4096, "optimizer_steps": 1}
        by_rewards = {"config": config, "rewards": {one: 1.0}, "turns": {self.calls[1]: 0.0}}
        prefers = {"kind": "dpo", "beta": 0.1, "learning_rate": 1e-3, "max_grad_norm": 1.0}
        plain = {name: train[name] for name in ("policy", "groups")}
        bodies = [
            train | by_rewards,
            train | {"advantages": given, "config": {"learning_rate": 1e-3}},
            plain | {"config": optimizer | {"kind": "sft"}},
            plain | {"config": prefers},
        ]
        return [self._of("POST /v1/train", body) for body in bodies]

    def _stores(self) -> list[Valid]:
        turn = {"call_id": self.calls[0], "messages": SAY[:2], "reward": 0.5, "latency": 0.1}
        turn |= {"reply": {"role": "assistant", "content": "x"}, "started_at": 1.0, "step": 1}
        turn |= {"attempt": 1, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        run = {"id": "new", "scenario": "s", "turns": [turn, turn | {"extends": 0}]}
        run |= {"reward": 0.5, "scores": {"a": 1.0}}
        said = {"source": "api", "trajectory": self.runs[0], "at": 1.5, "reviewer": "ann"}
        reward = said | {"id": "r-1", "kind": "reward", "name": "human_reward", "value": 1.0}
        correction = said | {"id": "r-2", "kind": "correction", "name": "output"}
        correction |= {"call_id": self.calls[0], "comment": "no"}
        correction |= {"correction": {"role": "assistant", "content": "In May."}}
        rewards = "PUT /v1/trajectories/{trajectory_id}/reward"
        return [
            self._of("POST /v1/trajectories", run),
            self._of("POST /v1/groups", {"id": "g", "trajectories": [run, run | {"id": "y"}]}),
            self._of(rewards, {"reward": 0.5, "scores": {"a": 0.5}, "metadata": {"x": 1}}, True),
            self._of(rewards, {"turns": {self.calls[0]: 0.5}}),
            self._of("PUT /v1/reviews", {"reviews": [correction, reward]}),
            self._of("POST /v1/policies", {"name": "tiny", "lora": {"rank": 8, "alpha": 16.0}}),
            self._of("POST /v1/policies/{name}/rollback", {"version": 0}),
        ]

    def _others(self) -> list[Valid]:
        of, worker = self._of, {"worker": "w"}
        rollouts = [{"id": "r", "scenario": {"q": 1}}]
        by_reviews: dict[str, Any] = {"policy": "tiny", "name": "human_reward"}
        by_reviews |= {"min_agreement": -1.0, "held_out_too": ["s"], "correction_steps": 1}
        by_reviews |= {"config": {"credit": "call"}, "preference": {"beta": 0.1}}
        policy, run = "/v1/policies/{name}", "/v1/trajectories/{trajectory_id}"
        one, batch = policy + "/checkpoints/{version}", "/v1/rollouts/batches/{batch}"
        plain = ["models", "models/{name}", "calls/{call_id}", "policies", "policies/{name}"]
        plain += ["policies/{name}/checkpoints", "trajectories/{trajectory_id}", "keys"]
        return [
            *(of(f"GET /v1/{path}") for path in plain),
            *(of(f"GET /{path}") for path in ("status", "metrics", "healthz", "readyz")),
            *(of(f"{method} {one}/pin") for method in ("PUT", "DELETE")),
            of(f"DELETE {one}"),
            of(f"GET {one}/adapter"),
            of("GET /v1/trajectories", limit=2, scenario="s"),
            of(f"GET {run}/audit", policy="tiny", trainable="n:true", sft="false"),
            of("GET /v1/reviews", policy="tiny", trajectory=self.runs[0], source="api"),
            *(of(f"POST /v1/reviews/{name}", by_reviews) for name in ("plan", "train")),
            of("POST /v1/reviews/foresee", {"runs": [self.runs[0], "t"]}),
            of("GET /v1/jobs", policy="tiny"),
            of("GET /v1/jobs/{job_id}", wait=0),
            of("GET /v1/jobs/{job_id}/events", after=0, wait=0),
            of("POST /v1/rollouts", {"batch": "b", "rollout": "m:f", "rollouts": rollouts}),
            of("POST /v1/rollouts/lease", worker | {"rollout": "m:f", "slots": 2, "free": 1}),
            of("POST /v1/rollouts/heartbeat", worker | {"holds": ["x"]}),
            of("POST /v1/rollouts/return", worker | {"holds": ["x"], "leaving": True}),
            of("POST /v1/rollouts/{rollout_id}/complete", {"trajectory_id": "x", "error": "E: x"}),
            of(f"POST {batch}/take", {"done": [], "limit": 2, "wait": 0}),
            of(f"GET {batch}"),
            of("POST /v1/keys", {"name": "x", "tenant": "ana", "scopes": ["infer"]}),
            of("GET /v1/log", limit=2),
            # What is deleted and cancelled is not what the others ask for.
            of("POST /v1/jobs/{job_id}/cancel", nobodys=True),
            *(of(f"DELETE {path}", nobodys=True) for path in (policy, batch, run)),
            of("DELETE /v1/keys/{key_id}", nobodys=True),
        ]

    def learns(self, sent: Sent) -> bool:
        """Send a request, which is refused in words, or taken; true if a job of it has ended.

        A job harms no weight: what it wrote is finite.
        """
        answer = send(self.http, sent)
        assert not self.document.problem(answer, sent), (sent, answer.text)
        if sent.path != "/v1/train" or answer.is_error:
            return False
        job = ended(self.http, answer.json())
        assert job["state"] == "succeeded" or job["error"], job
        version = job["result"]["version"] if job["state"] == "succeeded" else 0
        folder = self.server.data_dir / "adapters" / "tiny" / str(version)
        for file in folder.glob("*.safetensors"):
            weights = load_file(file).values()
            assert all(np.isfinite(one).all() for one in weights), (file.name, sent)
        ok(self.http.post("/v1/policies/tiny/rollback", json={"version": 0}))
        return True


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    short = small_model(max_position_embeddings=256)  # of a call whose limit is mutated away
    data, env = tmp_path_factory.mktemp("mutations") / "data", {"ART_API_KEY": new_api_key()}
    with ForkedServer(data, model=short, env=env) as server:
        yield Stored(server)


class Document:
    """The promises of the OpenAPI document about an answer, and the expectations of the SDKs."""

    def __init__(self, http: httpx.Client) -> None:
        self.whole = http.get("/openapi.json").json()
        self.responses: dict[str, dict[str, Any]] = {
            f"{method.upper()} {path}": about["responses"]
            for path, methods in self.whole["paths"].items()
            for method, about in methods.items()
        }
        self.seen = Counter[str]()

    def problem(self, answer: httpx.Response, sent: Sent) -> str:
        """The faults of an answer; empty if there are none."""
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


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.soak("T4", NUMBERS, "requests with hostile numbers")
def test_a_number_of_a_request_is_refused_or_harms_no_weight(stored: Stored) -> None:
    rng, sent, jobs = random.Random(drawn_seed()), 0, 0
    numbered = [
        one for one in stored.requests if any(is_number(at[key]) for at, key in places(one.body))
    ]
    assert sum(stored.learns(sent_as_is(one)) for one in numbered) == 4, "each is valid as it is"
    while sent < NUMBERS or (jobs < 2 and sent < 10 * NUMBERS):
        sent += 1
        one = copy.deepcopy(rng.choice(numbered))
        if one.headers:
            one.headers["Idempotency-Key"] = uuid.uuid4().hex
        found = [(at, key) for at, key in places(one.body) if is_number(at[key])]
        for at, key in rng.sample(found, min(len(found), rng.choice((1, 1, 2)))):
            at[key] = copy.deepcopy(rng.choice(HOSTILE))
            if isinstance(at, list) and rng.random() < 0.2:  # one too many
                at.append(0.5)
        jobs += stored.learns(sent_as_is(one))
    assert jobs > 1, "some of them are numbers like any other"
    assert ok(stored.http.get("/status"))["engine_restarts"] == 0
    print(f"{sent} requests, {jobs} jobs")  # noqa: T201 - for the report


@pytest.mark.slow
@pytest.mark.soak("S4", REQUESTS, "mutated requests")
def test_no_mutated_request_breaks_the_server(stored: Stored) -> None:
    http, document, found = stored.http, stored.document, dict[str, str]()
    assert {f"{one.method} {one.path}" for one in stored.requests} == document.responses.keys()
    few = {"name": "few", "tenant": "default", "scopes": ["metrics"]}
    key = http.post("/v1/keys", json=few).raise_for_status().json()["key"]
    with (
        stored.server.http(key) as allowed_little,
        httpx.Client(base_url=stored.server.root) as nobody,
    ):
        for sent in map(sent_as_is, stored.requests):
            for client in (http, allowed_little, nobody):
                if problem := document.problem(answer := send(client, sent), sent):
                    found[f"{sent.method} {sent.path}: {problem}"] = answer.text[:300]
    for sent in mutants(stored.requests, drawn_seed(), REQUESTS):
        try:
            answer = send(http, sent)
        except httpx.TransportError as error:  # no answer
            found[f"{sent.method} {sent.path}: {error!r}"] = str(sent)
            continue
        if problem := document.problem(answer, sent):
            found[f"{sent.method} {sent.path}: {problem}"] = f"{sent} {answer.text[:300]}"
    assert not found, "\n".join(f"{said}\n    {last}" for said, last in found.items())
    assert ok(http.get("/status"))["engine_restarts"] == 0
    assert send(http, sent_as_is(chat())).status_code == 200


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
    """True if the reply must follow one, which a script does not."""
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
