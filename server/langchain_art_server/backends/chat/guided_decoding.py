"""Guided decoding: replies that follow a JSON schema or must call a tool, by a logits processor.

The grammar is in llguidance's dialect of Lark; the embedded sampler applies it to its logits, and
vLLM gets its text.
"""

from __future__ import annotations

import json
import re
import threading
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from langchain_art.errors import InvalidRequest
from langchain_art_server.algorithms.sequences import token_sets
from langchain_art_server.backends.base import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, ChatRequest
from langchain_art_server.backends.chat.grammar_check import GrammarCheck, GrammarReplay
from langchain_art_server.backends.chat.tool_calls.call_format import ToolFormat
from langchain_art_server.backends.chat.tool_calls.marked_calls import types_of

#: White space as `json.dumps` writes it and templates render it again, and no other.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class GrammarLogitsProcessor:
    """Masks the tokens that the grammar of one reply forbids next."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def allowed(self) -> bytes:
        """The set of the tokens that are allowed next (`token_sets`)."""
        return token_sets.of_bits(self._matcher.compute_bitmask(), self._vocab)

    def apply(self, logits: Tensor) -> bytes:
        """Set the logits ``[vocab]`` of forbidden tokens to -inf, in place; returns `allowed`."""
        allowed = self.allowed()
        forbidden = torch.from_numpy(~token_sets.mask_of(allowed, self._vocab))
        logits.masked_fill_(forbidden.to(logits.device), float("-inf"))
        return allowed

    def advance(self, token: int) -> bool:
        """Take a sampled token; False if it was not allowed."""
        return self._matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Why no token is allowed next; empty if one is."""
        return self._matcher.get_error() if self._matcher.is_error() else ""


class GrammarCompiler:
    """Makes grammars for one tokenizer; `vocab` is the size of the logits.

    Used by several threads.
    """

    def __init__(self, tokenizer: Any, vocab: int, eos: list[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, eos
        self._lock = threading.Lock()

    def grammar(self, request: ChatRequest, form: ToolFormat | None) -> str | None:
        """The grammar of the reply, as Lark; None if the reply is free.

        Raises:
            InvalidRequest: there is no tool to call, the format has no way to force a call, or
                there is too much of a schema.
        """
        options: list[str] = []
        rules: list[str] = []
        choice = request.tool_choice
        forced = choice == "required" or isinstance(choice, dict)
        wanted = (request.response_format or {}).get("type", "text")
        if forced or (
            wanted != "text" and request.tools and choice == "auto" and form and form.guide
        ):
            options.append("calls")
            assert form is not None, "a request with tools is checked first"
            rules += self._call_rules(request, form)
        if wanted != "text" and not forced:
            options.append("answer")
            rules.append(f"answer: %json {_schema_json(_response_schema(request))}")
        if not options:
            return None
        grammar = "\n".join([f"start: {' | '.join(options)}", *rules])
        _check_size(len(grammar))
        return grammar

    def check(self, grammar: str) -> None:
        """Prove in a process of its own that a grammar compiles, in reasonable time and memory.

        Raises:
            InvalidRequest: it does not, or uses something that llguidance does not know.
        """
        with self._lock:  # one child process, whoever is first
            checker = self._check
        if problem := checker.problem(grammar):
            raise InvalidRequest(
                f"No grammar can be made of this request: {problem.splitlines()[0]}. Simplify the "
                "schema.",
                param="tool_choice" if grammar.startswith("start: calls\n") else "response_format",
            )

    def replay(self, eos: list[int], python: Path) -> GrammarReplay:
        """What computes again what another engine's grammars allowed.

        That engine runs in `python`, and ends its replies by `eos`.
        """
        vocab = max(self._vocab, len(self._tokenizer))
        return GrammarReplay(self._serialized, vocab, eos, str(python))

    def logits_processor(self, grammar: str) -> GrammarLogitsProcessor:
        """Compile a grammar that passed `check`."""
        return GrammarLogitsProcessor(LLMatcher(self._tokens, grammar), self._vocab)

    @cached_property
    def _serialized(self) -> str:
        try:
            backend = copy(self._tokenizer.backend_tokenizer)
        except AttributeError as error:
            raise InvalidRequest(
                f"Constrained replies need a fast tokenizer, and this model has none: {error}"
            ) from error
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    @cached_property
    def _check(self) -> GrammarCheck:
        return GrammarCheck(self._serialized, self._vocab, self._eos)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(self._serialized, n_vocab=self._vocab, eos_token=self._eos)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def _call_rules(self, request: ChatRequest, form: ToolFormat | None) -> list[str]:
        functions = _allowed_functions(request)
        if form is None or (guide := form.guide) is None:
            raise InvalidRequest(
                f"got tool_choice={request.tool_choice!r}, and this model writes tool calls in a "
                f"format ({form.name if form else 'unknown'}) in which none can be forced here; "
                "expected 'auto' or 'none'.",
                param="tool_choice",
            )
        once = isinstance(request.tool_choice, dict) or not request.parallel_tool_calls
        rules = [f"body: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
        for index, function in enumerate(functions):
            name = function["name"]
            head = self._literal(guide.call(name, json.dumps(name)), form)
            schema = function.get("parameters") or _NO_ARGUMENTS
            rules.append(f"call_{index}: {head} args_{index} {self._literal(guide.tail, form)}")
            if guide.argument is None:
                rules.append(f"args_{index}: %json {_schema_json(schema)}")
            else:
                rules += self._argument_rules(f"args_{index}", schema, guide.argument, form)
        calls = f"{self._literal(guide.before, form)} body"
        if guide.between is not None and not once:
            calls += f" ({self._literal(guide.between, form)} body)*"
        return [*rules, f"calls: {calls} {self._literal(guide.after, form)}"]

    def _argument_rules(
        self, rule: str, schema: dict[str, Any], marks: tuple[str, str], form: ToolFormat
    ) -> list[str]:
        """Rules for arguments with marks around each, in the order of the schema."""
        _schema_json(schema)  # for its checks
        known = schema.get("properties")
        properties = cast(dict[str, Any], known) if isinstance(known, dict) else {}
        required = schema.get("required") or []
        rules: list[str] = []
        parts: list[str] = []
        end = self._literal(marks[1], form)
        for index, (key, one) in enumerate(properties.items()):
            begin = self._literal(marks[0].replace("{key}", key), form)
            value = f"{rule}_{index}"
            parts.append(f"({begin} {value}){'' if key in required else '?'}")
            if text := _free_text(key, one, schema):
                # Text ends where a token does that it cannot hold, or at the first end mark.
                special = end.startswith("<[")
                how = f": {text} {end}" if special else f"[suffix={json.dumps(marks[1])}]: {text}"
                rules.append(value + how)
            elif words := _words(one):
                rules.append(f"{value}: ({' | '.join(map(json.dumps, words))}) {end}")
            else:
                root = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                rules += [f"{value}: {value}_json {end}"]
                rules += [f"{value}_json: %json {_schema_json(one | root)}"]
        return [f"{rule}: {' '.join(parts) or json.dumps('')}", *rules]

    def _literal(self, text: str, form: ToolFormat) -> str:
        """Lark's notation for `text`, in which the format's markers may be tokens of their own."""
        parts = re.split(
            "|".join(f"({re.escape(marker)})" for marker in form.markers) or r"(?!)", text
        )
        return " ".join(self._token(part) for part in parts if part)

    def _token(self, text: str) -> str:
        token = self._ids.get(text)
        if token is not None and self._tokens.is_special_token(token):
            return f"<[{token}]>"
        return json.dumps(text)


def _words(schema: Any) -> list[str]:
    """The strings that a schema allows; empty if it does not list strings alone."""
    words = schema.get("enum") or [schema.get("const")]
    return words if all(isinstance(word, str) for word in words) else []


def _free_text(key: str, schema: Any, root: dict[str, Any]) -> str:
    """A pattern for a value that is written without quotes; empty if it is JSON or one of few.

    Raises:
        InvalidRequest: the schema asks of a string what is not enforced in text without quotes.
    """
    types = types_of(schema, root)
    if isinstance(schema, dict) and (_words(schema) or (types and "string" not in types)):
        return ""
    told = cast(dict[str, Any], schema) if isinstance(schema, dict) else {}
    if unknown := told.keys() & {"pattern", "format"}:
        raise InvalidRequest(
            f"got {unknown.pop()!r} for the argument {key!r} of a tool that is to be called, and "
            "this model writes strings without quotes, where it cannot be enforced; expected a "
            "string without it. Leave it out, or use tool_choice='auto'.",
            param="tools",
        )
    return f"/(?s:.{{{told.get('minLength', 0)},{told.get('maxLength', '')}}})/"


def _schema_json(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise InvalidRequest(f"got a schema of {type(schema).__name__}, expected a JSON object.")
    _check_size(len(json.dumps(schema)))
    return json.dumps({**_closed(schema), "x-guidance": _JSON})


def _check_size(chars: int) -> None:
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


def _response_schema(request: ChatRequest) -> Any:
    wanted = request.response_format or {}
    kind = wanted.get("type")
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(wanted.get("json_schema"), dict):
        return wanted["json_schema"].get("schema", {"type": "object"})
    raise InvalidRequest(
        f"got response_format {kind!r}, expected 'text', 'json_object' or 'json_schema' with a "
        "field 'json_schema'.",
        param="response_format",
    )


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
