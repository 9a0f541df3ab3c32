"""Answers in each format of calls, whole and streamed: the models of the formats' own SDKs.

Requests are drawn: half of them are valid, half are mutated.
"""

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from tests.conformance.suite.scripts import script
from tests.reliability.test_mutations import SCHEMA, TOOL, chat, other_formats, wrong
from tests.support.live_server import ForkedServer, RuleServer
from tests.support.mutations import Sent, Valid, mutants
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


def events(text: str) -> list[Any]:
    """Data of each event of a stream that is whole."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check(answer: httpx.Response, path: str) -> str:
    """Validate an answer, which is none of an error; returns its kind."""
    whole, piece = MODELS[path]
    if not answer.headers["content-type"].startswith("text/event-stream"):
        whole.validate_python(answer.json())
        return f"{path} whole"
    assert piece is not None
    for event in events(answer.text):
        if "error" in event or event.get("type") == "error":
            if path == "/v1/messages":
                ERROR.validate_python(event)
            elif path == "/v1/responses":
                piece.validate_python(event)
            return f"{path} error in a stream"
        piece.validate_python(event)
    return f"{path} streamed"


def has_grammar(one: Valid) -> bool:
    """Whether the reply must follow one, which a script does not."""
    choice = one.body.get("tool_choice")
    forced = choice == "required" or (isinstance(choice, dict) and choice["type"] == "any")
    text = one.body.get("text") or one.body.get("output_config") or one.body.get("response_format")
    return forced or text is not None or any(t.get("strict") for t in one.body.get("tools") or ())


def sent_as_is(one: Valid) -> Sent:
    headers = [("Content-Type", "application/json")]
    return Sent(one.method, one.path, one.path, json.dumps(one.body).encode(), headers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuleServer, ForkedServer])
@pytest.mark.soak("S4", REQUESTS // 2, "drawn and mutated requests in the three formats of calls")
@pytest.mark.timeout(count(300, 3600))
def test_the_sdks_models_take_each_answer(tmp_path: Path, kind: type[ForkedServer]) -> None:
    """Of replies that follow a script, and of a real model's that follow grammars."""
    with kind(tmp_path / "data") as server:
        rng, seen, found = random.Random(drawn_seed()), Counter[str](), dict[str, str]()
        with server.http() as http:
            call = http.post("/v1/chat/completions", json=chat().body).json()["id"]
            routes = http.get("/openapi.json").json()["paths"]
            documented = {f"POST {path}": set(routes[path]["post"]["responses"]) for path in MODELS}
            several = {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["."]}
            of = [chat(tools=[TOOL]), chat(response_format=SCHEMA), chat(**several)]
            of += [chat(tools=[TOOL], tool_choice="required"), *other_formats(call)]
            of += [chat(stream_options={"include_usage": True})]
            if kind is RuleServer:
                of = [one for one in of if not has_grammar(one)]
            for number in range(REQUESTS // 4):
                turn, at = divmod(number, len(of))
                one = drawn(rng, of[at], stream=(turn + at) % 2 == 0)
                for sent in (sent_as_is(one), *mutants([one], rng.getrandbits(32), 1)):
                    headers = [(name, value.encode("latin-1")) for name, value in sent.headers]
                    answer = http.request("POST", sent.url, content=sent.content, headers=headers)
                    problem = wrong(answer, sent, documented)
                    try:
                        if answer.status_code == 200:
                            seen[check(answer, sent.path)] += 1
                        elif sent.path.startswith("/v1/messages"):
                            ERROR.validate_python(answer.json())
                    except ValidationError as error:
                        problem = str(error)
                    if problem:
                        found[problem] = f"{sent}\n    {answer.text[:2000]}"
            assert http.get("/status").json()["engine_restarts"] == 0
    assert not found, "\n".join(f"{said}\n    {last}" for said, last in list(found.items())[:5])
    kinds = {f"{path} {how}" for path in list(MODELS)[:3] for how in ("whole", "streamed")}
    assert all(seen[kind] > REQUESTS // 100 for kind in kinds), seen
    print(f"{REQUESTS // 2:,} requests; {dict(seen)}")  # noqa: T201
