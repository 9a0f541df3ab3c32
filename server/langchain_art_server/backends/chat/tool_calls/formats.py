"""The registry of tool-call formats, and how a chat template's own is found.

To add one, write a function that reads its calls (`json_calls`, `marked_calls`) and add a
`ToolFormat` to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Iterable

from langchain_art_server.backends.chat.tool_calls import json_calls, marked_calls
from langchain_art_server.backends.chat.tool_calls.call_format import (
    ANY_TEXT,
    Guide,
    ToolCallParser,
    ToolFormat,
)

_TOOL_CALL = ("<tool_call>", "</tool_call>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL = (json_calls.KIMI_CALL[0], json_calls.KIMI_NAME, json_calls.KIMI_CALL[1])
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = (
    json_calls.DEEPSEEK_CALL[0],
    json_calls.DEEPSEEK_NAME,
    json_calls.DEEPSEEK_CALL[1],
)
#: Strings of Gemma 4 are between marks of their own.
_GEMMA_TEXT = r'(?:<\|"\|>.*?<\|"\|>|(?!<\|"\|>).)*?'

HERMES = ToolFormat(
    "hermes",
    "Qwen2.5, Qwen3, Hermes, Granite 4",
    json_calls.one_object,
    Guide("<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", after="\n</tool_call>"),
    *_TOOL_CALL,
    markers=_TOOL_CALL,
)
XML = ToolFormat(
    "xml",
    "Qwen3-Coder, Qwen3.5 and later, Nemotron 3",
    marked_calls.xml,
    Guide(
        "<tool_call>\n",
        "<function={name}>\n",
        "</function>",
        between="\n</tool_call>\n<tool_call>\n",
        after="\n</tool_call>",
        argument=("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    *_TOOL_CALL,
    inside=ANY_TEXT,
    markers=_TOOL_CALL,
)
GLM = ToolFormat(
    "glm",
    "GLM-4.5 and later",
    marked_calls.glm,
    Guide(
        "<tool_call>",
        "{name}\n",
        "",
        between="</tool_call>\n<tool_call>",
        after="</tool_call>",
        argument=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    *_TOOL_CALL,
    inside=ANY_TEXT,
    markers=(*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MISTRAL = ToolFormat(
    "mistral",
    "Mistral up to Small 3.1",
    json_calls.mistral,
    Guide("[TOOL_CALLS][", between=", ", after="]"),
    "[TOOL_CALLS]",
    markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    new_id=lambda rng: (
        f"{rng.getrandbits(36):09x}"
    ),  # its templates take nine letters and digits alone
)
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    "Mistral Small 3.2 and later, Devstral, Magistral",
    json_calls.mistral,
    Guide("[TOOL_CALLS]", "{name}[ARGS]", "", "[TOOL_CALLS]"),
    MISTRAL.opener,
    markers=MISTRAL.markers,
    new_id=MISTRAL.new_id,
)
LLAMA = ToolFormat(
    "llama",
    "Llama 3.1, 3.2, 3.3",
    json_calls.objects,
    Guide(head='{"name": {json_name}, "parameters": '),
    starts=("{", "<|python_tag|>", "functools["),
    markers=("<|python_tag|>",),
)
PYTHONIC = ToolFormat(
    "pythonic",
    "Llama 4, Llama 3.2 with Python's syntax",
    marked_calls.pythonic,
    Guide("[", "{name}(", ")", ", ", "]", ("{key}=", ""), ", ", "json"),
    starts=("[", "<|python_start|>"),
    markers=("<|python_start|>", "<|python_end|>"),
)
LFM2 = ToolFormat(
    "lfm2",
    "LFM2, LFM2.5",
    marked_calls.pythonic,
    Guide(
        "<|tool_call_start|>[",
        "{name}(",
        ")",
        ", ",
        "]<|tool_call_end|>",
        ("{key}=", ""),
        ", ",
        "json",
    ),
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    inside=ANY_TEXT,
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
)
GEMMA = ToolFormat(
    "gemma",
    "Gemma 4",
    marked_calls.gemma,
    Guide(
        "<|tool_call>",
        "call:{name}{",
        "}",
        "<tool_call|><|tool_call>",
        "<tool_call|>",
        ("{key}:", ""),
        ",",
        "gemma",
    ),
    "<|tool_call>",
    "<tool_call|>",
    inside=_GEMMA_TEXT,
    markers=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
)
HARMONY = ToolFormat(
    "harmony",
    "gpt-oss",
    json_calls.harmony,
    Guide(
        head="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        tail="",
        answer="<|channel|>final<|message|>",
    ),
    "<|channel|>",
    "<|call|>",
    markers=json_calls.HARMONY_MARKERS,
    rewriter=json_calls.HarmonyRewriter,
)
KIMI = ToolFormat(
    "kimi",
    "Kimi K2",
    json_calls.kimi,
    Guide(
        _KIMI[0] + _KIMI_CALL[0],
        "functions.{name}:0" + _KIMI_CALL[1],
        "",
        after=_KIMI_CALL[2] + _KIMI[1],
    ),
    *_KIMI,
    markers=(*_KIMI, *_KIMI_CALL),
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    "DeepSeek V3, R1",
    json_calls.deepseek_v3,
    Guide(
        _DEEPSEEK[0] + _DEEPSEEK_CALL[0],
        f"function{_DEEPSEEK_CALL[1]}{{name}}\n```json\n",
        "\n```",
        between=f"{_DEEPSEEK_CALL[2]}\n{_DEEPSEEK_CALL[0]}",
        after=_DEEPSEEK_CALL[2] + _DEEPSEEK[1],
    ),
    *_DEEPSEEK,
    markers=(*_DEEPSEEK, *_DEEPSEEK_CALL),
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    "DeepSeek V3.1",
    json_calls.deepseek_v31,
    Guide(
        _DEEPSEEK[0] + _DEEPSEEK_CALL[0],
        "{name}" + _DEEPSEEK_CALL[1],
        "",
        between=_DEEPSEEK_CALL[2] + _DEEPSEEK_CALL[0],
        after=_DEEPSEEK_CALL[2] + _DEEPSEEK[1],
    ),
    *_DEEPSEEK,
    markers=DEEPSEEK_V3.markers,
)
NEMOTRON = ToolFormat(
    "nemotron",
    "Llama-Nemotron, Nemotron Nano 2",
    json_calls.array,
    Guide("<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
    "<TOOLCALL>",
    "</TOOLCALL>",
    markers=("<TOOLCALL>", "</TOOLCALL>"),
)
PHI4 = ToolFormat(
    "phi4",
    "Phi-4-mini",
    json_calls.array,
    Guide("<|tool_call|>[", between=", ", after="]<|/tool_call|>"),
    "<|tool_call|>",
    "<|/tool_call|>",
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
GRANITE = ToolFormat(
    "granite",
    "Granite 3",
    json_calls.array,
    Guide("<|tool_call|>[", between=", ", after="]"),
    "<|tool_call|>",
    markers=("<|tool_call|>",),
)
#: The known formats by name, in the order in which a template's call is tried.
FORMATS = {
    form.name: form
    for form in (
        GLM,
        XML,
        HERMES,
        MISTRAL_ARGS,
        MISTRAL,
        HARMONY,
        KIMI,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        NEMOTRON,
        PHI4,
        GRANITE,
        LFM2,
        GEMMA,
        PYTHONIC,
        LLAMA,
    )
}


def format_of_call(text: str, name: str, arguments: dict[str, str]) -> ToolFormat | None:
    """The first of `FORMATS` that reads this call alone from `text`, which a template wrote."""
    for form in FORMATS.values():
        parser = ToolCallParser(form)
        parser.feed(text, last=True)
        calls = [call["function"] for call in parser.calls]
        read = [(c["name"], json_calls.arguments_object(c["arguments"])) for c in calls]
        if read == [(name, arguments)]:
            # Mistral's two forms are read alike, and written differently.
            return MISTRAL if form is MISTRAL_ARGS and "[ARGS]" not in text else form
    return None


def names_of(forms: Iterable[ToolFormat]) -> str:
    """Formats and whose they are, for messages."""
    return "; ".join(f"{form.name} ({form.families})" for form in forms)
