"""Guided decoding: replies that follow a JSON schema or must call a tool, by a logits processor.

The grammar is in llguidance's dialect of Lark; the embedded sampler applies it to its logits, and
vLLM gets its text.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from langchain_art.errors import InvalidRequest
from langchain_art_server.algorithms.sequences import token_sets
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat.grammar_check import GrammarCheck, GrammarReplay
from langchain_art_server.backends.chat.json_schemas import check_size, schema_json
from langchain_art_server.backends.chat.tool_calls.call_format import ToolFormat
from langchain_art_server.backends.chat.tool_calls.call_grammar import call_rules, literal

#: A schema in a grammar.
_SCHEMA = re.compile(r"%json (.*)$", re.MULTILINE)


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
        """Reason why no token is allowed next; empty if one is."""
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
            InvalidRequest: there is no tool to call, its schema has what the format of calls
                cannot enforce, or there is too much of a schema.
        """
        options: list[str] = []
        rules: list[str] = []
        choice = request.tool_choice
        forced = choice == "required" or isinstance(choice, dict)
        wanted = (request.response_format or {}).get("type", "text")
        if forced or (wanted != "text" and request.tools and choice == "auto" and form):
            options.append("calls")
            rules += call_rules(request, form, self._token)
        if wanted != "text" and not forced:
            options.append("answer")
            before = literal(form.guide.answer, form, self._token) if form else ""
            rules.append(f"answer: {before} json")
            rules.append(f"json: %json {schema_json(_response_schema(request))}")
        if not options:
            return None
        grammar = "\n".join([f"start: {' | '.join(options)}", *rules])
        check_size(len(grammar))
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
                f"No grammar can be made of this request: {_in_words(problem, grammar)}. Simplify "
                "the schema.",
                param="tool_choice" if grammar.startswith("start: calls\n") else "response_format",
            )

    def replay(self, eos: list[int], python: Path) -> GrammarReplay:
        """Replay that computes again what another engine's grammars allowed.

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

    def _token(self, text: str) -> str:
        token = self._ids.get(text)
        if token is not None and self._tokens.is_special_token(token):
            return f"<[{token}]>"
        return json.dumps(text)


def _in_words(problem: str, grammar: str) -> str:
    """A problem of a grammar with the fields of its schemas, instead of a place in its text."""
    problem = re.split(r"\n\s*\d+ \| ", problem)[0]  # then come lines of the grammar
    words = " ".join(re.sub(r"^at \d+\(\d+\): ", "", problem).split())
    schemas = [json.loads(line) for line in _SCHEMA.findall(grammar)]
    fields = sorted({".".join(path) for one in schemas for path in _places(one, problem)} - {""})
    return f"{words} (at {', '.join(fields)})" if fields else words


def _places(schema: Any, problem: str, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Places where a schema has a key or value that a problem quotes."""
    if isinstance(schema, list):
        for part in cast("list[Any]", schema):
            yield from _places(part, problem, path)
    elif isinstance(schema, dict):
        for key, value in cast("dict[str, Any]", schema).items():
            named = isinstance(value, str) and key in ("type", "format", "pattern")
            if f'"{key}"' in problem or (named and value in problem):
                yield path
            if key in ("properties", "$defs") and isinstance(value, dict):
                for name, part in cast("dict[str, Any]", value).items():
                    yield from _places(part, problem, (*path, name))
            else:
                yield from _places(value, problem, path)


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
