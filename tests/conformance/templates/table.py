"""Findings about each family's template, and the table that shows them.

The replies are forced; their tokens are single bytes where that can be, which no tokenizer gives.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat.chat_template import ChatTemplate, Prompt
from langchain_art_server.backends.chat.output_processor import OutputProcessor
from tests.conformance.templates.families import FAMILIES
from tests.support.tiny_models import ask, tokenizer

HERE = Path(__file__).parent
#: Any token of these shapes in a template is one of its tokenizer's own.
SPECIAL = re.compile(r"<[|｜][^|｜<>\s]+[|｜]>|<\|\"\|>|<\|?\w+\|?>|\[/?[A-Z_]{4,}\]")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer", "description": "How many."},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = ("weather", {"city": "Paris", "days": 2})
QUESTION = {"role": "user", "content": "and the mail"}


def template_of(name: str) -> ChatTemplate:
    """The template with a tokenizer that has its special tokens."""
    family, text = FAMILIES[name], (HERE / f"{name}.jinja").read_text()
    made = copy.deepcopy(tokenizer())
    wanted = {*SPECIAL.findall(text), *family.eos, *family.tokens}
    made.add_tokens([AddedToken(one, special=True, normalized=False) for one in sorted(wanted)])
    made.chat_template = text
    return ChatTemplate(made, {made.convert_tokens_to_ids(one) for one in family.eos})


def sampled(template: ChatTemplate, text: str) -> list[int]:
    """Tokens of a text that the tokenizer would not choose: single bytes, and special tokens."""
    ids = template.tokenizer.encode(text, add_special_tokens=False)
    return [i for one in ids for i in _bytes(template, one)]


@functools.cache
def _bytes(template: ChatTemplate, token: int) -> list[int]:
    letters = template.text([token])
    if token in template.tokenizer.added_tokens_decoder or "\ufffd" in letters:  # part of a letter
        return [token]
    encode = template.tokenizer.encode
    return [i for letter in letters for i in encode(letter, add_special_tokens=False)]


@dataclass(frozen=True)
class Turn:
    """A prompt, and what was read of the reply to it."""

    prompt: Prompt
    said: list[int]
    content: str
    calls: list[dict[str, Any]]

    @property
    def ids(self) -> list[int]:
        """All that the next prompt begins with, if it does not fork."""
        return [*self.prompt.ids, *self.said]


def read(
    template: ChatTemplate, request: ChatRequest, ids: list[int], *, one_by_one: bool = False
) -> tuple[str, list[dict[str, Any]]]:
    """The content and the calls of a reply, as a stream's deltas or as the whole."""
    output = OutputProcessor(request, template, [])
    deltas = [output.update(ids[:at]) for at in range(1, len(ids))] if one_by_one else []
    deltas.append(output.update(ids, last=True))
    content = "".join(delta.content for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert (content, calls) == (output.parser.content, output.parser.calls)
    return content, calls


def converse(template: ChatTemplate, texts: Iterable[str]) -> list[Turn]:
    """A turn for each text that the model says; a tool's answer, or a question, follows on it."""
    asked: list[dict[str, Any]] = ask().messages
    turns: list[Turn] = []
    for text in texts:
        prompt, said = template.prompt(asked, TOOLS), sampled(template, text)
        content, calls = read(template, ask(messages=asked, tools=TOOLS), said)
        turns.append(Turn(prompt, said, content, calls))
        reply: dict[str, Any] = {"role": "assistant", "content": content or None}
        reply |= {"tool_calls": calls} if calls else {}
        template.remember(prompt, said, reply)
        result = [{"role": "tool", "tool_call_id": c["id"], "content": "sunny"} for c in calls]
        asked = [*asked, reply, *(result or [QUESTION])]
    return turns


@functools.cache
def go_through(name: str) -> tuple[list[Turn], list[Row]]:
    """A call, an answer and a call, and the rows that they are trained in."""
    family = FAMILIES[name]
    turns = converse(template_of(name), (family.call, family.answer, family.call))
    samples = [
        SampledCall(str(number), one.prompt.ids, one.said, [-1.0] * len(one.said))
        for number, one in enumerate(turns)
    ]
    return turns, rows_of_run(samples)


def same_tokens(turns: list[Turn]) -> list[bool]:
    """True if each later prompt begins with the last one and the tokens that were sampled."""
    return [
        later.prompt.ids[: len(before.ids)] == before.ids
        for before, later in itertools.pairwise(turns)
    ]


def functions(calls: list[dict[str, Any]]) -> list[Any]:
    """Names and arguments of calls."""
    told = [call["function"] for call in calls]
    return [(one["name"], json.loads(one["arguments"])) for one in told]


def row(name: str) -> str:
    """A family's line in the table of ``docs/templates.md``."""
    family, template = FAMILIES[name], template_of(name)
    source = "its own" if "Copied from" in (HERE / f"{name}.jinja").read_text() else "ours"
    if family.refused:
        return f"| {family.models} | refused: the {family.refused} | {source} | | | |"
    (turns, rows), form = go_through(name), template.tools
    after = ["same tokens" if same else "forks" for same in same_tokens(turns)]
    return (
        f"| {family.models} | `{form.name if form else None}` | {source} | "
        f"{after[0]} | {after[1]} | {len(rows)} |"
    )
