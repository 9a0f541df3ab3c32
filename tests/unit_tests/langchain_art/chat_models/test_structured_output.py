from __future__ import annotations

import json
import re
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, RootModel
from typing_extensions import TypedDict

from langchain_art import ChatART
from langchain_art.chat_models.structured_output import openai_tool, response_format
from langchain_art.errors import ConfigError


class Node(BaseModel):
    """A tree."""

    name: str
    children: list[Node] = []


class Left(BaseModel):
    right: Right | None = None


class Right(BaseModel):
    left: Left | None = None


class Holder(BaseModel):
    by_name: dict[str, Node]


class Forest(RootModel[list[Node]]):
    pass


class Leaf(BaseModel):
    value: int


class Plain(BaseModel):
    leaf: Leaf


class Typed(TypedDict):
    """A tree."""

    children: list[Typed]


def plant(tree: Node) -> str:
    """Plant a tree."""
    return tree.name


def holes(schema: Any) -> int:
    """Empty schemas, which allow anything."""
    if isinstance(schema, dict):
        named = [schema.get(key) for key in ("items", "additionalProperties")]
        named += [*schema.get("properties", {}).values(), *schema.get("anyOf", [])]
        return sum(one == {} for one in named) + sum(map(holes, schema.values()))
    return sum(map(holes, schema)) if isinstance(schema, list) else 0


@pytest.mark.parametrize(
    ("schema", "strict"),
    [*((kind, None) for kind in (Node, Left, Holder, Forest)), (Node, True), (Left, True)],
)
def test_a_recursive_class_is_sent_whole(schema: Any, strict: bool | None) -> None:
    model = ChatART(model="p")
    bound: Any = model.with_structured_output(schema, strict=strict)
    sent = model._get_request_payload("?", **bound.first.kwargs)["extra_body"]["response_format"]
    told = sent["json_schema"]["schema"]
    assert holes(told) == 0 and "$defs" in told and "$ref" not in told
    assert told.get("type") == schema.model_json_schema().get("type", "object")
    assert sent["json_schema"]["name"] == schema.__name__
    if strict and schema is Node:
        assert told["$defs"]["Node"]["additionalProperties"] is False
        assert told["required"] == ["name", "children"]


@pytest.mark.parametrize(
    "tool",
    [
        Node,
        plant,
        StructuredTool.from_function(plant),
        StructuredTool(name="x", description="y", args_schema=Holder.model_json_schema()),
        {"type": "function", "function": {"name": "x", "parameters": Node.model_json_schema()}},
    ],
)
def test_a_recursive_tool_is_sent_whole(tool: Any) -> None:
    bound: Any = ChatART(model="p").bind_tools([tool])
    assert holes(bound.kwargs["tools"]) == 0
    assert "$defs" in bound.kwargs["tools"][0]["function"]["parameters"]


def test_in_a_tool_call_and_in_an_agent() -> None:
    model = ChatART(model="p")
    chain: Any = model.with_structured_output(Node, method="function_calling")
    assert holes(chain.first.kwargs["tools"]) == 0
    beside: Any = model.with_structured_output(Leaf, tools=[plant])
    assert holes(beside.first.kwargs["tools"]) == 0
    asked: list[Any] = []

    class Asked(ChatART):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            asked.extend(kwargs["tools"])
            raise InterruptedError

    with pytest.raises(InterruptedError):
        create_agent(Asked(model="p"), [], response_format=ToolStrategy(Node)).invoke(
            {"messages": [HumanMessage("?")]}
        )
    assert holes(asked) == 0 and len(asked) == 1


@pytest.mark.parametrize(
    "tool", [Plain, convert_to_openai_tool(Plain), StructuredTool.from_function(holes)]
)
def test_others_are_sent_as_langchain_sends_them(tool: Any) -> None:
    assert openai_tool(tool) == convert_to_openai_tool(tool)


def test_a_json_schema_without_properties_is_sent_whole() -> None:
    either = {"title": "Either", "anyOf": [{"type": "string"}, {"type": "integer"}]}
    told = response_format(either)["json_schema"]
    assert told == {"name": "Either", "schema": {"anyOf": either["anyOf"]}}


@pytest.mark.parametrize("definitions", ["$defs", "definitions"])
def test_a_json_schema_whose_root_is_a_reference_is_that(definitions: str) -> None:
    whole = json.loads(json.dumps(Node.model_json_schema()).replace("$defs", definitions))
    bound: Any = ChatART(model="p").with_structured_output({"title": "Tree", **whole})
    told = bound.first.kwargs["response_format"]["json_schema"]
    root = {k: v for k, v in whole[definitions]["Node"].items() if k in ("properties", "required")}
    assert told["name"] == "Tree"
    assert told["schema"] == {definitions: whole[definitions], "type": "object", **root}


def test_a_recursive_typed_dict_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"TypedDict 'Typed', which holds itself.*pydantic"):
        ChatART(model="p").with_structured_output(Typed)
    with pytest.raises(ConfigError, match="TypedDict 'Typed'"):
        ChatART(model="p").bind_tools([Typed])


class Mail(TypedDict):
    """A mail."""

    sender: str
    subject: str


class Told(BaseModel):
    """A mail."""

    sender: str
    subject: str


WHOLE = '{"sender": "a", "subject": "b"}'
CUT = WHOLE[:-10]
CALLED = [{"name": "Told", "args": json.loads(WHOLE), "id": "1"}]


class Says(ChatART):
    """Gives one reply, whole or in chunks."""

    said: Any = None

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.said)])

    def _stream(self, *args: Any, **kwargs: Any) -> Any:
        for piece in self.said.content:
            yield ChatGenerationChunk(message=AIMessageChunk(piece))
        last = AIMessageChunk("", response_metadata=self.said.response_metadata)
        last.usage_metadata = self.said.usage_metadata
        yield ChatGenerationChunk(message=last)

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        return self._generate()

    async def _astream(self, *args: Any, **kwargs: Any) -> Any:
        for chunk in self._stream():
            yield chunk


def says(content: str, reason: str, **more: Any) -> Says:
    usage: Any = {"input_tokens": 5, "output_tokens": 12, "total_tokens": 17}
    metadata = {"finish_reason": reason}
    said = AIMessage(content, response_metadata=metadata, usage_metadata=usage, **more)
    return Says(model="p", said=said)


METHODS: Any = ["json_schema", "function_calling", "json_mode"]
IS_CUT = r"reply was cut off at 12 tokens.*max_tokens"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Told, Mail])
def test_a_cut_reply_is_told_as_cut(schema: Any, method: Any) -> None:
    model = says(CUT, "length")
    with pytest.raises(OutputParserException, match=IS_CUT):
        model.with_structured_output(schema, method=method).invoke("?")
    raw: Any = model.with_structured_output(schema, method=method, include_raw=True).invoke("?")
    assert raw["raw"].content == CUT and raw["parsed"] is None
    assert re.search(IS_CUT, str(raw["parsing_error"]))


@pytest.mark.parametrize("method", METHODS)
async def test_a_cut_stream_is_told_as_cut_at_its_end(method: Any) -> None:
    chain = says(CUT, "length").with_structured_output(Mail, method=method)
    seen: list[Any] = []
    with pytest.raises(OutputParserException, match=IS_CUT):
        for part in chain.stream("?"):
            seen.append(part)
    assert method == "function_calling" or {"sender": "a"} in seen
    with pytest.raises(OutputParserException, match=IS_CUT):
        [part async for part in chain.astream("?")]
    batch = await chain.abatch(["?", "?"], return_exceptions=True)
    assert [type(one) for one in batch] == [OutputParserException] * 2


def test_what_was_cut_in_the_reasoning_is_told_as_cut() -> None:
    model = says("", "length", additional_kwargs={"reasoning_content": "hm"})
    with pytest.raises(OutputParserException, match=IS_CUT):
        model.with_structured_output(Told).invoke("?")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("json_schema", says(WHOLE, "length")),
        ("json_mode", says(f"```json\n{WHOLE}\n```", "length")),
        ("function_calling", says("", "length", tool_calls=CALLED)),
        ("json_schema", says(WHOLE, "stop")),
    ],
)
def test_a_whole_reply_at_the_limit_is_parsed(method: Any, said: Says) -> None:
    assert said.with_structured_output(Told, method=method).invoke("?") == Told(**CALLED[0]["args"])


@pytest.mark.parametrize("schema", [Told, Mail])
@pytest.mark.parametrize("content", ["", "I look it up."])
async def test_a_tool_that_is_called_instead_is_no_fault(schema: Any, content: str) -> None:
    called = [{"name": "plant", "args": {}, "id": "1", "type": "tool_call"}]
    model = says(content, "tool_calls", tool_calls=called)
    chain: Any = model.with_structured_output(schema, tools=[plant])
    assert chain.invoke("?") is None and await chain.ainvoke("?") is None
    whole: Any = model.with_structured_output(schema, tools=[plant], include_raw=True)
    for told in (whole.invoke("?"), await whole.ainvoke("?")):
        assert told["raw"].tool_calls == called
        assert (told["parsed"], told["parsing_error"]) == (None, None)


def test_another_fault_keeps_the_parsers_words() -> None:
    with pytest.raises(OutputParserException, match="Field required"):
        says('{"sender": "a"}', "stop").with_structured_output(Told).invoke("?")
