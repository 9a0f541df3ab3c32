"""Grammars of forced calls: rules in llguidance's dialect of Lark, one kind for each notation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, ChatRequest
from langchain_art_server.backends.chat.tool_calls.call_format import ToolFormat
from langchain_art_server.backends.chat.tool_calls.marked_calls import (
    GEMMA_QUOTE,
    referred,
    types_of,
)

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
_TEXT = "/(?s:.*)/"  # any text
_GEMMA_KEY = "/[A-Za-z0-9_-]+/"
_ANY_GEMMA = ("string", "number", "boolean", "null", "array", "object")
#: White space as `json.dumps` writes it and templates render it again, and no other.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def schema_json(schema: Any) -> str:
    """The schema for llguidance. Raises InvalidRequest if it is none, or too large or deep."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"got a schema of {type(schema).__name__}, expected a JSON object.")
    check_size(len(json.dumps(schema)))
    return json.dumps({**_closed(schema), "x-guidance": _JSON})


def check_size(chars: int) -> None:
    """Raises InvalidRequest if schemas of so many characters are too large."""
    if chars > MAX_SCHEMA_CHARS:
        raise InvalidRequest(
            f"got schemas of {chars} characters, expected at most {MAX_SCHEMA_CHARS} for a reply "
            "that must follow them. Simplify them, or send fewer tools."
        )


def _check_depth(depth: int) -> None:
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(
            f"got a schema nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it."
        )


def _closed(schema: Any, depth: int = 0) -> Any:
    """The schema with ``additionalProperties: false`` wherever properties are listed without it.

    JSON Schema allows more properties by default; OpenAI and others do not for replies.

    Raises InvalidRequest: the schema has more than `MAX_SCHEMA_DEPTH` levels.
    """
    _check_depth(depth)
    if isinstance(schema, list):
        return [_closed(part, depth + 1) for part in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    found = cast(dict[str, Any], schema)
    closed: dict[str, Any] = {}
    for key, value in found.items():
        if key in ("const", "enum", "default", "examples", "allOf"):
            closed[key] = value  # data, or schemas that only together list all properties
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(
            value, dict
        ):
            inner = cast(dict[str, Any], value)  # its keys are names, not keywords
            closed[key] = {name: _closed(one, depth + 2) for name, one in inner.items()}
        else:
            closed[key] = _closed(value, depth + 1)
    if isinstance(found.get("properties"), dict) and not (
        found.keys() & {"additionalProperties", "unevaluatedProperties", "patternProperties"}
    ):
        closed["additionalProperties"] = False
    return closed


def call_rules(
    request: ChatRequest, form: ToolFormat | None, token: Callable[[str], str]
) -> list[str]:
    """The rule ``calls`` and those that it needs; `token` writes a text, or a special token.

    Raises InvalidRequest: there is no tool to call, or its schema has what cannot be enforced.
    """
    functions = _allowed_functions(request)
    assert form is not None, "a request with tools has a format"
    rules = _Rules(form, token)
    once = isinstance(request.tool_choice, dict) or not request.parallel_tool_calls
    return rules.calls(functions, once=once)


class _Rules:
    def __init__(self, form: ToolFormat, token: Callable[[str], str]) -> None:
        self._form, self._guide, self._token = form, form.guide, token
        self._rules: list[str] = []
        self._gemmas: dict[str, str] = {}  # a schema in a tool's -> its rule

    def calls(self, functions: list[dict[str, Any]], *, once: bool) -> list[str]:
        guide = self._guide
        names = " | ".join(f"call_{index}" for index in range(len(functions)))
        self._rules.append(f"body: {names}")
        for index, function in enumerate(functions):
            head = guide.call(function["name"], json.dumps(function["name"]))
            schema = function.get("parameters") or _NO_ARGUMENTS
            whole = f"{self._literal(head)} args_{index} {self._literal(guide.tail)}"
            self._rules.append(f"call_{index}: {whole}")
            if guide.argument is None:
                self._rules.append(f"args_{index}: %json {schema_json(schema)}")
            else:
                schema_json(schema)  # for its checks
                self._gemmas = {}  # the next tool may mean others by the same names
                each = enumerate(_choices(schema, schema))
                members = [self._members(f"args_{index}_{i}", one, schema) for i, one in each]
                self._rules.append(f"args_{index}: {' | '.join(members)}")
        calls = f"{self._literal(guide.before)} body"
        if guide.between is not None and not once:
            calls += f" ({self._literal(guide.between)} body)*"
        return [*self._rules, f"calls: {calls} {self._literal(guide.after)}"]

    def _members(self, rule: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Arguments with their keys: the required ones, then the others, in the schema's order."""
        guide = self._guide
        assert guide.argument is not None
        known = schema.get("properties")
        properties = cast(dict[str, Any], known) if isinstance(known, dict) else {}
        required = [key for key in properties if key in (schema.get("required") or ())]
        others = [key for key in properties if key not in required]
        written: dict[str, str] = {}
        for index, key in enumerate(properties):
            begin = self._literal(guide.argument[0].replace("{key}", key))
            value = self._value(f"{rule}_{index}", key, properties[key], root)
            written[key] = f"{begin} {value}"
        if not guide.separator:
            parts = [f"({written[k]}){'' if k in required else '?'}" for k in properties]
            return " ".join(parts) or '""'
        comma = json.dumps(guide.separator)
        rest = [f"({comma} {written[key]})?" for key in others]
        if required:
            return " ".join([f" {comma} ".join(written[key] for key in required), *rest])
        # With no required one, any of them may be the first.
        firsts = [" ".join([written[k], *rest[i + 1 :]]) for i, k in enumerate(others)]
        return " | ".join([*firsts, '""'])

    def _value(self, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The name of an argument's rule."""
        guide = self._guide
        assert guide.argument is not None
        if guide.values == "gemma":
            return self._gemma(rule, key, schema, root)
        if guide.values == "json":
            self._rules.append(f"{rule}: {self._json(rule, schema, root)}")
        else:
            self._rules.append(self._bare(rule, key, schema, root, guide.argument[1]))
        return rule

    def _bare(self, rule: str, key: str, schema: Any, root: Mapping[str, Any], end: str) -> str:
        """The rule of a value of which strings have no quotes, up to its `end`."""
        listed: list[Any] = []
        texts: list[str] = []
        others: list[dict[str, Any]] = []
        for one in _choices(schema, root):
            types = types_of(one, root)
            if (values := _listed(one)) is not None:
                listed += values
            elif types and "string" not in types:
                others.append(one)
            else:
                texts.append(_free_text(key, one))
        words = [json.dumps(v if isinstance(v, str) else json.dumps(v)) for v in listed]
        if texts:
            # Text may begin as a number, a list or an object does, and the lexer then goes on with
            # the longer of both alone. So bounds of text hold beside words, but not beside these.
            return self._text(rule, _TEXT if others else " | ".join([*texts, *words]), end)
        if any(isinstance(value, str) for value in listed):
            rest = [self._json(rule, {"anyOf": others}, root)] if others else []
            return f"{rule}: ({' | '.join([*words, *rest])}) {self._literal(end)}"
        return f"{rule}: {self._json(rule, schema, root)} {self._literal(end)}"

    def _text(self, rule: str, pattern: str, end: str) -> str:
        """Text ends where a token does that it cannot hold, or at the first end mark."""
        written = self._literal(end)
        if written.startswith("<["):
            return f"{rule}: ({pattern}) {written}"
        mark = json.dumps(end)  # which text that must be longer would take in
        return f"{rule}[suffix={mark}]: ({pattern}) & ~({_TEXT} {mark} {_TEXT})"

    def _json(self, rule: str, schema: Any, root: Mapping[str, Any]) -> str:
        told = cast(dict[str, Any], schema) if isinstance(schema, dict) else {}
        defined = {name: root[name] for name in _DEFINITIONS if name in root}
        self._rules.append(f"{rule}_json: %json {schema_json(told | defined)}")
        return f"{rule}_json"

    def _gemma(self, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """The name of a value's rule in Gemma's notation.

        A schema has one rule wherever it stands, so one that holds itself comes to an end.
        """
        name = json.dumps(schema if isinstance(schema, dict) else {})
        if name not in self._gemmas:
            self._gemmas[name] = rule
            choices = enumerate(_choices(schema, root))
            bodies = [self._gemma_choice(f"{rule}_{i}", key, one, root) for i, one in choices]
            self._rules.append(f"{rule}: {' | '.join(bodies)}")
        return self._gemmas[name]

    def _gemma_choice(
        self, rule: str, key: str, told: dict[str, Any], root: Mapping[str, Any]
    ) -> str:
        kind = told.get("type")
        if values := _listed(told):
            quoted = GEMMA_QUOTE + "{}" + GEMMA_QUOTE
            words = [quoted.format(v) if isinstance(v, str) else json.dumps(v) for v in values]
            return " | ".join(map(self._literal, words))
        if kind in ("integer", "number") or values is not None:
            return self._json(rule, told, root)
        if kind == "string":
            self._rules.append(self._text(f"{rule}_text", _free_text(key, told), GEMMA_QUOTE))
            return f"{self._literal(GEMMA_QUOTE)} {rule}_text"
        if kind == "array":
            return self._gemma_array(rule, key, told, root)
        if kind == "object" and told.get("properties"):
            self._rules.append(f"{rule}_all: {self._members(rule, told, root)}")
            return f'"{{" {rule}_all "}}"'
        if kind == "object":
            more = told.get("additionalProperties", "properties" not in told)
            if more is False:
                return '"{}"'
            member = f'{_GEMMA_KEY} ":" {self._gemma(f"{rule}_more", key, more, root)}'
            return f'"{{" ({member} ("," {member})*)? "}}"'
        typed = {f"{rule}_{one}": told | {"type": one} for one in _ANY_GEMMA}
        return " | ".join(self._gemma_choice(name, key, typed[name], root) for name in typed)

    def _gemma_array(
        self, rule: str, key: str, told: dict[str, Any], root: Mapping[str, Any]
    ) -> str:
        items, low, high = told.get("items", {}), told.get("minItems", 0), told.get("maxItems")
        firsts = (told.get("prefixItems") or [items])[:high]
        ones = [self._gemma(f"{rule}_{i}", key, one, root) for i, one in enumerate(firsts)]
        comma, body = '","', ""
        if items is not False and (high is None or high > len(ones)):
            most = "" if high is None else high - len(ones)
            more = self._gemma(f"{rule}_more", key, items, root)
            body = f"({comma} {more}){{{max(low - len(ones), 0)},{most}}}"
        for index, one in reversed([*enumerate(ones)]):
            body = f"{comma if index else ''} {one} {body}"
            body = body if index < low else f"({body})?"
        return f'"[" {body} "]"'

    def _literal(self, text: str) -> str:
        return literal(text, self._form, self._token)


def literal(text: str, form: ToolFormat, token: Callable[[str], str]) -> str:
    """Lark's notation for `text`, in which the format's markers may be tokens of their own."""
    markers = "|".join(f"({re.escape(marker)})" for marker in form.markers)
    parts = re.split(markers, text) if markers else [text]
    return " ".join(token(part) for part in parts if part)


def _choices(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of which a value follows one, without references, unions and lists of types.

    A schema that is nothing but itself again allows any value, as one that says nothing.
    """
    return _followed(schema, root, set(), 0) or [{}]


def _followed(
    schema: Any, root: Mapping[str, Any], seen: set[str], depth: int
) -> list[dict[str, Any]]:
    _check_depth(depth)
    told = dict(cast(dict[str, Any], schema)) if isinstance(schema, dict) else {}
    if isinstance(ref := told.pop("$ref", None), str):
        if ref in seen:  # what it stands for is among the choices already
            return []
        seen.add(ref)
        meant = referred(ref, root)
        known = cast(dict[str, Any], meant) if isinstance(meant, dict) else {}
        return _followed(known | told, root, seen, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        parts = cast(list[Any], told[key]) if isinstance(told.get(key), list) else []
        if parts and (key != "allOf" or len(parts) == 1):
            del told[key]
            each = [told | cast(dict[str, Any], p) if isinstance(p, dict) else told for p in parts]
            return [one for part in each for one in _followed(part, root, seen, depth + 1)]
    if isinstance(told.get("type"), list) and _listed(told) is None:
        return [told | {"type": one} for one in cast(list[str], told["type"])]
    return [told]


def _listed(told: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists, as far as its types have them; None if it lists none."""
    if values := told.get("enum") or ([told["const"]] if "const" in told else None):
        types = types_of(told, {})
        allowed = types | ({"integer"} if "number" in types else set[str]())
        return [value for value in values if types_of({"const": value}, {}) <= allowed]
    kind = told.get("type")
    return [None] if kind == "null" else [True, False] if kind == "boolean" else None


def _free_text(key: str, told: Mapping[str, Any]) -> str:
    """A pattern for a string that is written without quotes.

    Raises InvalidRequest: the schema asks of a string what is not enforced in text without quotes.
    """
    if unknown := told.keys() & {"pattern", "format"}:
        raise InvalidRequest(
            f"got {unknown.pop()!r} for the argument {key!r} of a tool that is to be called, and "
            "this model writes strings without JSON's quotes, where it cannot be enforced; "
            "expected a string without it. Leave it out, or use tool_choice='auto'.",
            param="tools",
        )
    return f"/(?s:.{{{told.get('minLength', 0)},{told.get('maxLength', '')}}})/"


def _allowed_functions(request: ChatRequest) -> list[dict[str, Any]]:
    functions: list[dict[str, Any]] = [tool["function"] for tool in request.tools]
    if isinstance(request.tool_choice, dict):
        name = request.tool_choice.get("function", {}).get("name")
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise InvalidRequest(
                f"tool_choice names {name!r}, which is not among the request's tools.",
                param="tool_choice",
            )
    if not functions:
        raise InvalidRequest(
            "tool_choice asks for a tool call, and the request has no tools.", param="tool_choice"
        )
    return functions
