"""Tool calls cut out of text: any format, any chunking, anything malformed stays text."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_art_server.backends.chat.output_processor import Detokenizer
from langchain_art_server.backends.chat.tool_calls.call_format import ToolCallParser, ToolFormat
from langchain_art_server.backends.chat.tool_calls.formats import (
    FORMATS,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
)
from langchain_art_server.backends.chat.tool_calls.json_calls import arguments_object


def parse(
    form: ToolFormat | None, text: str, cuts: list[int] | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """Feed `text` in pieces; returns content and calls as a stream's reader puts them together."""
    parser, content, calls = ToolCallParser(form), "", list[dict[str, Any]]()
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts or []), len(text)]
    for start, end in itertools.pairwise(edges):
        delta = parser.feed(text[start:end])
        content, calls = content + delta.content, calls + delta.tool_calls
    delta = parser.feed("", last=True)
    content, calls = content + delta.content, calls + delta.tool_calls
    assert (content, calls) == (parser.content, parser.calls)
    functions = [call["function"] for call in calls]
    return content, [(f["name"], f["arguments"]) for f in functions]


F, G = ("f", '{"a": 1}'), ("g", "{}")
HF = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HG = '<tool_call>{"arguments":{},"name":"g"}</tool_call>'
#: Values that a client's parser takes, and that no JSON can hold afterwards.
UNSENDABLE = ["1e400}", "-1e400}", "[1, 2e999]}", '"\\ud800"}', '{"\\uDFFF": 1}}']


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, HF, "", [F]),
        (HERMES, f"{HF}\n{HG}", "", [F, G]),
        (HERMES, f"  Let me see.\n\n{HF}\n", "  Let me see.", [F]),
        (HERMES, f"one {HF} two {HG} ", "one\ntwo", [F, G]),
        (HERMES, " no call < here \n", " no call < here \n", []),
        (HERMES, "<tool_call>{", "<tool_call>{", []),
        (HERMES, f"{HF}<tool_call>{{", "<tool_call>{", [F]),
        (HERMES, "<tool_call>[1]</tool_call> ", "<tool_call>[1]</tool_call> ", []),
        (HERMES, HF.replace('"f"', "3"), HF.replace('"f"', "3"), []),
        (HERMES, HF.replace('"f"', '"\\ud800"'), HF.replace('"f"', '"\\ud800"'), []),
        (HERMES, HF.replace('{"a": 1}', "[1]"), HF.replace('{"a": 1}', "[1]"), []),
        (HERMES, HF.replace("1}", "NaN}"), HF.replace("1}", "NaN}"), []),
        *((HERMES, one, one, []) for one in map(HF.replace, ["1}"] * 5, UNSENDABLE)),
        (HERMES, HF.replace("1}", "1e308}"), "", [("f", '{"a": 1e308}')]),
        (HERMES, HF.replace("1}", '"\\ud83d\\ude00"}'), "", [("f", '{"a": "\\ud83d\\ude00"}')]),
        (HERMES, HF.replace("}}", "}} x"), HF.replace("}}", "}} x"), []),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\""}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call>\\""}')],
        ),
        (HERMES, "<tool_call>" + "[" * 3000 + "</tool_call>", None, []),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [F]),
        (
            MISTRAL,
            'hi [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]',
            "hi",
            [F, G],
        ),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [F, G]),
        (MISTRAL, "[TOOL_CALLS][]x", "[TOOL_CALLS][]x", []),
        (MISTRAL, "[TOOL_CALLS][{}", "[TOOL_CALLS][{}", []),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [F]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
        (
            LLAMA,
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            "",
            [F, G],
        ),
        (LLAMA, 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
        (LLAMA, '{"name": "f"} ', '{"name": "f"} ', []),
        (LLAMA, " plain ", " plain ", []),
        (None, f" {HF} ", f" {HF} ", []),
    ],
)
def test_calls_and_text_are_told_apart(
    form: ToolFormat | None, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is None else content, calls)
    assert parse(form, text) == expected
    assert parse(form, text, list(range(len(text)))) == expected


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_arguments = st.dictionaries(st.text(), _json, max_size=3)
_names = st.from_regex(r"[a-zA-Z_][\w.-]{0,15}", fullmatch=True)


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


@given(
    text=st.text(alphabet="abcé😀 <", max_size=30),
    stop=st.lists(st.text(alphabet="abc <", min_size=1, max_size=4), max_size=2),
    seed=st.integers(0, 99),
)
def test_growing_text_is_cut_where_the_whole_text_is(text: str, stop: list[str], seed: int) -> None:
    raw = text.encode()

    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    growing, got = Detokenizer(decode, tuple(stop)), ""
    rng, at = random.Random(seed), 0
    while at < len(raw) and not growing.stopped:
        size = rng.randint(1, 3) if not stop else 1
        got += growing.push(list(raw[at : at + size]))
        at += size
    got += growing.push([], last=True)
    ends = sorted((text.index(s) + len(s), text.index(s)) for s in stop if s in text)
    if not ends:
        assert got == text
        assert not growing.stopped
    else:
        first = [start for end, start in ends if end == ends[0][0]]
        assert got == text[: min(first)]


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
def test_one_call_at_most_where_that_was_asked_for(form: ToolFormat) -> None:
    text = {
        HERMES.opener: '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>' * 2,
        MISTRAL.opener: "[TOOL_CALLS]" + json.dumps([{"name": "a", "arguments": {}}] * 2),
    }[form.opener]
    for one_call, expected in ((True, 1), (False, 2)):
        parser = ToolCallParser(form, one_call=one_call)
        parser.feed(text, last=True)
        assert len(parser.calls) == expected
        assert parser.content == ""
