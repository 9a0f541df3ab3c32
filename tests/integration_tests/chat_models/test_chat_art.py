"""ChatART against a real server: what goes out, what comes back, on all four paths."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, InvalidToolCall
from pydantic import BaseModel

from langchain_art import ChatART, capture
from langchain_art.wire import CallTags
from tests.support.chat_models import model_of, recorded


def known(tags: dict[str, Any]) -> dict[str, Any]:
    """Tags as the server keeps them, without the fields that were not said."""
    return CallTags(**tags).model_dump(mode="json", exclude_defaults=True)


def payload(model: ChatART, messages: Any = "hi", **kwargs: Any) -> dict[str, Any]:
    return model._get_request_payload(messages, **kwargs)


async def merged(chunks: AsyncIterator[AIMessageChunk]) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    async for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


def check_reply(server: Any, message: AIMessage) -> None:
    metadata = message.response_metadata
    assert metadata["call_id"].startswith("chatcmpl-")
    assert len(metadata["call_id"]) < 64  # merging chunks did not join it to itself
    assert metadata["model_name"].startswith(f"{server.policy}@")
    assert metadata["model_name"].count("@") == 1
    assert metadata["model_provider"] == "art"
    assert metadata["finish_reason"] in ("stop", "length", "tool_calls")
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] > 0
    record = recorded(server, message)
    assert record["model"] == metadata["model_name"]
    assert len(record["token_ids"]) == len(record["logprobs"])
    assert "logprobs" not in {k for k, v in metadata.items() if v}


# ---- four paths


def test_stream(art_server: Any) -> None:
    chunks = list(model_of(art_server).stream("hi"))
    named = [chunk for chunk in chunks if "call_id" in chunk.response_metadata]
    assert named == chunks[:1]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    check_reply(art_server, whole)


async def test_ainvoke_and_astream(art_server: Any) -> None:
    model = model_of(art_server)
    check_reply(art_server, await model.ainvoke("hi"))
    check_reply(art_server, await merged(model.astream("hi")))


def test_v3_events_keep_the_call_id(art_server: Any) -> None:
    stream = model_of(art_server).stream_events("hi", version="v3")
    message = stream.output
    assert message.response_metadata["call_id"].startswith("chatcmpl-")
    assert recorded(art_server, message)["token_ids"]


def test_a_closed_stream_harms_nothing(art_server: Any) -> None:
    model = model_of(art_server)
    stream = model.stream("hi")
    next(stream)
    stream.close()
    check_reply(art_server, model.invoke("hi"))


async def test_closing_one_models_client_leaves_the_others(art_server: Any) -> None:
    one, other = model_of(art_server), model_of(art_server)
    await one.ainvoke("hi")
    await one.root_async_client.close()
    await other.ainvoke("hi")
    await one.ainvoke("hi")


# ---- tools, structured output


class Tree(BaseModel):
    """A tree."""

    right: bool
    branches: list[Tree] = []


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_recursive_structured_output(art_server: Any, method: Any) -> None:
    model = model_of(art_server, max_tokens=200, seed=1).with_structured_output(
        Tree, method=method, include_raw=True
    )
    for told in await model.abatch([f"{number}?" for number in range(4)]):
        assert told["parsing_error"] is None
        assert told["parsed"].branches, "or the seed shows nothing"


class Long(BaseModel):
    """Longer than two tokens."""

    first_long_name: str
    second_long_name: str


def test_a_cut_off_reply_is_kept(art_server: Any) -> None:
    model = model_of(art_server, max_tokens=2)
    with capture() as run:
        out = model.with_structured_output(Long, include_raw=True).invoke("?")
    assert out["parsed"] is None
    assert out["parsing_error"] is not None
    assert out["raw"].response_metadata["finish_reason"] == "length"
    assert run.turns[0].call_id == out["raw"].response_metadata["call_id"]


# ---- what is sent


def test_nothing_is_asked_for_that_the_server_keeps_anyway() -> None:
    sent = payload(ChatART(model="m"))
    assert "logprobs" not in sent
    assert "extra_body" not in sent
    assert "temperature" not in sent


def test_temperature_survives_any_name() -> None:
    assert payload(ChatART(model="gpt-5-local", temperature=0.3))["temperature"] == 0.3
    assert "temperature" not in payload(ChatART(model="o1-local"))


@pytest.mark.parametrize("name", ["codex-mini", "gpt-5-pro", "gpt-6"])
def test_never_the_responses_api(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_OUTPUT_VERSION", "responses/v1")
    model = ChatART(model=name, reasoning={"effort": "low"})
    assert "messages" in payload(model, tools=[{"type": "function"}])


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


def test_environment_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_PROXY", "http://proxy:1")
    model = ChatART(model="m")
    assert model.openai_api_base == "http://localhost:8000/v1"
    assert model.openai_api_key is not None
    assert model.stream_usage is True
    assert model.stream_chunk_timeout is None
    assert model.cache is False
    assert model.profile is not None
    assert model.profile["structured_output"] is True
    assert model._get_ls_params()["ls_provider"] == "art"
    assert model._get_ls_params(model="other")["ls_model_name"] == "other"
    assert model.metadata is not None
    assert {"langchain-art", "langchain-openai"} <= model.metadata["lc_versions"].keys()


def test_counts_tokens_without_a_download() -> None:
    assert ChatART(model="m").get_num_tokens_from_messages([HumanMessage("four words of text")]) > 3


# ---- tags


async def test_tags_in_a_scope_on_all_paths(art_server: Any) -> None:
    model = model_of(art_server)
    with capture(scenario="q", id="run-1") as run:
        replies = [model.invoke("a"), await model.ainvoke("b")]
        streamed = [chunk for chunk in model.stream("c") if "call_id" in chunk.response_metadata]
        replies += [*streamed, await merged(model.astream("d"))]
        replies.append(model.stream_events("e", version="v3").output)
        replies.append(await (await model.astream_events("f", version="v3")))
    after = model.invoke("g")
    for reply in replies:
        assert known(recorded(art_server, reply)["tags"]) == {
            "trajectory_id": run.id,
            "scenario": "q",
        }
    assert known(recorded(art_server, after)["tags"]) == {}
    assert [t.call_id for t in run.turns] == [r.response_metadata["call_id"] for r in replies]


def test_a_users_own_tags_win(art_server: Any) -> None:
    model = model_of(art_server).bind(extra_body={"art": {"node": "mine"}})
    with capture(id="run-2"):
        tags = known(recorded(art_server, model.invoke("a"))["tags"])
    assert tags == {"trajectory_id": "run-2", "node": "mine"}


# ---- errors


def test_the_servers_errors_come_through(art_server: Any) -> None:
    model = model_of(art_server).model_copy(update={"model_name": "no-such-model"})
    with pytest.raises(openai.NotFoundError) as caught:
        model.invoke("hi")
    assert caught.value.code == "model_not_found"
    with capture() as run, pytest.raises(openai.NotFoundError):
        list(model.stream("hi"))
    turn = run.turns[0]
    assert turn.excluded_because == "error"
    assert turn.error is not None
    assert turn.reply is None
