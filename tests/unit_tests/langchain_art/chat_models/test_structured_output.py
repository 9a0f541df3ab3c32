from __future__ import annotations

import json
import re
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk
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
    ("schema", "strict"), [(Node, None), (Left, None), (Holder, None), (Forest, None), (Node, True)]
)
def test_a_recursive_class_is_sent_whole(schema: Any, strict: bool | None) -> None:
    model = ChatART(model="p")
    bound: Any = model.with_structured_output(schema, strict=strict)
    sent = model._get_request_payload("?", **bound.first.kwargs)["extra_body"]["response_format"]
    told = sent["json_schema"]["schema"]
    assert holes(told) == 0 and "$defs" in told and "$ref" not in told
    assert told.get("type") == schema.model_json_schema().get("type", "object")
    assert sent["json_schema"]["name"] == schema.__name__
    if strict:
        assert told["$defs"]["Node"]["additionalProperties"] is False
        assert told["required"] == ["name", "children"]


def test_a_recursive_tool_is_sent_whole_others_as_langchain_sends_them() -> None:
    for tool in (
        plant,
        StructuredTool.from_function(plant),
        StructuredTool(name="x", description="y", args_schema=Holder.model_json_schema()),
        {"type": "function", "function": {"name": "x", "parameters": Node.model_json_schema()}},
    ):
        bound: Any = ChatART(model="p").bind_tools([tool])
        assert holes(bound.kwargs["tools"]) == 0
        assert "$defs" in bound.kwargs["tools"][0]["function"]["parameters"]
    for tool in (Told, convert_to_openai_tool(Told), StructuredTool.from_function(holes)):
        assert openai_tool(tool) == convert_to_openai_tool(tool)


@pytest.mark.parametrize("definitions", ["$defs", "definitions"])
def test_a_json_schema_whose_root_is_a_reference_or_has_no_properties(definitions: str) -> None:
    whole = json.loads(json.dumps(Node.model_json_schema()).replace("$defs", definitions))
    told = response_format({"title": "Tree", **whole})["json_schema"]
    root = {k: v for k, v in whole[definitions]["Node"].items() if k in ("properties", "required")}
    schema = {definitions: whole[definitions], "type": "object", **root}
    assert told == {"name": "Tree", "schema": schema}
    either = [{"type": "string"}, {"type": "integer"}]
    told = response_format({"title": "Either", "anyOf": either})["json_schema"]
    assert told == {"name": "Either", "schema": {"anyOf": either}}


def test_a_recursive_typed_dict_is_refused_in_words() -> None:
    for use in (ChatART(model="p").with_structured_output, lambda t: openai_tool(t)):
        with pytest.raises(ConfigError, match=r"TypedDict 'Typed', which holds itself.*pydantic"):
            use(Typed)


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
async def test_a_cut_reply_is_told_as_cut_and_a_stream_at_its_end(method: Any) -> None:
    for model in (
        says(CUT, "length"),
        says("", "length", additional_kwargs={"reasoning_content": "hm"}),
    ):
        for schema in (Told, Mail):
            chain = model.with_structured_output(schema, method=method)
            with pytest.raises(OutputParserException, match=IS_CUT):
                chain.invoke("?")
            raw: Any = model.with_structured_output(schema, method=method, include_raw=True)
            told = raw.invoke("?")
            assert told["raw"].content == model.said.content and told["parsed"] is None
            assert re.search(IS_CUT, str(told["parsing_error"]))
    chain, seen = says(CUT, "length").with_structured_output(Mail, method=method), list[Any]()
    with pytest.raises(OutputParserException, match=IS_CUT):
        for part in chain.stream("?"):
            seen.append(part)
    assert method == "function_calling" or {"sender": "a"} in seen
    with pytest.raises(OutputParserException, match=IS_CUT):
        [part async for part in chain.astream("?")]
    batch = await chain.abatch(["?", "?"], return_exceptions=True)
    assert [type(one) for one in batch] == [OutputParserException] * 2


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
async def test_a_tool_that_is_called_instead_is_no_fault(schema: Any) -> None:
    called = [{"name": "plant", "args": {}, "id": "1", "type": "tool_call"}]
    for content in ("", "I look it up."):
        model = says(content, "tool_calls", tool_calls=called)
        chain: Any = model.with_structured_output(schema, tools=[plant])
        assert chain.invoke("?") is None and await chain.ainvoke("?") is None
        told: Any = model.with_structured_output(schema, tools=[plant], include_raw=True)
        said = await told.ainvoke("?")
        assert said == {"raw": model.said, "parsed": None, "parsing_error": None}


def test_another_fault_keeps_the_parsers_words() -> None:
    with pytest.raises(OutputParserException, match="Field required"):
        says('{"sender": "a"}', "stop").with_structured_output(Told).invoke("?")
