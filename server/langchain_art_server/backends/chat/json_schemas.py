"""JSON schemas as grammars have them: closed, of limited size, with one way of white space."""

from __future__ import annotations

import json
from typing import Any, cast

from langchain_art.errors import InvalidRequest
from langchain_art_server.backends.base import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH

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

    Raises:
        InvalidRequest: the schema has more than `MAX_SCHEMA_DEPTH` levels.
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
    # These keys hold data, or schemas that only together list all properties.
    closed = {
        key: value
        if key in ("const", "enum", "default", "examples", "allOf")
        else _closed(value, depth + 1)
        for key, value in found.items()
    }
    if isinstance(found.get("properties"), dict) and not (
        found.keys() & {"additionalProperties", "unevaluatedProperties", "patternProperties"}
    ):
        closed["additionalProperties"] = False
    return closed
