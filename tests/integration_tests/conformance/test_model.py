"""The conformance model on our own server: it says scripts, and really samples."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from langchain_art import ArtClient, ChatART, TrainConfig, capture
from langchain_art.wire import LoraConfig
from tests.conformance.suite.model import BLOCK
from tests.conformance.suite.scripts import PAST_END, UNSCRIPTED, script
from tests.support.live_server import ForkedServer

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at it.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(server: ForkedServer) -> Iterator[ArtClient]:
    with ArtClient(server.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def sdk(server: ForkedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(sdk: openai.OpenAI, *messages: Any, model: str = "tiny", **options: Any) -> Any:
    return sdk.chat.completions.create(model=model, messages=list(messages), **options)


def test_it_says_one_step_after_the_other(sdk: openai.OpenAI) -> None:
    call: Any = {"say": "So", "call": "look", "args": {"what": 'a "red" dör ⟦¦⟧ ⁑4'}}
    history: list[Any] = [user(script("It is Monday, née Sunday.", call, "I saw: {last}!"))]
    first = ask(sdk, *history, tools=[LOOK]).choices[0]
    assert (first.message.content, first.finish_reason) == ("It is Monday, née Sunday.", "stop")
    history += [first.message.model_dump(exclude_none=True), user("And?")]
    second = ask(sdk, *history, tools=[LOOK]).choices[0]
    assert (second.message.content, second.finish_reason) == ("So", "tool_calls")
    (made,) = second.message.tool_calls
    assert made.function.name == "look" and json.loads(made.function.arguments) == call["args"]
    history += [
        second.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.id, "content": "a door ⁑0"},
    ]
    third = ask(sdk, *history, tools=[LOOK]).choices[0].message
    assert third.content == "I saw: a door ⁑0!"
    history += [third.model_dump(exclude_none=True), user("More.")]
    assert ask(sdk, *history, tools=[LOOK]).choices[0].message.content == PAST_END
    history += [user(script("newer")), user("which of them?")]
    assert ask(sdk, *history).choices[0].message.content == "newer"
    assert ask(sdk, user("Hello")).choices[0].message.content == UNSCRIPTED


def test_a_script_may_quote_another(sdk: openai.OpenAI) -> None:
    inner = script("so", "{last}", {"call": "look"}, intro="Do it.")
    asked = user(script({"call": "look", "args": {"what": inner}}))
    (made,) = ask(sdk, asked, tools=[LOOK]).choices[0].message.tool_calls
    quoted = json.loads(made.function.arguments)["what"]
    assert quoted == inner
    assert ask(sdk, user(quoted)).choices[0].message.content == "so"


def test_streams_say_the_same(sdk: openai.OpenAI) -> None:
    asked = user(
        script({"say": "Well, né", "calls": [{"call": "look", "args": {"what": "it"}}] * 2})
    )
    chunks = [c.choices[0] for c in ask(sdk, asked, tools=[LOOK], stream=True) if c.choices]
    assert "".join(c.delta.content or "" for c in chunks) == "Well, né"
    calls = [call for c in chunks for call in c.delta.tool_calls or []]
    assert {call.index for call in calls} == {0, 1}
    for index in (0, 1):
        mine = [call.function for call in calls if call.index == index]
        assert "".join(f.name or "" for f in mine) == "look"
        assert json.loads("".join(f.arguments or "" for f in mine)) == {"what": "it"}


def test_two_calls_of_one_prompt_sample_other_tokens(sdk: openai.OpenAI, client: ArtClient) -> None:
    said = "forty letters that are drawn one by one."
    records = [client.call(ask(sdk, user(script(said))).id) for _ in range(2)]
    one, other = (record["token_ids"] for record in records)
    assert len(one) == len(other) == len(said) + 1
    assert one != other  # by chance equal once in 2^40
    assert records[0]["prompt_token_ids"] == records[1]["prompt_token_ids"]
    for record in records:
        *texts, end = record["logprobs"]
        assert texts == pytest.approx([-math.log(2)] * len(said), abs=1e-5)
        assert end == pytest.approx(0, abs=1e-5)


def test_a_long_prompt(sdk: openai.OpenAI) -> None:
    answer = ask(sdk, user("The door is red. " * 1000 + script("a door")))
    assert answer.choices[0].message.content == "a door"
    assert answer.usage.prompt_tokens > 6000


def test_schemas_and_forced_calls_hold_what_the_script_says(sdk: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"safe": {"type": "boolean"}},
        "required": ["safe"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "v", "schema": schema}}
    said = ask(sdk, user(script('{"safe": true}')), response_format=form)
    assert json.loads(said.choices[0].message.content) == {"safe": True}
    forced = ask(
        sdk,
        user(script({"call": "look", "args": {"what": "x"}})),
        tools=[LOOK],
        tool_choice="required",
    )
    (made,) = forced.choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == {"what": "x"}


def test_what_cannot_be_said_is_refused(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not this ⟦"):
        ask(sdk, user(script({"error": "not this ⟦"})))
    with pytest.raises(openai.BadRequestError, match=f"{BLOCK} bytes long, expected less"):
        ask(sdk, user(script("x" * BLOCK)))
    longest = "x" * (BLOCK - 1)
    assert ask(sdk, user(script(longest))).choices[0].message.content == longest


def test_training_leaves_the_scripts_as_they_are(
    server: ForkedServer, client: ArtClient, sdk: openai.OpenAI
) -> None:
    policy = client.create_policy(f"p-{uuid.uuid4().hex[:8]}", LoraConfig(rank=16)).name
    model = ChatART(model=policy, base_url=server.base_url)
    asked = script("It is Monday, I think.")
    for version in range(1, 3):
        runs: list[str] = []
        for reward in (0.0, 1.0):
            with capture(scenario="x") as run:
                model.invoke(asked)
            run.reward = reward
            client.post_trajectory(run.trajectory())
            runs.append(run.id)
        result = client.wait(client.train([runs], policy, TrainConfig(learning_rate=1e-5)))
        assert (result.version, result.excluded) == (version, {})
        assert result.metrics["grad_norm"] > 0
    for _ in range(3):
        answer = ask(sdk, user(asked), model=policy)
        assert answer.choices[0].message.content == "It is Monday, I think."
