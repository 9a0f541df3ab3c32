"""OpenAI's dialect in its corners, as the newest SDK speaks it, against the API reference."""

import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.conformance.suite.scripts import script
from tests.support.live_server import RuleServer

ASK: list[Any] = [{"role": "user", "content": "When is the falcon review?"}]


class Search(BaseModel):
    """Search the inbox."""

    query: str


class Answer(BaseModel):
    name: str
    age: int


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def says(*steps: Any) -> list[Any]:
    return [{"role": "user", "content": script(*steps)}]


@pytest.fixture(scope="module")
def rules(rule_server: RuleServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=rule_server.base_url, api_key="none", max_retries=0)


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    base = {"model": "tiny", "messages": ASK, "max_tokens": 8}
    return http.post("/v1/chat/completions", json=base | body)


def record(client: openai.OpenAI, call_id: str) -> dict[str, Any]:
    return client.get(f"/calls/{call_id}", cast_to=httpx.Response).json()


def test_choices_are_streamed_side_by_side(http: httpx.Client, sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"messages": ASK, "max_tokens": 24, "n": 3, "seed": 5}
    whole = sdk.chat.completions.create(model="tiny", **options)
    usage = {"include_usage": True}
    stream = sdk.chat.completions.create(
        model="tiny", stream=True, stream_options=usage, logprobs=True, **options
    )
    texts: dict[int, str] = defaultdict(str)
    roles: list[int] = []
    finished: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    order: list[int] = []
    for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            assert choice.index not in finished
            order.append(choice.index)
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
                assert choice.logprobs is not None and choice.logprobs.content is not None
                logprobs[choice.index] = [token.logprob for token in choice.logprobs.content]
                name = chunk.id + (f":{choice.index}" if choice.index else "")
                kept = http.get(f"/v1/calls/{name}")  # before the choice is said to be finished
                assert kept.json()["logprobs"] == logprobs[choice.index]
        assert (chunk.usage is None) == bool(chunk.choices) and "usage" in chunk.model_fields_set
    assert sorted(roles) == [0, 1, 2]
    assert order != sorted(order)  # no choice waits for another
    assert texts == {c.index: c.message.content or "" for c in whole.choices}
    assert finished == {c.index: c.finish_reason for c in whole.choices}
    assert last.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(map(len, logprobs.values()))


def test_the_last_chunk_of_one_choice_has_the_usage_that_nobody_asked_for(
    sdk: openai.OpenAI,
) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 8, "seed": 5}
    whole = sdk.chat.completions.create(**options)
    chunks = list(sdk.chat.completions.create(stream=True, logprobs=True, **options))
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.usage]
    assert all(chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].logprobs is not None
    two = sdk.chat.completions.create(stream=True, n=2, **options)
    assert not any(chunk.usage for chunk in two)


def test_a_stream_is_kept_back_by_no_proxy(http: httpx.Client) -> None:
    asked = {"model": "tiny", "messages": ASK, "max_tokens": 2, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-store"
        assert "transfer-encoding" in answer.headers


def test_a_stream_of_several_choices_is_refused_as_a_whole(http: httpx.Client) -> None:
    answer = ask(http, n=2, stream=True, messages=[{"role": "user", "content": "word " * 5000}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert http.get("/status").json()["running_calls"] == 0


def test_the_stream_helper_gives_schemas_tools_and_logprobs(rules: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "The name is 'Bob', age 7."}]
    with rules.chat.completions.stream(
        model="tiny", messages=asked, response_format=Answer, logprobs=True
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Answer(name="Bob", age=7)
    kinds = {event.type for event in events}
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    content = final.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [t.logprob for t in content or []] == record(rules, final.id)["logprobs"]

    calls = {"say": "I look.", "calls": [{"call": "Search", "args": {"query": q}} for q in "ab"]}
    with rules.chat.completions.stream(
        model="tiny",
        messages=says(calls),
        tools=[openai.pydantic_function_tool(Search)],
        stream_options={"include_usage": True},
    ) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(e.index, e.parsed_arguments) for e in done] == [
        (0, Search(query="a")),
        (1, Search(query="b")),
    ]
    message = final.choices[0].message
    assert message.content == "I look."
    assert final.usage is not None
    assert final.usage.completion_tokens == len(record(rules, final.id)["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_short_is_text_and_says_so(rules: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": says({"say": "Wait.", "call": "search", "args": {"query": "falcon " * 20}}),
        "tools": [openai.pydantic_function_tool(Search, name="search")],
        "max_tokens": 30,
    }
    if stream:
        with rules.chat.completions.stream(**options) as events:
            with pytest.raises(openai.LengthFinishReasonError):
                events.get_final_completion()
            reply = events.current_completion_snapshot
    else:
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            rules.chat.completions.parse(**options)
        reply = caught.value.completion
    choice = reply.choices[0]
    assert choice.finish_reason == "length" and not choice.message.tool_calls
    assert (choice.message.content or "").startswith("Wait.\n<tool_call>")


def test_calls_one_at_a_time(rules: openai.OpenAI) -> None:
    two = says({"calls": [{"call": "search", "args": {"query": q}} for q in "ab"]})
    for parallel, count in ((True, 2), (False, 1)):
        reply = rules.chat.completions.create(
            model="tiny", messages=two, tools=[tool("search")], parallel_tool_calls=parallel
        )
        calls = reply.choices[0].message.tool_calls or []
        assert [json.loads(c.function.arguments)["query"] for c in calls] == ["a", "b"][:count]


def test_tool_choice_in_all_its_forms(rules: openai.OpenAI) -> None:
    tools = [tool("search"), tool("read")]
    read = {"type": "function", "function": {"name": "read"}}
    for choice, called in [
        ("none", None),
        ("auto", "search"),
        ("required", "search"),
        (read, "read"),
        (allowed("required", "read"), "read"),
        (allowed("auto", "read"), "read"),
    ]:
        reply = rules.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=tools,
            tool_choice=choice,  # type: ignore[arg-type]
        )
        calls = reply.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls] == ([called] if called else [])
        kept = record(rules, reply.id)
        assert kept["request"]["tools"] == tools and kept["request"]["tool_choice"] == choice


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "falcon"}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Friday"}
PLAIN: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    RESULT,
]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_messages_mean_the_same_in_all_their_spellings(http: httpx.Client) -> None:
    called = {"role": "assistant", "tool_calls": [CALL]}
    nothing = dict.fromkeys(("content", "refusal", "audio", "function_call"))

    def recorded(messages: list[Any]) -> dict[str, Any]:
        call = ask(http, messages=messages, tools=[tool("search")]).json()["id"]
        return http.get(f"/v1/calls/{call}").json()

    plain = recorded(PLAIN)
    for index, message in (
        (0, {"role": "developer", "content": "Be brief."}),
        (0, {"role": "system", "content": parts("Be ", "brief.")}),
        (1, {"role": "user", "content": parts("When?"), "name": "ann"}),
        (2, called),
        (2, called | {"content": None}),
        (2, called | nothing | {"annotations": []}),
        (3, RESULT | {"content": parts("Friday")}),
        (3, RESULT | {"name": "search"}),
    ):
        spelled = [*PLAIN[:index], message, *PLAIN[index + 1 :]]
        kept = recorded(spelled)
        assert kept["prompt_token_ids"] == plain["prompt_token_ids"]
        assert kept["request"]["messages"] == spelled  # as it came


def test_options_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    nothing = dict.fromkeys(
        ("audio", "functions", "function_call", "tools", "tool_choice", "response_format", "stop")
    )
    notes = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "prediction": None}
    same = {"max_completion_tokens": 8, "top_logprobs": 0, "store": False, "n": 1}
    assert ask(http, **nothing, **notes, **same).status_code == 200


def test_tags_come_by_body_and_by_header(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 4}
    by_header = {"x-art-tags": "draft, second ,", "x-art-node": "Prüfer".encode()}
    for headers, art, tags in [
        (by_header, {}, {"tags": ["draft", "second"], "node": "Prüfer"}),
        ({}, {"tags": ["draft"]}, {"tags": ["draft"]}),
        (by_header, {"tags": ["mine"]}, {"tags": ["mine"], "node": "Prüfer"}),
        ({"x-art-node": "Prüfer".encode("latin-1")}, {}, {"node": "Prüfer"}),
    ]:
        answer = http.post("/v1/chat/completions", json=body | {"art": art}, headers=headers)  # type: ignore[arg-type]
        assert http.get(f"/v1/calls/{answer.json()['id']}").json()["tags"] == tags
    answer = http.post("/v1/chat/completions", json=body, headers={"x-art-colour": "red"})
    assert answer.status_code == 400 and "art.colour" in answer.json()["error"]["message"]


def test_a_retry_is_counted(http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": ASK, "max_tokens": 4}
    for sent, kept in [(None, 0), ("0", 0), ("2", 2), ("many", 0), ("-1", 0), ("9" * 40, 0)]:
        headers = {} if sent is None else {"x-stainless-retry-count": sent}
        answer = http.post("/v1/chat/completions", json=body, headers=headers)
        assert http.get(f"/v1/calls/{answer.json()['id']}").json()["retry"] == kept
