"""Calls that are not JSON: tags around each argument, Python's syntax, Gemma 4's quotes.

Their arguments become JSON. Where a format does not tell a string from another value, the tool's
schema does; a value that it has no type for is what JSON reads it as, else a string.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote

from langchain_art_server.backends.chat.tool_calls.call_format import FunctionCall, Schemas
from langchain_art_server.backends.chat.tool_calls.json_calls import checked_name, decode

_XML_CALL = re.compile(r"\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*", re.DOTALL)
_XML_ARGUMENT = re.compile(  # a value may have the end mark, but not before another argument
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_GLM_CALL = re.compile(r"\s*([^<]+?)\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_GEMMA_CALL = re.compile(r"call:([^{\s]+)(\{.*\})", re.DOTALL)
GEMMA_QUOTE = '<|"|>'  # before and after a string of Gemma 4
_GEMMA_PART = re.compile(r'<\|"\|>(.*?)<\|"\|>|([\[\]{},:])|([^\[\]{},:<]+)', re.DOTALL)
#: As Python writes them, which some templates do.
_PYTHON = {"True": True, "False": False, "None": None}
_JSON_NAMES = {"true": True, "false": False, "null": None}
#: A string, or a name before its bracket or its value.
_PYTHON_NAME = re.compile(
    r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([^\s"'()\[\]{},=:]+)(?=\s*[(=])""", re.DOTALL
)
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_MAX_DEPTH = 8  # schemas that refer to themselves are read so deep


def xml(text: str, schemas: Schemas) -> list[FunctionCall]:
    """``<function=name>``, then ``<parameter=key>``, a line, the value, a line, its end."""
    found = _XML_CALL.fullmatch(text)
    if found is None:
        raise ValueError("expected a function")
    return [_call(found[1], _all(_XML_ARGUMENT, found[2]), schemas)]


def glm(text: str, schemas: Schemas) -> list[FunctionCall]:
    """The name, then keys and values in ``<arg_key>`` and ``<arg_value>``."""
    found = _GLM_CALL.fullmatch(text)
    if found is None:
        raise ValueError("expected a function")
    return [_call(found[1], _all(_GLM_ARGUMENT, found[2]), schemas)]


def _all(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    at = 0
    while match := pattern.match(text, at):
        pairs.append((match[1].strip(), match[2]))
        at = match.end()
    if text[at:].strip():
        raise ValueError("expected an argument")
    return pairs


def _call(name: str, pairs: Iterable[tuple[str, str]], schemas: Schemas) -> FunctionCall:
    name = checked_name(name.strip())
    schema = schemas.get(name, {})
    meant = referred(ref, schema) if isinstance(ref := schema.get("$ref"), str) else schema
    properties = cast(dict[str, Any], meant).get("properties") if isinstance(meant, dict) else None
    known = cast(dict[str, Any], properties) if isinstance(properties, dict) else {}
    written = {key: _value(text, types_of(known.get(key), schema)) for key, text in pairs}
    return FunctionCall(
        name, "{" + ", ".join(f"{_dumps(key)}: {value}" for key, value in written.items()) + "}"
    )


def _value(text: str, types: set[str]) -> str:
    """A value as JSON, in the model's own words where these are JSON."""
    bare = text.strip()
    if bare in _PYTHON:
        value, words = _PYTHON[bare], _dumps(_PYTHON[bare])
    else:
        try:
            value, words = decode(bare), bare
        except (ValueError, RecursionError):
            return _dumps(text)
    kind = _KINDS[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types)
    return words if kind != "string" and (fits or "string" not in types) else _dumps(text)


def types_of(
    schema: Any, root: Mapping[str, Any], depth: int = 0, met: dict[str, set[str]] | None = None
) -> set[str]:
    """The types that a schema allows, which may refer to `root`; empty if it does not say.

    `met` has those of the references that were met: unions that refer to each other are read once.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return set()
    found, met = cast(dict[str, Any], schema), {} if met is None else met
    if isinstance(ref := found.get("$ref"), str):
        if ref not in met:
            met[ref] = set()  # as long as it is read
            met[ref] = types_of(referred(ref, root), root, depth + 1, met)
        return met[ref]
    told = found.get("type")
    if isinstance(told, str):
        return {told, "null"} if found.get("nullable") is True else {told}
    if isinstance(told, list):
        return {one for one in cast(list[Any], told) if isinstance(one, str)}
    values = found.get("enum") or ([found["const"]] if "const" in found else None)
    if isinstance(values, list):
        return {_KINDS[type(value)] for value in cast(list[Any], values)}
    parts = [found[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(found.get(key), list)]
    kinds = [types_of(part, root, depth + 1, met) for several in parts for part in several]
    return set().union(*kinds) if all(kinds) else set()


def referred(ref: str, root: Mapping[str, Any]) -> Any:
    """Schema to which ``#/$defs/Name`` (JSON pointer, RFC 6901) refers; None if there is none."""
    place: Any = root if ref.startswith("#") else None
    for step in unquote(ref).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            place = {str(n): one for n, one in enumerate(cast(list[Any], place))}
        place = cast(dict[str, Any], place).get(key) if isinstance(place, dict) else None
    return place


def pythonic(text: str, _schemas: Schemas) -> list[FunctionCall]:
    """``[name(key="value", other=1), …]``."""
    text = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    names: list[str] = []  # which need be none of Python's: get-weather, from

    def numbered(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        names.append(found[1])
        return f"_{len(names) - 1}"

    try:
        tree = ast.parse(_PYTHON_NAME.sub(numbered, text), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError("expected a list of calls") from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("expected a list of calls")
    return [_python_call(call, names) for call in tree.elts]


def _python_call(call: ast.expr, names: Sequence[str]) -> FunctionCall:
    if (
        not isinstance(call, ast.Call)
        or call.args
        or not isinstance(call.func, ast.Name)
        or not all(k.arg for k in call.keywords)
    ):
        raise ValueError("expected a call with named arguments")
    arguments = {names[int(str(k.arg)[1:])]: _literal(k.value) for k in call.keywords}
    return FunctionCall(checked_name(names[int(call.func.id[1:])]), _dumps(arguments))


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("expected names as keys")
        return {k: _literal(v) for k, v in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if type(value) not in _KINDS:
        raise ValueError("expected a value of JSON")
    return value


def gemma(text: str, _schemas: Schemas) -> list[FunctionCall]:
    """``call:name{key:<|"|>text<|"|>,other:1}``."""
    found = _GEMMA_CALL.fullmatch(text.strip())
    if found is None:
        raise ValueError("expected a call")
    parts = _gemma_parts(found[2])
    value, at = _gemma_value(parts, 0)
    if at != len(parts):
        raise ValueError("expected one object of arguments")
    return [FunctionCall(checked_name(found[1]), _dumps(value))]


def _gemma_parts(text: str) -> list[tuple[str, str]]:
    """Strings, marks and bare words: ``("string", …)``, ``("mark", …)``, ``("word", …)``."""
    parts: list[tuple[str, str]] = []
    at = 0
    while match := _GEMMA_PART.match(text, at):
        kind = "string" if match[1] is not None else "mark" if match[2] else "word"
        word = match[0].removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE)
        if kind != "word" or word.strip():
            parts.append((kind, word if kind == "string" else word.strip()))
        at = match.end()
    if at < len(text):
        raise ValueError("expected a value")
    return parts


def _gemma_value(parts: list[tuple[str, str]], at: int) -> tuple[Any, int]:
    kind, word = parts[at] if at < len(parts) else ("", "")
    if kind == "string":
        return word, at + 1
    if kind == "word":
        return decode(word), at + 1
    if word not in ("{", "["):
        raise ValueError("expected a value")
    keys: list[str] = []
    values: list[Any] = []
    end, at = ("mark", {"{": "}", "[": "]"}[word]), at + 1
    while parts[at : at + 1] != [end]:
        if values:
            at = _gemma_mark(parts, at, ",")
        if word == "{":
            keys.append(parts[at][1] if parts[at : at + 1] else "")
            at = _gemma_mark(parts, at + 1, ":")
        value, at = _gemma_value(parts, at)
        values.append(value)
    return (dict(zip(keys, values, strict=True)) if word == "{" else values), at + 1


def _gemma_mark(parts: list[tuple[str, str]], at: int, mark: str) -> int:
    if parts[at : at + 1] != [("mark", mark)]:
        raise ValueError(f"expected {mark!r}")
    return at + 1


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
