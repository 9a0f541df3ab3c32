"""Forced calls in formats that have marks around each argument, with grammars of their own."""

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field, create_model

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.chat.guided_decoding import GrammarCompiler
from langchain_art_server.backends.chat.tool_calls.call_format import ToolCallParser
from tests.conformance.templates.table import HERE, sampled, template_of
from tests.support.tiny_models import LocalSampler, ask, save_model

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


def accepts(
    tools: dict[str, Any] | list[dict[str, Any]],
    *texts: str,
    family: str = "qwen3_coder",
    **options: Any,
) -> list[bool]:
    template = template_of(family)
    compiler = GrammarCompiler(template.tokenizer, len(template.tokenizer), sorted(template.eos))
    sent = tools if isinstance(tools, list) else [tools]
    request = ask(tools=sent, tool_choice="required", **options)
    grammar = compiler.grammar(request, template.tools)
    assert grammar
    found: list[bool] = []
    for text in texts:
        processor = compiler.logits_processor(grammar)
        ids = [*sampled(template, text), min(template.eos)]
        found.append(all(processor.advance(one) for one in ids))
    return found


GOOD = write(("word", "a\n< b"), ("count", "3"))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (GOOD, True),
        (write(("word", ""), ("kind", "long"), ("count", "3"), ("list", "[1, 2]")), True),
        (write(("word", "x"), ("count", "3"), ("maybe", "null")), True),
        (write(("word", "x"), ("count", "3"), ("maybe", 'any "text" at\nall')), True),
        (f"{GOOD}\n{GOOD}", True),
        (write(("word", "x")), False),
        (write(("word", "7 chars"), ("count", "3")), False),
        (write(("word", "x"), ("count", "0")), False),
        (write(("word", "x"), ("kind", "round"), ("count", "3")), False),
        (write(("count", "3"), ("word", "x")), False),
        (write(("word", "x"), ("count", "3"), ("list", '["a"]')), False),
    ],
)
def test_arguments_follow_the_tools_schema(text: str, allowed: bool) -> None:
    assert accepts(TOOL, text) == [allowed]


def test_one_call_where_no_more_were_asked_for() -> None:
    texts = (GOOD, f"{GOOD}\n{GOOD}")
    assert accepts(TOOL, *texts, parallel_tool_calls=False) == [True, False]


def test_a_tool_without_arguments() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Does it."}}
    assert accepts(tool, write(), write(("word", "x"))) == [True, False]


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ('word="a", count=3', True),
        ('word="", count=9, kind="long", list=[1, 2], maybe=null', True),
        ('word="a", count=3, maybe="x"', True),
        ('word="a", count=3, list=[]', True),
        ('word="a"', False),
        ('word="a", count=3, ', False),
        ('word="a" count=3', False),
        ("word='a', count=3", False),
    ],
)
@pytest.mark.parametrize(
    ("family", "around"),
    [("llama4", ("[", "]")), ("lfm2", ("<|tool_call_start|>[", "<|tool_call_end|>"))],
)
def test_pythons_syntax(
    family: str, around: tuple[str, str], arguments: str, allowed: bool
) -> None:
    text = around[0] + f"f({arguments})" + ("]" if family == "lfm2" else "") + around[1]
    assert accepts(TOOL, text, family=family) == [allowed]


NESTED: dict[str, Any] = {
    "a": {"$ref": "#/$defs/Tree"},
    "b": {"type": "array", "items": {"type": "string"}},
    "c": {},
    "d": {"type": ["boolean", "null"]},
}
TREE = {
    "type": "object",
    "properties": {
        "name": {"enum": ["x", "y"]},
        "more": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
    },
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ("", True),
        ("a:{name:'x'}", True),
        ("a:{name:'x',more:[{name:'y'},{name:'x',more:[]}]}", True),
        ("b:['p','q, \n{}']", True),
        ("b:[],d:null", True),
        ("c:{k:['v',1,{}],l:'w'}", True),
        ("a:{name:'x'},b:[],c:1,d:true", True),
        ("a:{name:'z'}", False),
        ("a:{more:[]}", False),
        ("b:[1]", False),
        (",b:[]", False),
        ("b:[],", False),
        ("d:'true'", False),
    ],
)
def test_gemmas_notation(arguments: str, allowed: bool) -> None:
    """Strings stand between apostrophes here."""
    parameters = {"type": "object", "properties": NESTED, "$defs": {"Tree": TREE}}
    tool = {"type": "function", "function": TOOL["function"] | {"parameters": parameters}}
    written = arguments.replace("'", '<|"|>')
    text = f"<|tool_call>call:f{{{written}}}<tool_call|>"
    assert accepts(tool, text, family="gemma4") == [allowed]


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
    tools.append({"type": "function", "function": TOOL["function"] | {"parameters": parameters}})
    form, calls = template_of(family).tools, [CALLS[family](value) for value in VALUES]
    for tool in tools:
        in_json: list[str] = []
        for call in calls:
            parser = ToolCallParser(form, [tool])
            parser.feed(call, last=True)
            arguments = json.dumps(json.loads(parser.calls[0]["function"]["arguments"]))
            told = f'{{"name": "f", "arguments": {arguments}}}'
            in_json.append(f"<tool_call>\n{told}\n</tool_call>")
        expected = accepts(tool, *in_json, family="qwen3")
        found = accepts(tool, *calls, family=family)
        assert dict(zip(calls, found, strict=True)) == dict(zip(calls, expected, strict=True))
        assert set(found) == {True, False}


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
    assert accepts(tools, *texts, family="gemma4") == [True, False, False, True]


@pytest.mark.parametrize("family", CALLS)
def test_all_arguments_may_stand_behind_a_reference(family: str) -> None:
    """Pydantic writes a model that holds itself so."""
    parameters = Linked.model_json_schema()
    assert "properties" not in parameters
    tool = {"type": "function", "function": TOOL["function"] | {"parameters": parameters}}
    text = CALLS[family]("3")
    assert accepts(tool, text, family=family) == [True]
    parser = ToolCallParser(template_of(family).tools, [tool])
    parser.feed(text, last=True)
    assert json.loads(parser.calls[0]["function"]["arguments"]) == {"a": "3"}


def test_text_that_must_be_longer_does_not_read_on_behind_its_end() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}}}
    tool = {"type": "function", "function": TOOL["function"] | {"parameters": parameters}}
    texts = ["abc", "ab", "", "ab\n</parameter>\ncde", "\n</parameter>\nabc"]
    found = accepts(tool, *(write(("a", text)) for text in texts))
    assert found == [True, False, False, False, False]


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
    tool = {"type": "function", "function": TOOL["function"] | {"parameters": parameters}}
    with pytest.raises(InvalidRequest, match=rf"'{key}' for the argument 'day'.*'auto'"):
        accepts(tool, "")


def test_a_model_that_knows_nothing_calls_the_tool_that_is_forced(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text((HERE / "qwen3_coder.jinja").read_text())
    sampler = LocalSampler(model)
    properties = {key: PROPERTIES[key] for key in ("word", "kind", "count")}
    parameters = TOOL["function"]["parameters"] | {"properties": properties}
    tool = {"type": "function", "function": TOOL["function"] | {"parameters": parameters}}
    named = {"type": "function", "function": {"name": "f"}}
    (reply,) = sampler.chat(ask(tools=[tool], tool_choice=named, max_tokens=250, seed=1))
    (call,) = reply.tool_calls
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments["word"], str)
    assert 1 <= arguments["count"] <= 9
    assert reply.excluded_because is None
