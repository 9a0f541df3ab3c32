"""A prompt that is too long is LangChain's ContextOverflowError, so agents can shorten it."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from langchain_art import ChatART
from tests.conformance.suite.scripts import script
from tests.support.live_server import RuleServer

CALLS: dict[str, Callable[[Any, Any], object]] = {
    "invoke": lambda model, prompt: model.invoke(prompt),
    "stream": lambda model, prompt: list(model.stream(prompt)),
    "bound": lambda model, prompt: model.bind(stop=["x"]).invoke(prompt),
}
#: Beyond the context by tokens, and by bytes before any is counted.
PROMPTS = {"tokens": "word " * 30_000, "bytes": "word " * 300_000}


def models(server: RuleServer) -> dict[str, Any]:
    given: dict[str, Any] = {"base_url": server.base_url, "api_key": "x", "model": "tiny"}
    return {"ChatART": ChatART(**given), "ChatOpenAI": ChatOpenAI(**given)}


@pytest.mark.parametrize("name", ["ChatART", "ChatOpenAI"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call(rule_server: RuleServer, name: str, prompt: str, call: str) -> None:
    with pytest.raises(ContextOverflowError, match="prompt is too long") as raised:
        CALLS[call](models(rule_server)[name], PROMPTS[prompt])
    assert getattr(raised.value, "code", None) == "context_length_exceeded"


async def test_asynchronous_calls_and_tools(rule_server: RuleServer) -> None:
    model = models(rule_server)["ChatART"]

    @tool(description="word " * 30_000)
    def look() -> str:
        return "a door"

    with pytest.raises(ContextOverflowError):
        await model.bind_tools([look]).ainvoke("Hi")
    with pytest.raises(ContextOverflowError):
        [chunk async for chunk in model.astream(PROMPTS["tokens"])]


def test_a_deep_agent_summarises(rule_server: RuleServer) -> None:
    from deepagents import create_deep_agent

    agent = create_deep_agent(models(rule_server)["ChatART"], [])
    old = [("user", "word " * 750), ("assistant", "ok")] * 6  # 18,000 tokens
    recent = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    said: Any = agent.invoke({"messages": [*old, *recent, ("user", script("a door"))]})  # type: ignore[arg-type]
    assert said["messages"][-1].text == "a door"
    asked = [one["messages"] for one in rule_server.witnessed()][-1]
    assert "summary" in str(asked).lower() and len(str(asked)) < 30_000
