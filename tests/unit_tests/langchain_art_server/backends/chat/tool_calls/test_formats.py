"""Every format: calls are read, whole and letter by letter; what is broken stays text."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art_server.backends.chat.tool_calls.call_format import ToolCallParser, ToolFormat
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
from langchain_art_server.backends.chat.tool_calls.json_calls import arguments_object
from tests.support.soak import count

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
    ("word", '{"a": 1}', '{"a": 1}'),
    ("word", "two\n\nlines\n", "two\n\nlines\n"),
    ("word", "<p></parameter>\n</parameter> it", "<p></parameter>\n</parameter> it"),
    ("item", "5", "5"),
    ("named", "5", "5"),
    ("again", '{"word": "5"}', {"word": "5"}),
    ("beyond", "5", 5),
    ("count", "5", 5),
    ("count", "five", "five"),
    ("share", "1e3", 1000.0),
    ("yes", "true", True),
    ("yes", "False", False),
    ("maybe", "None", None),
    ("maybe", "5", "5"),
    ("either", "5", 5),
    ("list", '["a", "b"]', ["a", "b"]),
    ("more", '{"a": {"b": null}}', {"a": {"b": None}}),
    ("kind", "1", "1"),
    ("free", "5", 5),
    ("free", "NaN", "NaN"),
    ("unknown", "[1]", [1]),
    ("odd", "5", 5),
]


def parse(
    form: ToolFormat | None, text: str, cuts: list[int] | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """Feed `text` in pieces; returns content and calls as a stream's reader puts them together."""
    parser, content, calls = ToolCallParser(form, TOOLS), "", list[dict[str, Any]]()
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts or []), len(text)]
    for start, end in itertools.pairwise(edges):
        delta = parser.feed(text[start:end])
        content, calls = content + delta.content, calls + delta.tool_calls
    delta = parser.feed("", last=True)
    content, calls = content + delta.content, calls + delta.tool_calls
    assert (content, calls) == (parser.content, parser.calls)
    functions = [call["function"] for call in calls]
    return content, [(f["name"], f["arguments"]) for f in functions]


def read(form: ToolFormat, text: str, size: int | None = None) -> tuple[str, list[Any]]:
    """Content and calls with the values of their arguments, fed in pieces of a size or as one."""
    content, calls = parse(form, text, list(range(0, len(text), size)) if size else [])
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


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
        assert read(form, write(key, text), size) == ("", [("f", {key: value})])


def test_definitions_that_refer_to_each_other_are_read_once() -> None:
    refs = [{"$ref": f"#/$defs/{number}"} for number in range(40)]
    definitions = {str(number): {"anyOf": refs} for number in range(40)}  # 40^8 ways through them
    schema = {"properties": {"a": {"anyOf": [{"type": "string"}, *refs]}}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    parser = ToolCallParser(XML, tools)
    parser.feed(xml("a", "5"), last=True)
    assert json.loads(parser.calls[0]["function"]["arguments"]) == {"a": 5}


F, G = ("f", {"a": 1}), ("g", {})
HF = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HG = '<tool_call>{"arguments":{},"name":"g"}</tool_call>'
#: Values that a client's parser takes, and that no JSON can hold afterwards.
UNSENDABLE = ["-1e400}", "[1, 2e999]}", '{"\\uDFFF": 1}}']
Q = '<|"|>'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"{HF}\n{HG}", "", [F, G]),
        (HERMES, f"  Let me see.\n\n{HF}\n", "  Let me see.", [F]),
        (HERMES, f"one {HF} two {HG} ", "one\ntwo", [F, G]),
        (HERMES, f"{HF}<tool_call>{{", "<tool_call>{", [F]),
        (HERMES, HF.replace("1}", "1e308}"), "", [("f", {"a": 1e308})]),
        (HERMES, HF.replace("1}", '"\\ud83d\\ude00"}'), "", [("f", {"a": "\U0001f600"})]),
        (HERMES, HF.replace("1}", '"</tool_call>\\""}'), "", [("f", {"a": '</tool_call>"'})]),
        (
            MISTRAL,
            'hi [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]',
            "hi",
            [F, G],
        ),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [F, G]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
        (
            LLAMA,
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            "",
            [F, G],
        ),
        (XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", {})]),
        (
            XML,
            f"ok\n\n{xml('count', '1')}\n{xml('count', '2')}",
            "ok",
            [("f", {"count": 1}), ("f", {"count": 2})],
        ),
        (GLM, "<tool_call>f</tool_call>", "", [("f", {})]),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', "", [F]),
        (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [F]),
        (LLAMA, 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [F]),
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
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
            '<|channel|>commentary json<|message|>{"a": 1}',
            "I look.",
            [F],
        ),
        (HARMONY, "<|channel|>analysis<|message|>cut sh", "<think>cut sh", []),
    ],
)
def test_a_call_is_read(form: Any, text: str, content: str, calls: list[Any]) -> None:
    for size in (None, 1, 3):
        assert read(form, text, size) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, " no call < here \n"),
        (HERMES, "<tool_call>[1]</tool_call> "),
        (HERMES, HF.replace('"f"', "3")),
        (HERMES, HF.replace('"f"', '"\\ud800"')),
        (HERMES, HF.replace('{"a": 1}', "[1]")),
        (HERMES, HF.replace("1}", "NaN}")),
        *((HERMES, HF.replace("1}", one)) for one in UNSENDABLE),
        (HERMES, HF.replace("}}", "}} x")),
        (HERMES, "<tool_call>" + "[" * 3000 + "</tool_call>"),
        (MISTRAL, "[TOOL_CALLS][]x"),
        (LLAMA, 'see {"name": "f", "parameters": {}}'),
        (LLAMA, " plain "),
        (None, f" {HF} "),
        (XML, "<tool_call>\n<function=f>\nstray\n</function>\n</tool_call>"),
        (XML, "<tool_call>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        (GLM, "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        (PYTHONIC, "[1] see there"),
        (PYTHONIC, "[f(a=open('x'))]"),
        (PYTHONIC, "[f(a=1e999)]"),
        (PYTHONIC, r"[f(a='\ud800')]"),
        (HERMES, r'<tool_call>{"name": "f", "arguments": {}, "id": "\ud800"}</tool_call>'),
        (PYTHONIC, "[" * 5000),
        (LFM2, "<|tool_call_start|>[f(]<|tool_call_end|>"),
        (GEMMA, "<|tool_call>call:f{a:}<tool_call|>"),
        (GEMMA, "<|tool_call>call:f{" + "a:{" * 1500 + "<tool_call|>"),
        (KIMI, "<|tool_calls_section_begin|>x<|tool_calls_section_end|>"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]"),
    ],
)
def test_what_is_broken_stays_text(form: Any, text: str) -> None:
    for size in (None, 1):
        assert read(form, text, size) == (text, [])


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
    assert len(parser.calls[0]["id"]) == 9 and parser.calls[0]["id"].isalnum()


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_arguments = st.dictionaries(st.text(), _json, max_size=3)
_names = st.from_regex(r"[a-zA-Z_][\w.-]{0,15}", fullmatch=True)


@pytest.mark.soak
@settings(max_examples=count(30, 100))
@given(
    calls=st.lists(st.tuples(_names, _arguments), min_size=1, max_size=3),
    lead=st.sampled_from(["", "hm", "two\nlines < and {"]),
    ascii_only=st.booleans(),
    cuts=st.lists(st.integers(0, 10**6), max_size=8),
)
def test_what_a_template_writes_is_read_back_exactly(
    calls: list[tuple[str, dict[str, Any]]], lead: str, ascii_only: bool, cuts: list[int]
) -> None:
    written = [(name, json.dumps(a, ensure_ascii=ascii_only)) for name, a in calls]
    parts = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in written
    ]
    text = "\n".join([lead, *parts] if lead else parts)
    assert parse(HERMES, text, cuts) == (lead, written)
    assert [arguments_object(arguments) for _, arguments in written] == [a for _, a in calls]


_pieces = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "{", '"', "\n", " "),
        *("a", "\\", "[TOOL_CALLS]", "[ARGS]", "[", "]", "<|python_tag|>", ";", "<tool", "f"),
        *("<function=f>", "</function>", "<arg_key>", "<|tool_call>", "call:f{}", "<tool_call|>"),
        *("<|tool_call|>", "<|channel|>", "<|message|>", "<|end|>", "f()"),
    ]
)


@given(
    form=st.sampled_from([*FORMATS.values(), None]),
    pieces=st.lists(_pieces, max_size=12),
    cuts=st.lists(st.integers(0, 10**6), max_size=8),
)
def test_the_pieces_sizes_change_nothing_and_no_text_is_lost(
    form: ToolFormat | None, pieces: list[str], cuts: list[int]
) -> None:
    text = "".join(pieces)
    whole = parse(form, text)
    assert parse(form, text, cuts) == whole
    if not whole[1] and form is not HARMONY:  # which writes in channels what others tag
        assert whole[0] == text


@pytest.mark.parametrize("text", ["[]", "1", '"x"', "{", '{"a": NaN}', '{"a": 1e400}', "nonsense"])
def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        arguments_object(text)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, HG * 2),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'),
    ],
)
def test_one_call_at_most_where_that_was_asked_for(form: ToolFormat, text: str) -> None:
    parser = ToolCallParser(form, one_call=True)
    parser.feed(text, last=True)
    assert (len(parser.calls), parser.content) == (1, "")
