"""What scripted judges have in common: they read RULER's prompt and score its runs by a rule.

Such a judge stands where a paid model would be called, and is given what that would be given:
RULER's prompt about a group of runs, and nothing else.
"""

from __future__ import annotations

import html
import json
import re
from abc import abstractmethod
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

Block = tuple[str, str]
"""What kind of thing was said or done (``user``, ``call``, ``result`` …), and its text."""


class RuleJudge(BaseChatModel):
    """Reads the runs in RULER's prompt and scores them by the rule of a subclass."""

    @property
    def _llm_type(self) -> str:
        return "scripted-judge"

    @abstractmethod
    def verdicts(self, runs: dict[str, list[Block]]) -> dict[str, tuple[float, str]]:
        """Score in [0, 1] and reason for each run."""

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        runs = read_runs(messages[-1].text)
        scores = [
            {"id": name, "explanation": why, "score": score}
            for name, (score, why) in self.verdicts(runs).items()
        ]
        return result_of(messages, json.dumps({"scores": scores}))


def result_of(messages: list[BaseMessage], reply: str) -> ChatResult:
    """A reply as a chat model gives it, with its words counted as tokens."""
    asked = sum(len(message.text.split()) for message in messages)
    said = len(reply.split())
    usage = {"input_tokens": asked, "output_tokens": said, "total_tokens": asked + said}
    message = AIMessage(reply, usage_metadata=usage)
    return ChatResult(generations=[ChatGeneration(message=message)])


def read_runs(page: str) -> dict[str, list[Block]]:
    """The runs in a judge's prompt, by their ids, with the parts that they share put in front.

    Raises:
        ValueError: the page is not written as `langchain_art.evaluators.ruler.prompt` writes it.
    """
    mark = re.match(r"mark (\w+)\n", page)
    if mark is None:
        raise ValueError(f"expected RULER's prompt, which begins with its mark, got {page[:80]!r}")
    pieces = re.split(rf"^<{mark[1]} ([^>]*)> ?", page, flags=re.MULTILINE)[1:]
    notes: dict[str, str] = {}
    follows: dict[str, str | None] = {}
    blocks: dict[str, list[Block]] = {}
    runs, current = list[str](), list[Block]()
    for tag, text in zip(pieces[::2], pieces[1::2], strict=True):
        said = html.unescape(text.removesuffix("\n"))
        kind, *rest = tag.split()
        if kind == "note":
            notes[rest[0]] = said
        elif kind in ("part", "run"):
            current = blocks.setdefault(rest[0], [])
            follows[rest[0]] = rest[2] if len(rest) == 3 else None
            runs += [rest[0]] if kind == "run" else []
        elif kind not in ("task", "tools", "end"):
            current.append((kind, notes[rest[-1]] if "=" in rest else said))
    return {name: _with_parts(name, follows, blocks) for name in runs}


def _with_parts(
    name: str, follows: dict[str, str | None], blocks: dict[str, list[Block]]
) -> list[Block]:
    before = follows[name]
    return [*(_with_parts(before, follows, blocks) if before else []), *blocks[name]]
