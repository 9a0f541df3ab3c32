"""The options of a ChatART, and LangChain's ways to set them, against a real server."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.runnables import ConfigurableField, Runnable

from langchain_art import ChatART, capture
from langchain_art.errors import ConfigError
from tests.conformance.suite.tools import look
from tests.support.chat_models import model_of, recorded
from tests.support.raw_server import RawServer, refusal

Ask = Callable[..., AIMessage]


def streamed(model: Runnable[Any, Any], *args: Any, **kwargs: Any) -> AIMessageChunk:
    chunks = list(model.stream("hi", *args, **kwargs))
    return sum(chunks[1:], chunks[0])


def astreamed(model: Runnable[Any, Any], *args: Any, **kwargs: Any) -> AIMessageChunk:
    async def gather() -> AIMessageChunk:
        chunks = [chunk async for chunk in model.astream("hi", *args, **kwargs)]
        return sum(chunks[1:], chunks[0])

    return asyncio.run(gather())


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


# ---- options of a call


def test_options_reach_the_server_from_wherever_they_are_set(art_server: Any, ask: Ask) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["\n"]}
    here = model_of(art_server, **options)
    bound = model_of(art_server).bind(**options)
    assert sampled(art_server, ask(here)).items() >= options.items()
    assert sampled(art_server, ask(bound)).items() >= options.items()
    assert sampled(art_server, ask(model_of(art_server), **options)).items() >= options.items()


def test_what_is_nearer_to_the_call_wins(art_server: Any, ask: Ask) -> None:
    model = model_of(art_server, temperature=0.1, stop=["a"]).bind(temperature=0.2, stop=["b"])
    asked = sampled(art_server, ask(model, temperature=0.3))
    assert (asked["temperature"], asked["stop"]) == (0.3, ["b"])


def test_a_seed_repeats_a_reply(art_server: Any, ask: Ask) -> None:
    model = model_of(art_server, max_tokens=24)
    said = [recorded(art_server, ask(model, seed=seed))["token_ids"] for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_a_reply_ends_before_a_stop(art_server: Any, ask: Ask) -> None:
    free = ask(model_of(art_server, seed=5, max_tokens=24))
    stop = free.text[len(free.text) // 2]
    reply = ask(model_of(art_server, seed=5, max_tokens=24, stop=[stop]))
    assert reply.text == free.text.partition(stop)[0]
    assert reply.response_metadata["finish_reason"] == "stop"


def test_logprobs(art_server: Any, ask: Ask) -> None:
    reply = ask(model_of(art_server, logprobs=True, top_logprobs=2))
    told = reply.response_metadata["logprobs"]["content"]
    record = recorded(art_server, reply)
    assert [one["logprob"] for one in told] == record["logprobs"]
    assert all(len(one["top_logprobs"]) == 2 for one in told)
    assert len(told) == len(record["token_ids"])


# ---- several answers to one request


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


# ---- wrappers


class Heard(BaseCallbackHandler):
    def __init__(self) -> None:
        self.runs: list[tuple[str, list[str], Any]] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.runs.append((kwargs["name"], kwargs["tags"], kwargs["metadata"]["mine"]))


def test_configurable_fields(art_server: Any, ask: Ask) -> None:
    model = model_of(art_server).configurable_fields(
        temperature=ConfigurableField(id="temperature"), model_name=ConfigurableField(id="model")
    )
    config = {"configurable": {"temperature": 0.25, "model": art_server.base_name}}
    reply = ask(model, config)
    assert sampled(art_server, reply)["temperature"] == 0.25
    assert reply.response_metadata["model_name"] == art_server.base_name
    with pytest.raises(openai.NotFoundError):
        ask(model, {"configurable": {"model": "no-such-model"}})


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


def test_with_retry(art_server: Any, ask: Ask) -> None:
    heard = Heard()
    broken = model_of(art_server).bind(model="no-such-model")
    model = broken.with_retry(stop_after_attempt=3, wait_exponential_jitter=False)
    with pytest.raises(openai.NotFoundError):
        ask(model, {"callbacks": [heard], "metadata": {"mine": 1}})
    # LangChain tries no stream again: what was said of it cannot be taken back.
    assert len(heard.runs) == (1 if ask in (streamed, astreamed) else 3)


def test_with_fallbacks(art_server: Any, ask: Ask) -> None:
    broken = model_of(art_server).bind(model="no-such-model")
    with capture() as run:
        reply = ask(broken.with_fallbacks([model_of(art_server)]))
    assert reply.response_metadata["model_name"].startswith(f"{art_server.policy}@")
    assert [turn.excluded_because for turn in run.turns] == ["error", None]
    assert run.turns[1].call_id == reply.response_metadata["call_id"]


@pytest.mark.parametrize("value", ["1e400", '"\\ud800"', "NaN", "1e308", '"\\ud83d\\ude00"'])
def test_the_turn_after_a_sampled_call_is_taken(rule_server: Any, value: str) -> None:
    model = model_of(rule_server, max_tokens=200).bind_tools([look])
    call = f'<tool_call>\n{{"name": "look", "arguments": {{"at": {value}}}}}\n</tool_call>'
    reply = model.invoke(f"⟦{call}⟧")
    results = [ToolMessage("a door", tool_call_id=one["id"]) for one in reply.tool_calls]
    assert bool(results) is (value in ("1e308", '"\\ud83d\\ude00"'))
    again = model.invoke([("user", "?"), reply, *results, ("user", "⟦on⟧")])
    assert again.text == "on"
