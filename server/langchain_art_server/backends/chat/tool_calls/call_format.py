"""Interface of a format of tool calls: how a model writes them, and how they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, Literal, NamedTuple, Protocol

#: Text in which the closing mark counts outside of JSON strings alone.
JSON_TEXT = r'(?:[^"]|"(?:[^"\\]|\\.)*")*?'
#: Text in which the closing mark counts wherever it stands.
ANY_TEXT = r".*?"
#: A tool's name -> the JSON Schema of its arguments.
Schemas = Mapping[str, Mapping[str, Any]]


class FunctionCall(NamedTuple):
    """A call that was read: the function's name, and its arguments as JSON.

    `id` is the model's own name of the call; empty if it writes none.
    """

    name: str
    arguments: str
    id: str = ""


class Rewriter(Protocol):
    """Rewrites a reply while it is streamed, before calls are looked for."""

    def push(self, text: str, *, last: bool) -> str:
        """Add text; returns what is final. Markers that may be incomplete are held back."""
        ...


@dataclass(frozen=True)
class Guide:
    """Notation of forced calls, for guided decoding.

    Attributes:
        before: what stands before the first call; this and the others may hold special tokens.
        head: what stands before a call's arguments. ``{name}`` is the function's name,
            ``{json_name}`` the same in quotes.
        tail: what stands after a call's arguments.
        between: what stands between two calls; None if a forced reply has one call.
        after: what stands after the last call.
        argument: what stands before an argument, with its ``{key}``, and after it; None: the
            arguments are one JSON object.
        separator: what stands between two arguments.
        values: how each argument is written: strings without quotes and others as JSON (``text``),
            all as JSON, or as Gemma 4 has it.
        answer: what stands before an answer in JSON, which calls nothing.
    """

    before: str = ""
    head: str = '{"name": {json_name}, "arguments": '
    tail: str = "}"
    between: str | None = None
    after: str = ""
    argument: tuple[str, str] | None = None
    separator: str = ""
    values: Literal["text", "json", "gemma"] = "text"
    answer: str = ""

    def call(self, name: str, json_name: str) -> str:
        """The head of a call of a function."""
        return self.head.replace("{name}", name).replace("{json_name}", json_name)


@dataclass(frozen=True)
class ToolFormat:
    """Notation of a model's tool calls.

    Attributes:
        name: key in `FORMATS`.
        families: models that use it, for people.
        parse: the calls in the text between `opener` and `closer`. Raises ValueError or
            RecursionError if it is malformed.
        guide: how forced calls are written.
        opener: what a call begins with; empty if the reply as a whole is the call.
        closer: what a call ends with; empty if it ends with the reply.
        starts: without an `opener`, what a reply with calls begins with.
        inside: pattern of the text before `closer`.
        markers: special tokens that must not be removed from the decoded text.
        rewriter: makes what rewrites a reply first; None: it is read as it is.
        new_id: draws the id of a call that the model gave none.
    """

    name: str
    families: str
    parse: Callable[[str, Schemas], list[FunctionCall]]
    guide: Guide
    opener: str = ""
    closer: str = ""
    starts: tuple[str, ...] = ()
    inside: str = JSON_TEXT
    markers: tuple[str, ...] = ()
    rewriter: Callable[[], Rewriter] | None = None
    new_id: Callable[[Random], str] = lambda rng: f"call_{rng.getrandbits(128):032x}"

    def calls(self, text: str, schemas: Schemas) -> list[FunctionCall]:
        """The calls in the text between `opener` and `closer`; none if it is malformed.

        A lone surrogate makes it malformed: no client could send it back.
        """
        try:
            found = self.parse(text, schemas)
            for call in found:
                "".join(call).encode()
                if "\\u" in call.arguments:
                    json.dumps(json.loads(call.arguments), ensure_ascii=False).encode()
        except (ValueError, RecursionError, TypeError):  # TypeError: a list in a set, say
            return []
        return found

    def end_of_call(self, text: str) -> int:
        """End of the first `closer` that counts in a `text` with `opener`, or -1."""
        if not self.closer:
            return -1
        match = self._to_closer.match(text, len(self.opener))
        return match.end() if match else -1

    @cached_property
    def _to_closer(self) -> re.Pattern[str]:
        return re.compile(self.inside + re.escape(self.closer), re.DOTALL)


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if marker.startswith(text[-size:])), 0)
