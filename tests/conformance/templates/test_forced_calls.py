"""Forced calls in formats that have marks around each argument, with grammars of their own."""

import enum
import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field, create_model

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.chat.chat_template import ChatTemplate
from langchain_art_server.backends.chat.guided_decoding import GrammarCompiler
from langchain_art_server.backends.chat.tool_calls.call_format import ToolCallParser
from tests.conformance.templates.table import sampled, template_of
from tests.support.tiny_models import ask

PROPERTIES: dict[str, Any] = {
    "word": {"type": "string", "maxLength": 6},
    "kind": {"enum": ["long", "short"]},
    "count": {"$ref": "#/$defs/Count"},
    "list": {"type": "array", "items": {"type": "integer"}},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does it.",
        "parameters": {
            "type": "object",
            "properties": PROPERTIES,
            "required": ["word", "count"],
            "$defs": {"Count": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}


def write(*values: tuple[str, str]) -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function=f>\n{told}</function>\n</tool_call>"


@functools.cache
def compiled(family: str) -> tuple[ChatTemplate, GrammarCompiler]:
    """One for all tests: each compiler has a process of its own."""
    template = template_of(family)
    eos = sorted(template.eos)
    return template, GrammarCompiler(template.tokenizer, len(template.tokenizer), eos)


def accepts(
    tools: dict[str, Any] | list[dict[str, Any]],
    *texts: str,
    family: str = "qwen3_coder",
    **options: Any,
) -> dict[str, bool]:
    template, compiler = compiled(family)
    sent = tools if isinstance(tools, list) else [tools]
    grammar = compiler.grammar(ask(tools=sent, tool_choice="required", **options), template.tools)
    assert grammar
    matcher = compiler.logits_processor(grammar)._matcher
    told = {text: [*sampled(template, text), min(template.eos)] for text in texts}
    return {text: matcher.validate_tokens(ids) == len(ids) for text, ids in told.items()}


def check(tool: dict[str, Any], good: list[str], bad: list[str], **options: Any) -> None:
    """A grammar for the tool allows some texts and no others."""
    expected = dict.fromkeys(good, True) | dict.fromkeys(bad, False)
    assert accepts(tool, *good, *bad, **options) == expected


def with_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": TOOL["function"] | {"parameters": parameters}}


GOOD = write(("word", "a\n< b"), ("count", "3"))


def test_arguments_follow_the_tools_schema() -> None:
    good = [
        GOOD,
        write(("word", ""), ("kind", "long"), ("count", "3"), ("list", "[1, 2]")),
        write(("word", "x"), ("count", "3"), ("maybe", "null")),
        write(("word", "x"), ("count", "3"), ("maybe", 'any "text" at\nall')),
        f"{GOOD}\n{GOOD}",
    ]
    bad = [
        write(("word", "x")),
        write(("word", "7 chars"), ("count", "3")),
        write(("word", "x"), ("count", "0")),
        write(("word", "x"), ("kind", "round"), ("count", "3")),
        write(("count", "3"), ("word", "x")),
        write(("word", "x"), ("count", "3"), ("list", '["a"]')),
    ]
    check(TOOL, good, bad)


def test_one_call_where_no_more_were_asked_for() -> None:
    check(TOOL, [GOOD], [f"{GOOD}\n{GOOD}"], parallel_tool_calls=False)


def test_a_tool_without_arguments() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Does it."}}
    check(tool, [write()], [write(("word", "x"))])


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("llama4", "[f({})]"),
        ("lfm2", "<|tool_call_start|>[f({})]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:f{{{}}}<tool_call|>"),
    ],
)
def test_arguments_of_one_line(family: str, call: str) -> None:
    """In Python's syntax and in Gemma's notation."""
    good = (
        'word="a", count=3',
        'word="", count=9, kind="long", list=[1, 2], maybe=null',
        'word="a", count=3, maybe="x"',
        'word="a", count=3, list=[]',
    )
    bad = 'word="a"', 'word="a", count=3, ', 'word="a" count=3', "word='a', count=3"
    if family == "gemma4":
        good, bad = (
            [one.replace("=", ":").replace(", ", ",").replace('"', '<|"|>') for one in some]
            for some in (good, bad)
        )
    texts = [[call.format(one) for one in some] for some in (good, bad)]
    check(TOOL, *texts, family=family)


class Color(enum.Enum):
    RED, BLUE = "red", "blue"


class Shape(BaseModel):
    color: Color
    size: Annotated[int, Field(ge=1)] | None = None


class Node(BaseModel):
    name: Literal["red"]
    more: "list[Node] | None" = None


class Linked(BaseModel):
    a: str
    more: "list[Linked] | None" = None


COLOR: dict[str, Any] = {"type": "string", "enum": ["red", "blue"]}
KINDS: dict[str, Any] = {
    "enum": Color,
    "optional enum": Color | None,
    "optional literal": Literal["red", "blue"] | None,
    "literal of several types": Literal["red", 1, None],
    "word or number": Literal["red"] | Annotated[int, Field(ge=1)],
    "word or list": Literal["red"] | list[int],
    "short text": Annotated[str | None, Field(max_length=3)],
    "long text": Annotated[str | None, Field(min_length=5)],
    "text or truth": Annotated[str, Field(max_length=3)] | bool,
    "bounded list": Annotated[list[Color], Field(min_length=1, max_length=2)],
    "no list": Annotated[list[int], Field(max_length=0)],
    "list of three or more": Annotated[list[int], Field(min_length=3)],
    "any list": list[Any],
    "pair": tuple[int, Color],
    "mapping": dict[str, int],
    "optional mapping": dict[str, Any] | None,
    "model": Shape,
    "models": list[Shape | None],
    "model that holds itself": Node,
    "list of types": {"type": ["string", "null"], "enum": ["red", "blue", None, 1]},
    "allOf": {"allOf": [{"$ref": "#/$defs/C"}], "$defs": {"C": COLOR}},
    "oneOf beside a type": {"type": "string", "oneOf": [{"const": "red"}, {"const": "blue"}]},
    "bound beside a reference": {
        "$ref": "#/$defs/Text",
        "maxLength": 3,
        "$defs": {"Text": {"type": "string"}},
    },
    "union that holds itself": {
        "$ref": "#/$defs/C",
        "$defs": {"C": {"anyOf": [{"$ref": "#/$defs/C"}, COLOR]}},
    },
}
VALUES: list[Any] = [
    *(None, True, 0, 1, 12345, 2.5, "", "red", "blue", "re", "reds", "two\nlines", "null", "1"),
    *([], [1], [1, 2, 3], ["red"], ["red", "blue"], ["red"] * 3, [1, "red"], [1, "x"], [None]),
    *({}, {"color": "red"}, {"color": "x"}, {"color": "red", "size": 0}, {"k": 1}, {"k": "v"}),
    *([{"color": "red", "size": 1}, None], {"color": "red", "size": None}, [1, "red", 2]),
    *({"name": "red", "more": [{"name": "red"}]}, {"name": "red", "more": [{"name": "x"}]}),
]


def gemmas(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemmas(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemmas, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


CALLS: dict[str, Callable[[Any], str]] = {
    "qwen3_coder": lambda value: write(("a", bare(value))),
    "glm4moe": lambda value: (
        f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{bare(value)}</arg_value>\n</tool_call>"
    ),
    "gemma4": lambda value: f"<|tool_call>call:f{{a:{gemmas(value)}}}<tool_call|>",
}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_values_are_allowed_as_in_json(kind: str, family: str) -> None:
    """A call is allowed in each notation if the values that are read from it are in JSON."""
    tools: list[dict[str, Any]] = []
    if isinstance(KINDS[kind], dict):
        schema = {key: value for key, value in KINDS[kind].items() if key != "$defs"}
        parameters = {"properties": {"a": schema}, "$defs": KINDS[kind].get("$defs", {})}
    else:
        model = create_model("f", __doc__="Does it.", a=(KINDS[kind], ...))
        parameters = model.model_json_schema()
        if "$defs" in parameters:
            tools.append(convert_to_openai_tool(model))  # in which references are replaced
    parameters |= {"type": "object", "required": ["a"]}
    tools.append(with_parameters(parameters))
    form, calls = compiled(family)[0].tools, [CALLS[family](value) for value in VALUES]
    for tool in tools:
        in_json: list[str] = []
        for call in calls:
            parser = ToolCallParser(form, [tool])
            parser.feed(call, last=True)
            arguments = json.dumps(json.loads(parser.calls[0]["function"]["arguments"]))
            told = f'{{"name": "f", "arguments": {arguments}}}'
            in_json.append(f"<tool_call>\n{told}\n</tool_call>")
        expected = accepts(tool, *in_json, family="qwen3")
        allowed = [expected[one] for one in in_json]
        assert accepts(tool, *calls, family=family) == dict(zip(calls, allowed, strict=True))
        assert {*allowed} == {True, False}


def test_tools_may_mean_different_things_by_one_reference() -> None:
    tools: list[dict[str, Any]] = []
    for name, word in (("f", "red"), ("g", "tall")):
        parameters = {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/Kind"}},
            "$defs": {"Kind": {"enum": [word]}},
        }
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    texts = [
        f"<|tool_call>call:{name}{{a:{gemmas(word)}}}<tool_call|>"
        for name, word in (("f", "red"), ("f", "tall"), ("g", "red"), ("g", "tall"))
    ]
    found = accepts(tools, *texts, family="gemma4")
    assert [*found.values()] == [True, False, False, True]


@pytest.mark.parametrize("family", CALLS)
def test_all_arguments_may_stand_behind_a_reference(family: str) -> None:
    """Pydantic writes a model that holds itself so."""
    parameters = Linked.model_json_schema()
    assert "properties" not in parameters
    tool = with_parameters(parameters)
    text = CALLS[family]("3")
    check(tool, [text], [], family=family)
    parser = ToolCallParser(compiled(family)[0].tools, [tool])
    parser.feed(text, last=True)
    assert json.loads(parser.calls[0]["function"]["arguments"]) == {"a": "3"}


def test_text_that_must_be_longer_does_not_read_on_behind_its_end() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}}}
    tool = with_parameters(parameters)
    bad = ["ab", "", "ab\n</parameter>\ncde", "\n</parameter>\nabc"]
    check(tool, [write(("a", "abc"))], [write(("a", text)) for text in bad])


@pytest.mark.parametrize("wrap", ["it", "optional", "reference"])
@pytest.mark.parametrize("key", ["pattern", "format"])
def test_what_cannot_be_enforced_is_refused_by_name(key: str, wrap: str) -> None:
    text = {"type": "string", key: "date"}
    wrapped = {
        "it": text,
        "optional": {"anyOf": [text, {"type": "null"}]},
        "reference": {"$ref": "#/$defs/Day"},
    }
    parameters = {"properties": {"day": wrapped[wrap]}, "$defs": {"Day": text}, "type": "object"}
    tool = with_parameters(parameters)
    with pytest.raises(InvalidRequest, match=rf"'{key}' for the argument 'day'.*'auto'"):
        accepts(tool, "")
