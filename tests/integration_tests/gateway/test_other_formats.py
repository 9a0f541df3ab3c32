"""Calls in OpenAI's Responses and Anthropic's Messages, as both SDKs speak them: one capture."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

from langchain_art import ArtClient, capture, gather, gather_sync
from langchain_art.errors import PermissionDenied, RolloutFailed
from langchain_art.wire.api_keys import RunKey, new_api_key
from tests.conformance.suite.scripts import script
from tests.support.live_server import ForkedServer, LiveServer, RuleServer
from tests.support.soak import in_soak_alone

SYSTEM, QUESTION = "Be short.", "When is the falcon review?"
LOOK = {"name": "look", "description": "Look at something."}
SCHEMA = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
THOUGHT, REST = "\nA door, or two.\n", "\n\nI look."


@dataclass
class Said:
    """A reply in no format: the call's id, and what a client reads."""

    call: str
    text: str = ""
    thought: str | None = None
    tools: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    cut: bool = False


def chat(server: LiveServer, turns: list[Any], stream: bool, **options: Any) -> Said:
    """Turns are a user's text, a `Said`, or the result of the tool that was called last."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn, before in zip(turns, [None, *turns], strict=False):
        if isinstance(turn, Said):
            content = turn.text
            if turn.thought is not None:
                content = f"<think>{turn.thought}</think>{turn.text}"
            functions = [{"name": n, "arguments": json.dumps(given)} for n, given in turn.tools]
            calls = [
                {"id": f"call_{one['name']}", "type": "function", "function": one}
                for one in functions
            ]
            made = {"role": "assistant", "content": content or None}
            messages.append(made | {"tool_calls": calls} if calls else made)
        elif isinstance(before, Said) and before.tools:
            result = {"tool_call_id": f"call_{before.tools[-1][0]}", "content": turn}
            messages.append({"role": "tool"} | result)
        else:
            messages.append({"role": "user", "content": turn})
    if options.pop("look", False):
        function = LOOK | {"parameters": SCHEMA}
        options["tools"] = [{"type": "function", "function": function}]
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    if not stream:
        reply: Any = client.chat.completions.create(model="tiny", messages=messages, **options)
    else:
        with client.chat.completions.stream(model="tiny", messages=messages, **options) as events:
            for _ in events:
                reply = events.current_completion_snapshot
    choice = reply.choices[0]
    text, thought = choice.message.content or "", None
    if text.startswith("<think>"):
        thought, _, text = text.removeprefix("<think>").partition("</think>")
    tools = [
        (one.function.name, json.loads(one.function.arguments))
        for one in choice.message.tool_calls or ()
        if one.type == "function"
    ]
    return Said(reply.id, text, thought, tools, choice.finish_reason == "length")


def responses(server: LiveServer, turns: list[Any], stream: bool, **options: Any) -> Said:
    items: list[Any] = []
    for turn, before in zip(turns, [None, *turns], strict=False):
        if isinstance(turn, Said):
            if turn.thought is not None:
                content = [{"type": "reasoning_text", "text": turn.thought}]
                items.append({"type": "reasoning", "id": "r", "summary": [], "content": content})
            if turn.text or not turn.tools:
                items.append({"role": "assistant", "content": turn.text})
            for name, arguments in turn.tools:
                call = {"call_id": f"call_{name}", "name": name}
                made = call | {"arguments": json.dumps(arguments)}
                items.append({"type": "function_call"} | made)
        elif isinstance(before, Said) and before.tools:
            result = {"call_id": f"call_{before.tools[-1][0]}", "output": turn}
            items.append({"type": "function_call_output"} | result)
        else:
            items.append({"role": "user", "content": [{"type": "input_text", "text": turn}]})
    if options.pop("look", False):
        options["tools"] = [{"type": "function", **LOOK, "parameters": SCHEMA}]
    options["max_output_tokens"] = options.pop("max_tokens")
    extra = {"seed": options.pop("seed", None)}
    asked = {"model": "tiny", "instructions": SYSTEM, "input": items, "extra_body": extra} | options
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    if not stream:
        reply = client.responses.create(**asked)
    else:
        with client.responses.stream(**asked) as events:
            seen = list(events)
        reply = seen[-1].response  # `get_final_response` wants one that was not cut
        assert [event.sequence_number for event in seen if hasattr(event, "sequence_number")]
        told = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
        assert told == reply.output_text
    said = Said(reply.id, reply.output_text, cut=reply.status == "incomplete")
    for item in reply.output:
        if item.type == "reasoning":
            assert item.content is not None
            said.thought = item.content[0].text
        elif item.type == "function_call":
            said.tools.append((item.name, json.loads(item.arguments)))
    return said


def in_anthropics(turns: list[Any]) -> list[Any]:
    sent: list[Any] = []
    for turn, before in zip(turns, [None, *turns], strict=False):
        if isinstance(turn, Said):
            content: list[Any] = []
            if turn.thought is not None:
                content.append({"type": "thinking", "thinking": turn.thought, "signature": ""})
            if turn.text:
                content.append({"type": "text", "text": turn.text})
            for name, arguments in turn.tools:
                used = {"id": f"call_{name}", "name": name, "input": arguments}
                content.append({"type": "tool_use"} | used)
            sent.append({"role": "assistant", "content": content})
        elif isinstance(before, Said) and before.tools:
            result = {"tool_use_id": f"call_{before.tools[-1][0]}", "content": turn}
            sent.append({"role": "user", "content": [{"type": "tool_result"} | result]})
        else:
            sent.append({"role": "user", "content": turn})
    return sent


def messages(server: LiveServer, turns: list[Any], stream: bool, **options: Any) -> Said:
    sent = in_anthropics(turns)
    if options.pop("look", False):
        options["tools"] = [LOOK | {"input_schema": SCHEMA}]
    extra = {name: options.pop(name, None) for name in ("seed", "temperature")}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {"model": "tiny", "system": SYSTEM, "messages": sent, "thinking": thinking} | options
    client = anthropic.Anthropic(base_url=server.root, api_key="none")
    if not stream:
        reply = client.messages.create(**asked, extra_body=extra)
    else:
        with client.messages.stream(**asked, extra_body=extra) as events:
            told = "".join(events.text_stream)
            reply = events.get_final_message()
        assert told == "".join(one.text for one in reply.content if one.type == "text")
    said = Said(reply.id, cut=reply.stop_reason == "max_tokens")
    for block in reply.content:
        if block.type == "text":
            said.text = block.text
        elif block.type == "thinking":
            said.thought = block.thinking
        elif block.type == "tool_use":
            said.tools.append((block.name, block.input))
    assert (reply.stop_reason == "tool_use") == bool(said.tools)
    return said


Ask = Callable[..., Said]
FORMATS: list[Ask] = [chat, responses, messages]


def calls_of(server: LiveServer, *said: Said) -> list[dict[str, Any]]:
    with server.http() as http:
        return [http.get(f"/v1/calls/{one.call}").json() for one in said]


@pytest.mark.parametrize(
    ("stream", "look"),
    [(True, True), (False, False), in_soak_alone(True, False), in_soak_alone(False, True)],
)
def test_one_conversation_has_the_same_tokens_in_each_format(
    art_server: LiveServer, stream: bool, look: bool
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "look": look}
    first = [ask(art_server, [QUESTION], stream, seed=3, **options) for ask in FORMATS]
    second = [
        ask(art_server, [QUESTION, before, "Go on."], stream, seed=4, **options)
        for ask, before in zip(FORMATS, first, strict=True)
    ]
    for replies in (first, second):
        tokens = [(c["prompt_token_ids"], c["token_ids"]) for c in calls_of(art_server, *replies)]
        assert tokens[0] == tokens[1] == tokens[2]
        assert len({(one.text, one.cut) for one in replies}) == 1
    for before, after in zip(first, second, strict=True):  # nothing was tokenised again
        shown, went_on = calls_of(art_server, before, after)
        sampled = shown["prompt_token_ids"] + shown["token_ids"]
        assert went_on["prompt_token_ids"][: len(sampled)] == sampled


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", FORMATS)
def test_thoughts_and_tool_calls_come_back_as_they_were_sampled(
    rule_server: RuleServer, ask: Ask, stream: bool
) -> None:
    call = {"call": "look", "args": {"what": "a door"}}
    steps = [call | {"say": f"<think>{THOUGHT}</think>{REST}"}, call, "A door."]
    options: dict[str, Any] = {"max_tokens": 200, "look": True, "temperature": 0.0}
    turns: list[Any] = [script(*steps)]
    told: list[Said] = []
    for result in ("It is open.", "It is shut.", None):
        told.append(ask(rule_server, turns, stream, **options))
        turns += [told[-1], result]
    assert [one.thought for one in told] == [THOUGHT, None, None]
    assert told[0].text.strip() == REST.strip() and told[2].text == "A door."
    assert [one.tools for one in told] == [[("look", {"what": "a door"})]] * 2 + [[]]
    records = calls_of(rule_server, *told)
    for before, after in pairwise(records):
        sampled = before["prompt_token_ids"] + before["token_ids"]
        assert after["prompt_token_ids"][: len(sampled)] == sampled


def test_a_response_continues_an_earlier_call_of_any_format(
    art_server: LiveServer, http: httpx.Client
) -> None:
    client = openai.OpenAI(base_url=art_server.base_url, api_key="none")
    asking: Any = {"model": "tiny", "input": "Go on.", "max_output_tokens": 4}
    for ask in FORMATS:
        before = ask(art_server, [QUESTION], False, max_tokens=8, seed=1)
        reply = client.responses.create(**asking, previous_response_id=before.call)
        asked = http.get(f"/v1/calls/{reply.id}").json()["request"]["messages"]
        roles = [one["role"] for one in asked]
        # Of a response, the instructions are not continued (OpenAI's reference).
        own = [] if ask is responses else ["system"]
        assert roles == [*own, "user", "assistant", "user"]
        assert asked[-2]["content"] == before.text
    before = client.responses.create(**asking, instructions="")  # nor are empty ones
    reply = client.responses.create(**asking, instructions=SYSTEM, previous_response_id=before.id)
    asked = http.get(f"/v1/calls/{reply.id}").json()["request"]["messages"]
    assert [one["role"] for one in asked] == ["system", "user", "assistant", "user"]
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        client.responses.create(**asking, previous_response_id="resp_none")


def test_the_tokens_of_a_prompt_are_counted_and_nothing_is_recorded(
    art_server: LiveServer, http: httpx.Client
) -> None:
    client = anthropic.Anthropic(base_url=art_server.root, api_key="none")
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}]}
    kept = http.get("/status").json()["calls"]
    counted = client.messages.count_tokens(**asked, system=SYSTEM)
    assert http.get("/status").json()["calls"] == kept
    reply = client.messages.create(**asked, system=SYSTEM, max_tokens=2)
    assert counted.input_tokens == reply.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_says_which_stop_sequence_ended_it(rule_server: RuleServer, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=rule_server.root, api_key="none")
    asked: Any = {"model": "tiny", "max_tokens": 50, "stop_sequences": ["door", " wall"]}
    for said, ended in (("A wall, a door", ("stop_sequence", " wall")), ("A", ("end_turn", None))):
        asked["messages"] = [{"role": "user", "content": script(said)}]
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        assert (message.stop_reason, message.stop_sequence) == ended
        assert [one.text for one in message.content if one.type == "text"] == ["A"]


def test_a_reply_without_a_block_comes_back_as_it_was_sampled(rule_server: RuleServer) -> None:
    client = anthropic.Anthropic(base_url=rule_server.root, api_key="none")
    said: list[Any] = [{"role": "user", "content": script("", "Yes.")}]
    empty = client.messages.create(model="tiny", max_tokens=50, messages=said)
    assert empty.content == []
    said += [{"role": "assistant", "content": empty.content}, {"role": "user", "content": "And?"}]
    reply = client.messages.create(model="tiny", max_tokens=50, messages=said)
    assert [one.text for one in reply.content if one.type == "text"] == ["Yes."]
    before, after = calls_of(rule_server, Said(empty.id), Said(reply.id))
    sampled = before["prompt_token_ids"] + before["token_ids"]
    assert after["prompt_token_ids"][: len(sampled)] == sampled


def test_replies_follow_a_schema_and_a_forced_tool(art_server: LiveServer) -> None:
    claude = anthropic.Anthropic(base_url=art_server.root, api_key="none")
    gpt = openai.OpenAI(base_url=art_server.base_url, api_key="none")
    ask: Any = [{"role": "user", "content": QUESTION}]
    schema = {"type": "object", "properties": {"what": {"enum": ["door", "wall"]}}}
    schema |= {"required": ["what"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "schema": schema}
    create: Any = partial(claude.messages.create, model="tiny", max_tokens=60, messages=ask)
    respond: Any = partial(gpt.responses.create, model="tiny", max_output_tokens=60, input=ask)
    message = create(output_config={"format": form})
    assert json.loads(message.content[0].text)["what"] in ("door", "wall")
    response = respond(text={"format": form | {"name": "look"}})
    assert json.loads(response.output_text)["what"] in ("door", "wall")
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        tools = [{"name": "look", "input_schema": schema}]
        assert create(tools=tools, tool_choice=choice).content[-1].type == "tool_use"
    named: Any = {"type": "function", "name": "look"}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in ("required", named, allowed):
        tools = [named | {"parameters": schema, "strict": True}]
        assert respond(tools=tools, tool_choice=choice).output[-1].type == "function_call"
    shown = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = respond(max_output_tokens=4, **shown).output
    logprobs = item.content[0].logprobs
    assert len(logprobs) == 4 and all(len(one.top_logprobs) == 2 for one in logprobs)


USER: dict[str, Any] = {"role": "user", "content": QUESTION}


def test_what_cannot_be_done_is_refused_by_its_name(http: httpx.Client) -> None:
    thinking = USER | {"content": [{"type": "thinking", "thinking": "x"}]}
    chat = {"model": "tiny", "messages": [USER], "max_tokens": 4}
    for path, changes, said in (
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"max_tokens": 0}, "max_tokens"),
        ("messages", {"tempreature": 1.0}, "temperature"),
        ("messages", {"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ("messages", {"stop_sequences": ["x" * 1025]}, "stop_sequences.0"),
        ("messages", {"mcp_servers": [{}]}, "mcp_servers"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ("messages", {"messages": [USER | {"content": [{"type": "image"}]}]}, "image"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ("messages", {"messages": [USER, {"role": "user", "content": []}]}, "messages.1.content"),
        ("messages", {"messages": [thinking]}, "in one of the assistant"),
        ("messages/count_tokens", {"stream": True, "max_tokens": None}, "stream"),
        ("responses", {"max_tokens": 4}, "max_tokens"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"background": True}, "background"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools.0"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "reasoning"),
    ):
        body = {"model": "tiny", "input": QUESTION} if path == "responses" else chat
        sent = {name: value for name, value in (body | changes).items() if value is not None}
        answer = http.post(f"/v1/{path}", json=sent)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
        assert answer.json().get("type") == (None if path == "responses" else "error")


def test_a_run_is_named_by_the_url(art_server: LiveServer, http: httpx.Client) -> None:
    run = f"r-{uuid.uuid4().hex}"
    claude = anthropic.Anthropic(base_url=f"{art_server.base_url}/runs/{run}", api_key="none")
    gpt = openai.OpenAI(base_url=f"{art_server.base_url}/runs/{run}", api_key="none")
    ask: Any = [{"role": "user", "content": QUESTION}]
    ids = [
        claude.messages.create(model="tiny", max_tokens=4, messages=ask).id,
        gpt.responses.create(model="tiny", max_output_tokens=4, input=ask).id,
        gpt.chat.completions.create(model="tiny", max_tokens=4, messages=ask).id,
    ]
    with pytest.raises(openai.BadRequestError, match="'other' in the tags"):
        tags = {"art": {"trajectory_id": "other"}}
        gpt.responses.create(model="tiny", input=ask, extra_body=tags)
    put = http.put(f"/v1/trajectories/{run}/reward", json={"reward": 1.0}).json()
    assert [turn["call_id"] for turn in put["turns"]] == ids
    assert http.post(f"/v1/runs/{run}/train", json={}).status_code == 404
    assert http.post(f"/v1/runs/{'x' * 300}/responses", json={"input": "x"}).status_code == 400


def test_a_run_is_named_by_its_key_alone(tmp_path: Path) -> None:
    key = new_api_key()
    with ForkedServer(tmp_path / "data", env={"ART_API_KEY": key}) as server:
        client = ArtClient(base_url=server.base_url, api_key=key)
        made = client.run_key("run-17", seconds=60)
        ask: Any = [{"role": "user", "content": QUESTION}]

        def call(key: str, url: str = server.root) -> str:
            claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
            return claude.messages.create(model="tiny", max_tokens=2, messages=ask).id

        first, second = call(made), call(made)
        assert [turn.call_id for turn in client.reward("run-17", 1.0).turns] == [first, second]
        with pytest.raises(anthropic.BadRequestError, match="'other' in the URL"):
            call(made, f"{server.base_url}/runs/other")
        with (
            ArtClient(base_url=server.base_url, api_key=made) as of_run,
            pytest.raises(PermissionDenied, match="scope"),
        ):
            of_run.reward("run-17", 0.0)
        past = RunKey.of(key, "run-17", time.time() - 1).text
        forged = made[:-1] + ("0" if made[-1] != "0" else "1")
        other = RunKey.of(new_api_key(), "run-17", time.time() + 60).text
        renamed = made.replace(made.split(".")[3], "cnVuLTE4")
        for wrong in (past, forged, other, renamed, "art-run.x"):
            with pytest.raises(anthropic.AuthenticationError):
                call(wrong)
        assert key not in server.log.read_text() and made not in server.log.read_text()


def test_a_streamed_reply_is_known_by_its_id_or_it_is_said(
    art_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0}
    gpt: dict[str, Any] = options | {"model": "tiny", "base_url": art_server.base_url}
    told = {"model_name": "tiny", "base_url": art_server.root, "max_tokens_to_sample": 4} | options
    for model, ours in (
        (ChatOpenAI(**gpt, max_tokens=4), True),
        (ChatOpenAI(**gpt, max_tokens=4, use_responses_api=True), True),
        (ChatAnthropic(**told, disable_streaming=True), True),
        (ChatAnthropic(**told), False),
    ):
        with capture() as run:
            list(model.stream(QUESTION))
        [turn] = run.turns
        assert turn.usage is not None and 0 < turn.usage.completion_tokens <= 4
        assert turn.ours is ours and ("disable_streaming=True" in caplog.text) is not ours


def test_a_client_that_keeps_connections_is_used_in_several_calls_from_one_thread(
    art_server: LiveServer,
) -> None:
    options: dict[str, Any] = {"model": "tiny", "api_key": "none", "max_tokens": 2}
    options |= {"base_url": art_server.base_url, "max_retries": 0}
    gpt = ChatOpenAI(**options)

    async def rollout(question: str) -> float:
        await gpt.ainvoke(question)
        return 1.0

    for _ in range(3):
        [group] = gather_sync(rollout, [QUESTION], group_size=2, max_failed=0).groups
        assert [run.status for run in group.trajectories] == ["completed"] * 2
    once = partial(gather, rollout, [QUESTION], group_size=2, max_failed=0)
    with pytest.raises(RolloutFailed, match=r"different event loop.* await all in one"):
        asyncio.run(once())
    gpt = ChatOpenAI(**options, timeout=60)
    asyncio.run(once())
    with pytest.raises(RolloutFailed, match=r"Event loop is closed.* await all in one"):
        asyncio.run(once())
