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
#: Any value of Gemma's notation.
_ANY_GEMMA = """\
any: any_text | any_json | any_list | any_object
any_json: %json {"type": ["number", "boolean", "null"]}
any_list: "[" (any ("," any)*)? "]"
any_object: "{" (any_member ("," any_member)*)? "}"
any_member: /[A-Za-z0-9_-]+/ ":" any"""
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


def _closed(schema: Any, depth: int = 0) -> Any:
    """The schema with ``additionalProperties: false`` wherever properties are listed without it.

    JSON Schema allows more properties by default; OpenAI and others do not for replies.

    Raises InvalidRequest: the schema has more than `MAX_SCHEMA_DEPTH` levels.
    """
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(
            f"got a schema nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten it."
        )
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
        self._refs: dict[str, str] = {}  # what a schema refers to -> its rule

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
                members = self._members(f"args_{index}", schema, schema)
                self._rules.append(f"args_{index}: {members}")
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
            written[key] = f"{begin} {rule}_{index}"
            self._value(f"{rule}_{index}", key, properties[key], root)
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

    def _value(self, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> None:
        guide = self._guide
        assert guide.argument is not None
        if guide.values == "json":
            self._rules.append(f"{rule}: {self._json(rule, schema, root)}")
        elif guide.values == "gemma":
            self._rules.append(f"{rule}: {self._gemma(rule, key, schema, root)}")
        elif text := _free_text(key, schema, root):
            self._rules.append(self._text(rule, text, guide.argument[1]))
        else:
            end = self._literal(guide.argument[1])
            words = " | ".join(map(json.dumps, _words(schema)))
            value = f"({words})" if words else self._json(rule, schema, root)
            self._rules.append(f"{rule}: {value} {end}")

    def _text(self, rule: str, pattern: str, end: str) -> str:
        """Text ends where a token does that it cannot hold, or at the first end mark."""
        written = self._literal(end)
        if written.startswith("<["):
            return f"{rule}: {pattern} {written}"
        return f"{rule}[suffix={json.dumps(end)}]: {pattern}"

    def _json(self, rule: str, schema: Any, root: Mapping[str, Any]) -> str:
        told = cast(dict[str, Any], schema) if isinstance(schema, dict) else {}
        defined = {name: root[name] for name in _DEFINITIONS if name in root}
        self._rules.append(f"{rule}_json: %json {schema_json(told | defined)}")
        return f"{rule}_json"

    def _gemma(self, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """A value in Gemma's notation, as a rule's body."""
        told = cast(dict[str, Any], schema) if isinstance(schema, dict) else {}
        if isinstance(ref := told.get("$ref"), str):
            return self._gemma_ref(ref, key, root)
        several = next((told[k] for k in ("anyOf", "oneOf") if isinstance(told.get(k), list)), None)
        if several is None and isinstance(told.get("type"), list):
            several = [told | {"type": one} for one in cast(list[str], told["type"])]
        if several is not None:
            for index, one in enumerate(cast(list[Any], several)):
                self._rules.append(
                    f"{rule}_{index}: {self._gemma(f'{rule}_{index}', key, one, root)}"
                )
            return " | ".join(f"{rule}_{index}" for index in range(len(several)))
        if words := _words(told):
            return " | ".join(self._literal(GEMMA_QUOTE + word + GEMMA_QUOTE) for word in words)
        return self._gemma_of_type(rule, key, told, root)

    def _gemma_ref(self, ref: str, key: str, root: Mapping[str, Any]) -> str:
        if ref not in self._refs:
            self._refs[ref] = rule = f"ref_{len(self._refs)}"
            self._rules.append(f"{rule}: {self._gemma(rule, key, referred(ref, root), root)}")
        return self._refs[ref]

    def _gemma_of_type(
        self, rule: str, key: str, told: dict[str, Any], root: Mapping[str, Any]
    ) -> str:
        kind = told.get("type")
        if kind == "string":
            text = self._text(f"{rule}_text", _free_text(key, told, root), GEMMA_QUOTE)
            self._rules.append(text)
            return f"{self._literal(GEMMA_QUOTE)} {rule}_text"
        if kind in ("integer", "number", "boolean", "null"):
            return self._json(rule, told, root)
        if kind == "array" and "items" in told:
            self._rules.append(
                f"{rule}_one: {self._gemma(f'{rule}_one', key, told['items'], root)}"
            )
            return f'"[" ({rule}_one ("," {rule}_one)*)? "]"'
        if kind == "object" and told.get("properties"):
            self._rules.append(f"{rule}_all: {self._members(rule, told, root)}")
            return f'"{{" {rule}_all "}}"'
        if _ANY_GEMMA not in self._rules:
            self._rules += [_ANY_GEMMA, self._text("any_end", "/(?s:.*)/", GEMMA_QUOTE)]
            self._rules.append(f"any_text: {self._literal(GEMMA_QUOTE)} any_end")
        return "any"

    def _literal(self, text: str) -> str:
        return literal(text, self._form, self._token)


def literal(text: str, form: ToolFormat, token: Callable[[str], str]) -> str:
    """Lark's notation for `text`, in which the format's markers may be tokens of their own."""
    markers = "|".join(f"({re.escape(marker)})" for marker in form.markers)
    parts = re.split(markers, text) if markers else [text]
    return " ".join(token(part) for part in parts if part)


def _words(schema: Any) -> list[str]:
    """The strings that a schema allows; empty if it does not list strings alone."""
    words = schema.get("enum") or [schema.get("const")]
    return words if all(isinstance(word, str) for word in words) else []


def _free_text(key: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A pattern for a value that is written without quotes; empty if it is JSON or one of few.

    Raises InvalidRequest: the schema asks of a string what is not enforced in text without quotes.
    """
    types = types_of(schema, root)
    if isinstance(schema, dict) and (_words(schema) or (types and "string" not in types)):
        return ""
    told = cast(dict[str, Any], schema) if isinstance(schema, dict) else {}
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
