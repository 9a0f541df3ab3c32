"""Validation errors in words: where the bad field is, and which field may have been meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ValidationError

from langchain_art.errors import ConfigError
from langchain_art.wire.identifiers import Wire

#: Characters of a value that a message shows.
_VALUE = 200


class Options(Wire):
    """Base of values that users write in Python: a bad field is a ConfigError that says which."""

    if not TYPE_CHECKING:

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                words = in_words(error, type(self))
                raise ConfigError(f"{type(self).__name__}: {words}") from None

        # For pydantic: JSON is validated without this, so that its errors keep their places.
        __init__.__pydantic_base_init__ = True


def place(kind: type[BaseModel], loc: Sequence[Any]) -> tuple[str, list[str]]:
    """The path of an error's field, and the fields that there are beside it.

    Pydantic's `loc` also names the member of a union that it tried (``config.rl.lr``): those parts,
    which no user wrote, are left out.
    """
    root = _schema(kind)
    nodes, path = list(_variants(root, root)), list[str]()
    for part in loc[:-1]:
        inner = [one for node in nodes for one in _children(node, part)]
        if inner:
            path.append(str(part))
            nodes = [one for node in inner for one in _variants(node, root)]
        else:
            nodes = [node for node in nodes if _is_called(node, str(part))] or nodes
    fields = {str(name): None for node in nodes for name in node.get("properties", ())}
    return ".".join([*path, *map(str, loc[-1:])]), list(fields)


def unknown_field(kind: type[BaseModel], loc: Sequence[Any]) -> str:
    """Message for a field that is not known, with the one that may have been meant."""
    path, fields = place(kind, loc)
    close = _short_for(str(loc[-1]), fields) or difflib.get_close_matches(str(loc[-1]), fields, 1)
    if close:
        return f"{path}: this option is not known here; did you mean {close[0]}?"
    known = ", ".join(fields)
    return f"{path}: this option is not known here; leave it out, or take one of {known}"


def in_words(error: ValidationError, kind: type[BaseModel]) -> str:
    """All that is wrong with the fields of a model that was made in Python."""
    lines: list[str] = []
    for one in error.errors():
        if one["type"] == "extra_forbidden":
            lines.append(unknown_field(kind, one["loc"]))
            continue
        path = place(kind, one["loc"])[0] if one["loc"] else ""
        got = "" if not path else f" (got {one['input']!r:.{_VALUE}})"
        lines.append(
            f"{path}: ".removeprefix(": ") + one["msg"].removeprefix("Value error, ") + got
        )
    return "; ".join(lines)


@functools.cache
def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema()


def _short_for(name: str, fields: Sequence[str]) -> list[str]:
    """The one field of which `name` is the initials (``lr``) or the beginning (``temp``)."""
    short = name.lower()
    found = [
        field
        for field in fields
        if field.startswith(short) or "".join(word[:1] for word in field.split("_")) == short
    ]
    return found if len(found) == 1 else []


def _variants(node: Any, root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that a schema stands for: what it refers to, and the members of a union."""
    if not isinstance(node, dict):
        return
    schema = cast("dict[str, Any]", node)
    if "$ref" in schema:
        yield from _variants(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif several := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        for one in several:
            yield from _variants(one, root)
    else:
        yield schema


def _children(node: dict[str, Any], part: Any) -> list[Any]:
    if isinstance(part, int):
        return [node["items"]] if "items" in node else []
    if part in node.get("properties", ()):
        return [node["properties"][part]]
    inner: Any = node.get("additionalProperties")
    return [inner] if isinstance(inner, dict) else []


def _is_called(node: dict[str, Any], tag: str) -> bool:
    """True if this tag discriminates a union's member: its `kind`, or its class."""
    kind: dict[str, Any] = node.get("properties", {}).get("kind", {})
    return tag in (node.get("title"), kind.get("const"), *kind.get("enum", ()))
