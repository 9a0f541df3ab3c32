"""Guided decoding: replies that follow a JSON schema or must call a tool, by a logits processor.

The grammar is in llguidance's dialect of Lark; the embedded sampler applies it to its logits, and
vLLM gets its text.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Iterator
from copy import copy
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from langchain_art.errors import ArtError, InvalidRequest
from langchain_art_server.algorithms.sequences import token_sets
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat import grammar_child
from langchain_art_server.backends.chat.grammar_child import LENGTH
from langchain_art_server.backends.chat.tool_calls.call_format import ToolFormat
from langchain_art_server.backends.chat.tool_calls.call_grammar import (
    call_rules,
    check_size,
    literal,
    schema_json,
)

_SCHEMA = re.compile(r"%json (.*)$", re.MULTILINE)  # A schema in a grammar
#: Seconds of CPU (the system counts whole ones) and bytes for one grammar. Ordinary schemas take
#: milliseconds, and llguidance calls those of a second "extremely complex".
_CPU_SECONDS, _MEMORY = 1.0, 1 << 30
#: Seconds until an answer: on a busy machine the seconds of CPU take longer.
_ANSWER_SECONDS, _START_SECONDS = 15.0, 120.0
#: The same for the masks of a reply, of which each takes up to a millisecond.
_REPLY_CPU_SECONDS, _REPLY_SECONDS = 20.0, 60.0
_MAX_KEPT = 4096  # grammars whose outcome is kept, by digest
_REASONS: dict[int, str] = {
    signal.SIGXCPU: f"compiling it takes more than {_CPU_SECONDS:.0f} s",
    signal.SIGKILL: f"compiling it took {_ANSWER_SECONDS:.0f} s, or too much memory",
    signal.SIGABRT: f"compiling it takes more than {_MEMORY >> 20} MiB, or too deep a recursion",
}


class GrammarChild:
    """The process with the compiler, started when it is asked, and again after it ended.

    It proves that grammars compile, within limits, and computes what they allowed at each token of
    a reply that another engine sampled. One question at a time; used by several threads.

    Args:
        tokenizer: of the library tokenizers, serialised.
        vocab: size of the logits.
        eos: ids of the tokens that end a reply.
        python: the interpreter; it needs llguidance and nothing else. That of the engine whose
            replies are computed again: another version of llguidance may allow other tokens.
    """

    def __init__(
        self, tokenizer: str, vocab: int, eos: list[int], python: str = sys.executable
    ) -> None:
        setup = {"tokenizer": tokenizer, "vocab": vocab, "eos": eos, "memory": _MEMORY}
        self._setup, self._python = json.dumps(setup).encode(), python
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[bytes, str] = OrderedDict()

    def _ask(self, question: dict[str, Any], seconds: float) -> str | None:
        """The child's answer, or None if it ended."""
        if self._child is not None and self._child.poll() is not None:
            self._reap()  # it ended while it had nothing to do
        if self._child is None:
            self._child = subprocess.Popen(
                [self._python, "-I", str(Path(grammar_child.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self._send(self._setup, _START_SECONDS) is None:
                status = self._reap()
                raise ArtError(f"The compiler of grammars cannot be started (status {status}).")
        return self._send(json.dumps(question).encode(), seconds)

    def _send(self, data: bytes, seconds: float) -> str | None:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        limit = threading.Timer(seconds, child.kill)
        limit.daemon = True
        limit.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(LENGTH.pack(len(data)) + data)
                child.stdin.flush()
            head = child.stdout.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            return child.stdout.read(LENGTH.unpack(head)[0]).decode()
        finally:
            limit.cancel()

    def _reap(self) -> int:
        """End the child; returns its status. The next grammar starts another."""
        child, self._child = self._child, None
        assert child is not None
        with contextlib.suppress(BrokenPipeError), child:
            child.kill()
        return child.returncode

    def problem(self, grammar: str) -> str:
        """Reason why the grammar cannot be compiled within the limits; empty if it can be.

        Raises ArtError: the child process cannot be started.
        """
        key = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if key in self._outcomes:
                self._outcomes.move_to_end(key)
                return self._outcomes[key]
            asked = {"grammar": grammar, "cpu": _CPU_SECONDS}
            found, status = self._ask(asked, _ANSWER_SECONDS), 0
            if found is None:
                status = self._reap()
                ended = f"compiling it ended the compiler (status {status})"
                found = _REASONS.get(-status, ended)
            if -status != signal.SIGKILL:  # a busy machine may be the reason
                self._outcomes[key] = found
                if len(self._outcomes) > _MAX_KEPT:
                    self._outcomes.popitem(last=False)
            return found

    def masks(self, grammar: str, reply: list[int]) -> list[bytes] | None:
        """Bits of the allowed tokens, for each token; fewer if the grammar forbids a token.

        None if that takes too long.

        Raises ArtError: the child process cannot be started.
        """
        with self._lock:
            asked = {"grammar": grammar, "reply": reply, "cpu": _REPLY_CPU_SECONDS}
            answer = self._ask(asked, _REPLY_SECONDS)
            if answer is None:
                self._reap()
                return None
        found = json.loads(answer)
        masks = [b64decode(mask) for mask in found["masks"]]
        return [masks[number] for number in found["numbers"]]


class GrammarLogitsProcessor:
    """Masks the tokens that the grammar of one reply forbids next."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def apply(self, logits: Tensor) -> bytes:
        """Set the logits ``[vocab]`` of forbidden tokens to -inf, in place.

        Returns the set of the tokens that are allowed next (`token_sets`).
        """
        allowed = token_sets.of_bits(self._matcher.compute_bitmask(), self._vocab)
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
    """Makes grammars for one tokenizer and `vocab` logits. Used by several threads."""

    def __init__(self, tokenizer: Any, vocab: int, eos: list[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, eos
        self._lock = threading.Lock()

    def grammar(self, request: ChatRequest, form: ToolFormat | None) -> str | None:
        """The grammar of the reply, as Lark; None if the reply is free.

        Raises InvalidRequest: there is no tool to call, its schema has what the format of calls
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

        Raises InvalidRequest: it does not, or uses something that llguidance does not know.
        """
        with self._lock:  # one child process, whoever is first
            checker = self._check
        if problem := checker.problem(grammar):
            raise InvalidRequest(
                f"No grammar can be made of this request: {_in_words(problem, grammar)}. Simplify "
                "the schema.",
                param="tool_choice" if grammar.startswith("start: calls\n") else "response_format",
            )

    def replay(self, eos: list[int], python: Path) -> GrammarChild:
        """Replay that computes again what another engine's grammars allowed.

        That engine runs in `python`, and ends its replies by `eos`.
        """
        vocab = max(self._vocab, len(self._tokenizer))
        return GrammarChild(self._serialized, vocab, eos, str(python))

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
    def _check(self) -> GrammarChild:
        return GrammarChild(self._serialized, self._vocab, self._eos)

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
