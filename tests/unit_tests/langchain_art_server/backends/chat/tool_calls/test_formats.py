"""Every format: calls are read, whole and letter by letter; what is broken stays text."""

import json
from typing import Any

import pytest

from langchain_art_server.backends.chat.tool_calls.call_format import ToolCallParser
from langchain_art_server.backends.chat.tool_calls.formats import (
    FORMATS,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LFM2,
    LLAMA,
    MISTRAL,
    PYTHONIC,
    XML,
)

TYPES: dict[str, Any] = {
    "word": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "yes": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "list": {"type": "array", "items": {"type": "string"}},
    "more": {"$ref": "#/$defs/More"},
    "item": {"$ref": "#/properties/list/items"},
    "first": {"$ref": "#/properties/maybe/anyOf/0"},
    "named": {"$ref": "#/$defs/a~1b~0%20c"},
    "again": {"$ref": "#"},
    "beyond": {"$ref": "#/properties/maybe/anyOf/2"},
    "kind": {"enum": ["1", "2"]},
    "free": {},
    "odd": {"type": [["integer"]]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": TYPES,
                "$defs": {
                    "More": {"type": "object", "properties": {}},
                    "a/b~ c": {"type": "string"},
                },
            },
        },
    }
]
#: Argument, its text in a tag, its value.
VALUES: list[tuple[str, str, Any]] = [
    ("word", "5", "5"),
    ("word", "true", "true"),
    ("word", '{"a": 1}', '{"a": 1}'),
    ("word", "two\n\nlines\n", "two\n\nlines\n"),
    ("word", '5" of "it', '5" of "it'),
    ("word", "<p></parameter>\n</parameter> it", "<p></parameter>\n</parameter> it"),
    ("item", "5", "5"),
    ("first", "5", "5"),
    ("named", "5", "5"),
    ("again", '{"word": "5"}', {"word": "5"}),
    ("beyond", "5", 5),
    ("count", "5", 5),
    ("count", "2.0", 2.0),
    ("count", "five", "five"),
    ("share", "1", 1),
    ("share", "1e3", 1000.0),
    ("yes", "true", True),
    ("yes", "False", False),
    ("maybe", "None", None),
    ("maybe", "null", None),
    ("maybe", "5", "5"),
    ("either", "5", 5),
    ("either", "five", "five"),
    ("list", '["a", "b"]', ["a", "b"]),
    ("more", '{"a": {"b": null}}', {"a": {"b": None}}),
    ("kind", "1", "1"),
    ("free", "5", 5),
    ("free", '"5"', '"5"'),
    ("free", "NaN", "NaN"),
    ("unknown", "[1]", [1]),
    ("odd", "5", 5),
]


def parse(form: Any, text: str, size: int | None = None) -> tuple[str, list[Any]]:
    parser = ToolCallParser(form, TOOLS)
    size = size or len(text) or 1
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.feed("", last=True)
    functions = [call["function"] for call in parser.calls]
    return parser.content, [(f["name"], json.loads(f["arguments"])) for f in functions]


def xml(key: str, text: str) -> str:
    return (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>"
    )


def glm(key: str, text: str) -> str:
    return f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
@pytest.mark.parametrize(("form", "write"), [(XML, xml), (GLM, glm)])
def test_a_value_without_quotes_has_the_type_that_the_schema_says(
    form: Any, write: Any, key: str, text: str, value: Any
) -> None:
    for size in (None, 1):
        assert parse(form, write(key, text), size) == ("", [("f", {key: value})])


def test_definitions_that_refer_to_each_other_are_read_once() -> None:
    refs = [{"$ref": f"#/$defs/{number}"} for number in range(40)]
    definitions = {str(number): {"anyOf": refs} for number in range(40)}  # 40^8 ways through them
    schema = {"properties": {"a": {"anyOf": [{"type": "string"}, *refs]}}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    parser = ToolCallParser(XML, tools)
    parser.feed(xml("a", "5"), last=True)
    assert json.loads(parser.calls[0]["function"]["arguments"]) == {"a": 5}


F = ("f", {"a": 1})
Q = '<|"|>'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", {})]),
        (
            XML,
            f"ok\n\n{xml('count', '1')}\n{xml('count', '2')}",
            "ok",
            [("f", {"count": 1}), ("f", {"count": 2})],
        ),
        (GLM, "<tool_call>f</tool_call>", "", [("f", {})]),
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [F]),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', "", [F]),
        (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [F]),
        (LLAMA, 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [F]),
        (PYTHONIC, "[f(a=1)]", "", [F]),
        (PYTHONIC, "<|python_start|>[f(a=1), g()]<|python_end|>", "", [F, ("g", {})]),
        (
            PYTHONIC,
            "[f(a=[true, None, {'b': -1.5}, 'c'])]",
            "",
            [("f", {"a": [True, None, {"b": -1.5}, "c"]})],
        ),
        (PYTHONIC, "[a.b(c='it\\'s')]", "", [("a.b", {"c": "it's"})]),
        (
            PYTHONIC,
            """[get-weather(from='a(b=1)', user-id = "c=", class=2)]""",
            "",
            [("get-weather", {"from": "a(b=1)", "user-id": "c=", "class": 2})],
        ),
        (LFM2, "see\n<|tool_call_start|>[f(a=1)]<|tool_call_end|> done", "see\ndone", [F]),
        (GEMMA, "<|tool_call>call:f{}<tool_call|>", "", [("f", {})]),
        (
            GEMMA,
            f"<|tool_call>call:f{{a:{Q}x{{,}}:<tool_call|>{Q},b:[1,{{c:{Q}{Q}}},null],d:{{}}}}<tool_call|>",
            "",
            [("f", {"a": "x{,}:<tool_call|>", "b": [1, {"c": ""}, None], "d": {}})],
        ),
        (
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "",
            [("a.b", {})],
        ),
        (HARMONY, "<|channel|>final<|message|>Hi < there", "Hi < there", []),
        (
            HARMONY,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            "<think>hm</think>Hi",
            [],
        ),
        (
            HARMONY,
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
            "",
            [F],
        ),
        (
            HARMONY,
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
            '<|channel|>commentary json<|message|>{"a": 1}',
            "I look.",
            [F],
        ),
        (HARMONY, "<|channel|>analysis<|message|>cut sh", "<think>cut sh", []),
        (HARMONY, "no channel at all", "no channel at all", []),
    ],
)
def test_a_call_is_read(form: Any, text: str, content: str, calls: list[Any]) -> None:
    for size in (None, 1, 3):
        assert parse(form, text, size) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (XML, "<tool_call>\n<function=f>\nstray\n</function>\n</tool_call>"),
        (XML, "<tool_call>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        (GLM, "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        (PYTHONIC, "[1] see there"),
        (PYTHONIC, "[f(1)]"),
        (PYTHONIC, "[f(a=b)]"),
        (PYTHONIC, "[f(a=open('x'))]"),
        (PYTHONIC, "[f(a=1e999)]"),
        (PYTHONIC, "[f(a={1})]"),
        (PYTHONIC, "[f(a={[1]})]"),
        (PYTHONIC, r"[f(a='\ud800')]"),
        (HERMES, r'<tool_call>{"name": "f", "arguments": {}, "id": "\ud800"}</tool_call>'),
        (PYTHONIC, "[" * 5000),
        (LFM2, "<|tool_call_start|>[f(]<|tool_call_end|>"),
        (GEMMA, "<|tool_call>call:f{a:}<tool_call|>"),
        (GEMMA, "<|tool_call>call:f{a:x}<tool_call|>"),
        (GEMMA, "<|tool_call>call:f{a:1}}<tool_call|>"),
        (GEMMA, "<|tool_call>call:f{" + "a:{" * 5000 + "<tool_call|>"),
        (KIMI, "<|tool_calls_section_begin|>x<|tool_calls_section_end|>"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]"),
    ],
)
def test_what_is_broken_stays_text(form: Any, text: str) -> None:
    assert parse(form, text) == (text, [])


def test_the_models_own_ids_are_kept_and_never_twice() -> None:
    one = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    parser = ToolCallParser(KIMI)
    parser.feed(f"{KIMI.opener}{one}{one}{KIMI.closer}", last=True)
    ids = [call["id"] for call in parser.calls]
    assert ids[0] == "functions.f:0"
    assert len(set(ids)) == 2


def test_mistrals_templates_take_ids_of_nine_letters_alone() -> None:
    parser = ToolCallParser(MISTRAL)
    parser.feed("[TOOL_CALLS]f[ARGS]{}", last=True)
    assert len(parser.calls[0]["id"]) == 9
    assert parser.calls[0]["id"].isalnum()


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_forced_call_looks_like_is_read_back(name: str) -> None:
    form = FORMATS[name]
    head, tail = form.guide.argument or ("", "")
    arguments = head.replace("{key}", "a") + "1" + tail if head else '{"a": 1}'
    call = form.guide.call("f", '"f"') + arguments + form.guide.tail
    text = form.guide.before + call + form.guide.after
    assert parse(form, text) == ("", [F])
    if form.guide.between is not None:
        two = form.guide.before + call + form.guide.between + call + form.guide.after
        assert parse(form, two) == ("", [F, F])
