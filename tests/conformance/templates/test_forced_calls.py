"""Forced calls in formats that have marks around each argument, with grammars of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.chat.guided_decoding import GrammarCompiler
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
    tool: dict[str, Any], *texts: str, family: str = "qwen3_coder", **options: Any
) -> list[bool]:
    template = template_of(family)
    compiler = GrammarCompiler(template.tokenizer, len(template.tokenizer), sorted(template.eos))
    request = ask(tools=[tool], tool_choice="required", **options)
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


@pytest.mark.parametrize("key", ["pattern", "format"])
def test_what_cannot_be_enforced_is_refused_by_name(key: str) -> None:
    parameters = {"type": "object", "properties": {"day": {"type": "string", key: "date"}}}
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
