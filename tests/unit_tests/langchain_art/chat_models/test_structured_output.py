"""The schemas that are sent say what was asked for, and cut replies are told as cut."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import HumanMessage
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


def test_a_recursive_typed_dict_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"TypedDict 'Typed', which holds itself.*pydantic"):
        ChatART(model="p").with_structured_output(Typed)
    with pytest.raises(ConfigError, match="TypedDict 'Typed'"):
        ChatART(model="p").bind_tools([Typed])
