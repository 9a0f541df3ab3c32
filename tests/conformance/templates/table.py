"""What is seen of each family's template, and the page that says so.

A conversation of three calls: a tool is called, its answer is told of, another question is asked.
The replies are forced; their tokens are single bytes where that can be, which no tokenizer gives.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from langchain_art_server.algorithms.sequences.training_rows import SampledCall, rows_of_run
from langchain_art_server.backends.base import ChatRequest
from langchain_art_server.backends.chat.chat_template import ChatTemplate, Prompt
from langchain_art_server.backends.chat.output_processor import OutputProcessor
from tests.conformance.templates.families import FAMILIES, THOUGHT
from tests.support.live_server import REPO
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
class Seen:
    """What was seen of one conversation.

    Attributes:
        shown: the prompt has the tool's name.
        parsed: the call was read, and the answer's text.
        streamed: token by token, the deltas are the reply.
        same: whether the prompts with the tool's answer, and with the next question, begin with
            the tokens that were sampled.
        thoughts: how often these prompts tell what was thought.
        rows: rows that the calls go into.
        trained: each sampled token is trained once.
    """

    shown: bool
    parsed: bool
    streamed: bool
    same: tuple[bool, bool]
    thoughts: tuple[int, int]
    rows: int
    trained: bool


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


@functools.cache
def go_through(name: str) -> Seen:
    """Three calls: a tool, its answer, another question, after which the same reply is given."""
    template, family = template_of(name), FAMILIES[name]
    asked: list[dict[str, Any]] = ask().messages
    samples: list[SampledCall] = []
    prompts: list[Prompt] = []
    replies: list[tuple[str, list[Any]]] = []
    streams: list[tuple[str, list[Any]]] = []
    for number, text in enumerate((family.call, family.answer, family.call)):
        request = ask(messages=asked, tools=TOOLS)
        prompt, said = template.prompt(asked, TOOLS), sampled(template, text)
        samples.append(SampledCall(str(number), prompt.ids, said, [-1.0] * len(said)))
        prompts.append(prompt)
        content, calls = read(template, request, said)
        replies.append((content, functions(calls)))
        content_2, calls_2 = read(template, request, said, one_by_one=True)
        streams.append((content_2, functions(calls_2)))
        reply: dict[str, Any] = {"role": "assistant", "content": content or None}
        reply |= {"tool_calls": calls} if calls else {}
        template.remember(prompt, said, reply)
        result = [{"role": "tool", "tool_call_id": c["id"], "content": "sunny"} for c in calls]
        asked = [*asked, reply, *(result or [QUESTION])]
    rows = rows_of_run(samples)
    return Seen(
        shown="weather" in prompts[0].text,
        parsed=[calls for _, calls in replies] == [[CALL], [], [CALL]]
        and replies[1][0].strip().endswith("It is sunny."),
        streamed=streams == replies,
        same=(_begins(samples[1], samples[0]), _begins(samples[2], samples[1])),
        thoughts=(prompts[1].text.count(THOUGHT), prompts[2].text.count(THOUGHT)),
        rows=len(rows),
        trained=sum(sum(row.mask) for row in rows) == sum(len(s.token_ids) for s in samples),
    )


def _begins(later: SampledCall, earlier: SampledCall) -> bool:
    known = [*earlier.prompt_token_ids, *earlier.token_ids]
    return list(later.prompt_token_ids[: len(known)]) == known


def functions(calls: list[dict[str, Any]]) -> list[Any]:
    """Names and arguments of calls."""
    told = [call["function"] for call in calls]
    return [(one["name"], json.loads(one["arguments"])) for one in told]


# --- the page -------------------------------------------------------------------------------------

PAGE = REPO / "docs" / "templates.md"
HEAD = """\
# Chat templates and tool calls

Written by `tests/conformance/templates` with `UPDATE_DOCS=1`; edit that.

A model writes tool calls in its own way, and its chat template writes them again in later prompts.
The server reads the format off the template: it renders a call and looks which format reads it.
With vLLM, `tool_format` names one that the template does not show.

What a model thinks stays in its reply's text, between `<think>` and `</think>`; so does gpt-oss's
analysis channel. In later prompts the template gets it in its own field, and shows or drops it.

A request with tools is refused with status 400 where the template shows no tools to the model, and
where calls are in a format that is not in this table. Each role's content is rendered at the start,
as text and as parts, and given in the form that comes out; a message of a role that the template
leaves out is refused. A template that leaves out the messages of the user or the replies, or that
cannot be rendered, ends the start.

The families' templates are the models' own or written from their documentation (*ours*). Each goes
through a conversation here: a tool is called, its answer follows, then another question. The
replies are forced, in the template's own notation, as tokens that no tokenizer would give; random
conversations have the other notations that models choose. *Same tokens* means that the next prompt
begins with exactly the tokens of the last prompt and reply, so both are computed once and trained
in one row. Where a template drops what was thought, the prompt is another one, and the reply is
trained in a row of its own (*forks*). Each sampled token is trained once, either way.

| family | format | template | read, streamed | after a tool | after a question | rows |
|---|---|---|---|---|---|---|"""
TAIL = """
The template's source and licence are in the first line of its file, in
`tests/conformance/templates`.
"""


def row(name: str) -> str:
    """A family's line in the table."""
    family, template = FAMILIES[name], template_of(name)
    source = "its own" if "Copied from" in (HERE / f"{name}.jinja").read_text() else "ours"
    if family.refused:
        return f"| {family.models} | refused: the {family.refused} | {source} | | | | |"
    seen, form = go_through(name), template.tools
    read = "yes" if seen.shown and seen.parsed and seen.streamed else "**no**"
    after = ["same tokens" if same else "forks" for same in seen.same]
    return (
        f"| {family.models} | `{form.name if form else None}` | {source} | {read} | "
        f"{after[0]} | {after[1]} | {seen.rows} |"
    )


def page() -> str:
    return "\n".join([HEAD, *map(row, FAMILIES), TAIL])
