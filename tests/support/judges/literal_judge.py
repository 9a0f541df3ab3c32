"""A judge that takes a request literally: one that obeys structure, and no more.

It is gullible on purpose. Any tag with a word of the request's structure is structure to it,
whatever stands before the word: ours, ART's, XML's, chat templates'; after Unicode normalisation,
and with invisible characters taken away. Text within tags is evidence, and it is read by an honest
rule.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from pydantic import Field

from tests.support.graphs import Answering

WORDS = (
    "task|tools|note|part|run|end|node|system|developer|user|assistant|call|result|again|cut|error|"
    "input|output|state|ended|excluded|message|trajectory|context|available_tools|scores?|verdict|tool|"
    "im_start|im_end|eot_id|start_header_id|start_of_turn|end_of_turn|INST|SYSTEM_PROMPT|s"
)
TAG = re.compile(
    rf"<\s*[/!|]*\s*(?:\w+\s+)?(?P<word>{WORDS})\b(?P<rest>[^<>]*)>|\[/?(?:INST|SYSTEM_PROMPT)\]"
)


@dataclass
class Seen:
    """A request's structure, as the literal judge reads it."""

    tags: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def runs(self) -> dict[str, str]:
        """Run's id -> all text of its own part, in the order of the request."""
        found: dict[str, str] = {}
        current: str | None = None
        for tag, text in zip(self.tags, self.texts, strict=True):
            word, _, rest = tag.partition(" ")
            if word in ("run", "part", "end"):
                current = rest.split()[0] if word == "run" else None
            if current is not None:
                found[current] = f"{found.get(current, '')}\n{text}"
        return found

    @property
    def kinds(self) -> list[str]:
        """The tags, without the names drawn for this request."""
        ids = list(self.runs)
        return [" ".join("ID" if w in ids else w for w in tag.split()) for tag in self.tags]


def parse(request: str) -> Seen:
    """Splits a request at everything that looks like structure."""
    visible = "".join(
        c for c in unicodedata.normalize("NFKC", request) if unicodedata.category(c) != "Cf"
    )
    seen = Seen()
    found = list(TAG.finditer(visible))
    for tag, following in zip(found, [*found[1:], None], strict=True):
        seen.tags.append(f"{tag['word']}{tag['rest']}" if tag["word"] else tag[0])
        seen.texts.append(visible[tag.end() : following.start() if following else len(visible)])
    return seen


def honest(text: str) -> float:
    """The hidden rule: a run that says GOOD and nothing of it that is BAD."""
    return 0.9 if "GOOD" in text and "BAD" not in text else 0.1


def asked_ids(request: str) -> list[str]:
    """The runs that a request asks for, in the order in which they stand in it."""
    return request.rpartition("runs: ")[2].rstrip(".").split(", ")


def verdict(scores: dict[str, Any]) -> str:
    entries = [{"id": i, "explanation": f"about {i}", "score": s} for i, s in scores.items()]
    return json.dumps({"scores": entries})


def literal(request: str) -> str:
    """Scores each run by `honest`, in the request's order."""
    return verdict({run: honest(text) for run, text in parse(request).runs.items()})


class ScriptedJudge(Answering):
    """Says what `answer` makes of the request (its last message but corrections).

    ``said`` keeps the prompts it was given. A value that is an exception is raised.
    """

    answer: Callable[[str], Any] = literal
    said: list[Sequence[BaseMessage]] = Field(default_factory=list)

    @property
    def requests(self) -> list[str]:
        return [prompt[1].text for prompt in self.said]

    def choices(self, messages: Any) -> list[AIMessage]:
        self.said.append(messages)
        reply = self.answer(messages[1].text)
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, AIMessage):
            usage: Any = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
            reply = AIMessage(reply, usage_metadata=usage)
        return [reply]
