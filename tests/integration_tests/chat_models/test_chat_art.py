"""ChatART against a real server: what goes out, what comes back, on all four paths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    InvalidToolCall,
    ToolMessage,
)
from langchain_core.runnables import ConfigurableField, Runnable
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from langchain_art import ChatART, capture
from langchain_art.errors import ConfigError
from langchain_art.wire import CallTags
from tests.conformance.suite.scripts import script
from tests.conformance.suite.tools import look
from tests.support.chat_models import model_of, recorded
from tests.support.live_server import RuleServer
from tests.support.raw_server import RawServer, refusal


def known(tags: dict[str, Any]) -> dict[str, Any]:
    """Tags as the server keeps them, without the fields that were not said."""
    return CallTags(**tags).model_dump(mode="json", exclude_defaults=True)


def payload(model: ChatART, messages: Any = "hi", **kwargs: Any) -> dict[str, Any]:
    return model._get_request_payload(messages, **kwargs)


async def merged(chunks: AsyncIterator[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = [chunk async for chunk in chunks]
    return sum(rest, first)


async def test_closing_one_models_client_leaves_the_others(art_server: Any) -> None:
    one, other = model_of(art_server), model_of(art_server)
    await one.ainvoke("hi")
    await one.root_async_client.close()
    await other.ainvoke("hi")
    await one.ainvoke("hi")


class Tree(BaseModel):
    """A tree."""

    right: bool
    branches: list[Tree] = []


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_recursive_structured_output(rule_server: Any, method: Any) -> None:
    tree = {"right": True, "branches": [{"right": False, "branches": []}]}
    said = {"say": json.dumps(tree)} if method == "json_schema" else {"call": "Tree", "args": tree}
    model = model_of(rule_server, max_tokens=200).with_structured_output(Tree, method=method)
    assert await model.ainvoke(script(said)) == Tree.model_validate(tree)


def test_what_is_asked_for_of_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = payload(ChatART(model="m"))
    assert not {"logprobs", "extra_body", "temperature"} & sent.keys()
    assert payload(ChatART(model="gpt-5-local", temperature=0.3))["temperature"] == 0.3
    assert "temperature" not in payload(ChatART(model="o1-local"))
    monkeypatch.setenv("LC_OUTPUT_VERSION", "responses/v1")
    monkeypatch.setenv("OPENAI_PROXY", "http://proxy:1")
    for name in ("codex-mini", "gpt-5-pro", "gpt-6"):  # never the Responses API
        model = ChatART(model=name, reasoning={"effort": "low"})
        assert "messages" in payload(model, tools=[{"type": "function"}])
        assert model.openai_proxy is None


def test_bound_extra_body_is_merged_and_own_tags_win_field_by_field() -> None:
    model = ChatART(model="m", extra_body={"top_k": 5, "art": {"node": "mine", "step": 1}})
    sent = payload(model, extra_body={"min_p": 0.1, "art": {"step": 2}})["extra_body"]
    assert sent == {"top_k": 5, "min_p": 0.1, "art": {"node": "mine", "step": 2}}


def test_broken_tool_calls_go_back_as_json() -> None:
    good = {"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    bad = InvalidToolCall(name="f", args='{"a": ', id="1", error="cut", type="invalid_tool_call")
    reply = AIMessage("", tool_calls=[good], invalid_tool_calls=[bad])
    calls = payload(ChatART(model="m"), ["q", reply])["messages"][1]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        {"a": 1},
        {"__invalid__": '{"a": '},
    ]


def test_reasoning_is_kept_both_ways() -> None:
    model = ChatART(model="m")
    said = {"role": "assistant", "content": "4", "reasoning": "2+2"}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    result = model._create_chat_result({"id": "x", "model": "m@1", "choices": [choice]})
    reply = result.generations[0].message
    assert reply.additional_kwargs["reasoning_content"] == "2+2"
    assert payload(model, ["q", reply])["messages"][1]["reasoning_content"] == "2+2"
    delta = {"id": "x", "model": "m@1", "choices": [{"index": 0, "delta": said}]}
    chunk = model._convert_chunk_to_generation_chunk(delta, AIMessageChunk, None)
    assert chunk is not None
    assert chunk.message.additional_kwargs["reasoning_content"] == "2+2"


async def test_tags_in_a_scope_on_all_paths(art_server: Any) -> None:
    model = model_of(art_server)
    with capture(scenario="q", id="run-1") as run:
        replies = [model.invoke("a"), await model.ainvoke("b")]
        chunks = list(model.stream("c"))
        assert [one for one in chunks if "call_id" in one.response_metadata] == chunks[:1]
        replies += [sum(chunks[1:], chunks[0]), await merged(model.astream("d"))]
        for reply in replies:
            metadata, record = reply.response_metadata, recorded(art_server, reply)
            assert metadata["call_id"].startswith("chatcmpl-")
            assert len(metadata["call_id"]) < 64  # merging chunks did not join it to itself
            assert metadata["model_name"] == record["model"]
            assert metadata["model_name"].startswith(f"{art_server.policy}@")
            assert metadata["model_provider"] == "art"
            assert reply.usage_metadata["output_tokens"] == len(record["token_ids"]) > 0
            assert len(record["token_ids"]) == len(record["logprobs"])
            assert not metadata.get("logprobs")
        replies.append(model.stream_events("e", version="v3").output)
        replies.append(await (await model.astream_events("f", version="v3")))
    after = model.invoke("g")
    for reply in replies:
        tags = known(recorded(art_server, reply)["tags"])
        assert tags == {"trajectory_id": run.id, "scenario": "q"}
    assert known(recorded(art_server, after)["tags"]) == {}
    assert [t.call_id for t in run.turns] == [r.response_metadata["call_id"] for r in replies]


Ask = Callable[..., AIMessage]


def streamed(model: Runnable[Any, Any], *args: Any, **kwargs: Any) -> AIMessageChunk:
    chunks = list(model.stream("hi", *args, **kwargs))
    return sum(chunks[1:], chunks[0])


def astreamed(model: Runnable[Any, Any], *args: Any, **kwargs: Any) -> AIMessageChunk:
    return asyncio.run(merged(model.astream("hi", *args, **kwargs)))


PATHS: dict[str, Ask] = {
    "invoke": lambda model, *args, **kwargs: model.invoke("hi", *args, **kwargs),
    "ainvoke": lambda model, *args, **kwargs: asyncio.run(model.ainvoke("hi", *args, **kwargs)),
    "stream": streamed,
    "astream": astreamed,
}


@pytest.fixture(params=PATHS)
def ask(request: pytest.FixtureRequest) -> Ask:
    """`invoke`, `ainvoke`, and both streams added up."""
    return PATHS[request.param]


def sampled(server: Any, message: AIMessage) -> dict[str, Any]:
    """What the server was asked with."""
    return recorded(server, message)["request"]


def test_options_reach_the_server_from_wherever_they_are_set(art_server: Any, ask: Ask) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["\n"]}
    here = model_of(art_server, **options)
    bound = model_of(art_server).bind(**options)
    assert sampled(art_server, ask(here)).items() >= options.items()
    assert sampled(art_server, ask(bound)).items() >= options.items()
    assert sampled(art_server, ask(model_of(art_server), **options)).items() >= options.items()
    nearer = model_of(art_server, temperature=0.1, stop=["a"]).bind(temperature=0.2, stop=["b"])
    asked = sampled(art_server, ask(nearer, temperature=0.3))
    assert (asked["temperature"], asked["stop"]) == (0.3, ["b"])


@pytest.mark.parametrize("path", ["generate", "agenerate"])
def test_each_of_several_choices_is_a_call(art_server: Any, path: str) -> None:
    model = model_of(art_server, n=3, logprobs=True)
    if path == "generate":
        result = model.generate([[HumanMessage("hi")]])
    else:
        result = asyncio.run(model.agenerate([[HumanMessage("hi")]]))
    replies = [generation.message for generation in result.generations[0]]
    ids = [reply.response_metadata["call_id"] for reply in replies]
    assert ids == [ids[0], f"{ids[0]}:1", f"{ids[0]}:2"]
    for reply in replies:
        record = recorded(art_server, reply)
        told = reply.response_metadata["logprobs"]["content"]
        assert record["reply"]["content"] == reply.content
        assert [one["logprob"] for one in told] == record["logprobs"]
        assert reply.response_metadata["finish_reason"] == record["finish_reason"]
        assert reply.response_metadata["model_name"] == record["model"]


@pytest.mark.parametrize("how", [streamed, astreamed])
def test_several_choices_are_no_stream(art_server: Any, how: Ask) -> None:
    with pytest.raises(ConfigError, match=r"n=2.*disable_streaming"):
        how(model_of(art_server, n=2))
    with pytest.raises(ConfigError, match="n=3"):
        how(model_of(art_server), n=3)
    whole = how(model_of(art_server, n=2, disable_streaming=True))
    assert whole.text == recorded(art_server, whole)["reply"]["content"]


def test_where_and_how_to_send_is_configurable_too() -> None:
    fields = {
        "openai_api_base": ConfigurableField(id="base_url"),
        "openai_api_key": ConfigurableField(id="api_key"),
        "max_retries": ConfigurableField(id="max_retries"),
    }
    with RawServer() as first, RawServer() as second:
        model = ChatART(model="m", base_url=first.base_url).configurable_fields(**fields)
        for ask in PATHS.values():
            second.answers = [refusal(503)]
            there = {"base_url": second.base_url, "api_key": "other", "max_retries": 0}
            with pytest.raises(openai.InternalServerError):
                ask(model, {"configurable": there})
        assert not first.seen
        assert {seen.headers["authorization"] for seen in second.seen} == {"Bearer other"}
        assert len(second.seen) == len(PATHS)


def test_the_turn_after_a_sampled_call_is_taken(rule_server: Any) -> None:
    model = model_of(rule_server, max_tokens=200).bind_tools([look])
    for value in ("1e400", '"\\ud800"', "NaN", "1e308", '"\\ud83d\\ude00"'):
        call = f'<tool_call>\n{{"name": "look", "arguments": {{"at": {value}}}}}\n</tool_call>'
        reply = model.invoke(f"⟦{call}⟧")
        results = [ToolMessage("a door", tool_call_id=one["id"]) for one in reply.tool_calls]
        assert bool(results) is (value in ("1e308", '"\\ud83d\\ude00"'))
        again = model.invoke([("user", "?"), reply, *results, ("user", "⟦on⟧")])
        assert again.text == "on"


#: Beyond the context by tokens, and by bytes before any is counted.
PROMPTS = ("word " * 30_000, "word " * 300_000)


def both_models(server: RuleServer) -> list[Any]:
    given: dict[str, Any] = {"base_url": server.base_url, "api_key": "x", "model": "tiny"}
    return [ChatART(**given), ChatOpenAI(**given)]


async def test_a_prompt_that_is_too_long_is_langchains_error(rule_server: RuleServer) -> None:
    long: Any = {"name": "look", "description": "word " * 30_000, "parameters": {}}
    for model in both_models(rule_server):
        tooled = model.bind_tools([{"type": "function", "function": long}])
        calls: list[Callable[[Any], Any]] = [model.invoke, model.bind(stop=["x"]).invoke]
        calls += [lambda prompt, model=model: list(model.stream(prompt))]
        asked = [(call, prompt) for prompt in PROMPTS for call in calls]
        for call, prompt in [*asked, (tooled.invoke, "Hi")]:
            with pytest.raises(ContextOverflowError, match="prompt is too long") as raised:
                call(prompt)
            assert getattr(raised.value, "code", None) == "context_length_exceeded"
    with pytest.raises(ContextOverflowError):
        await both_models(rule_server)[0].ainvoke(PROMPTS[0])
    with pytest.raises(ContextOverflowError):
        [chunk async for chunk in both_models(rule_server)[0].astream(PROMPTS[0])]


def test_a_deep_agent_summarises(rule_server: RuleServer) -> None:
    from deepagents import create_deep_agent

    agent = create_deep_agent(both_models(rule_server)[0], [])
    old = [("user", "word " * 750), ("assistant", "ok")] * 6  # 18,000 tokens
    recent = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    said: Any = agent.invoke({"messages": [*old, *recent, ("user", script("a door"))]})  # type: ignore[arg-type]
    assert said["messages"][-1].text == "a door"
    asked = [one["messages"] for one in rule_server.witnessed()][-1]
    assert "summary" in str(asked).lower() and len(str(asked)) < 30_000
