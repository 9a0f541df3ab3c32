"""Models that cost nothing, in place of the two hosted ones that the example asks.

`ScriptedWriter` writes tasks from what the server's overview says; it is given the prompt that a
hosted model would be given, and nothing else. `ScriptedJudge` reads RULER's prompt. It does not
know the right answers; its rule is what a careful reader of the runs would do:

1. Which measure, station and month are asked for?
2. What do the results of tools say of it, in any run of the group?
3. A run that answered so is worth 1. One that read such a result and answered otherwise is worth
   0.3; one that listed the stations of the right city, 0.1. Any other is worth 0.

So it errs where no run of a group read the right page, as any reader would.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult

from examples.support.scripted_judge import Block, RuleJudge, result_of

QUESTIONS = (
    "What is the {measure} at {station} in {month}?",
    "How much {measure} is usual at {station} in {month}?",
)
READ_PAGE, LISTED = 0.3, 0.1
_ASKED = re.compile(r"(\w+) (?:is usual )?at (\w+ \w+) in (\w+)\?")


class ScriptedWriter(BaseChatModel):
    """Writes tasks about the stations, months and measures of a server's overview."""

    @property
    def _llm_type(self) -> str:
        return "scripted-writer"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = messages[-1].text
        offered = {
            name: [re.sub(r" \(.*\)", "", one) for one in listed.split(", ")]
            for name, listed in re.findall(r"^(\w+): (.+)$", asked, re.MULTILINE)
        }
        wanted = re.search(r"Write (\d+) tasks\. (.*)$", asked)
        if wanted is None or not {"stations", "months", "measures"} <= set(offered):
            raise ValueError(f"expected a request for tasks about climate normals, got {asked!r}")
        rng = random.Random(wanted[2])
        tasks: list[dict[str, str]] = []
        for _ in range(int(wanted[1])):
            station = rng.choice(offered["stations"])
            text = rng.choice(QUESTIONS).format(
                measure=rng.choice(offered["measures"]),
                station=station,
                month=rng.choice(offered["months"]),
            )
            tasks.append({"task": text, "about": station})
        return result_of(messages, json.dumps({"tasks": tasks}))


class ScriptedJudge(RuleJudge):
    """Scores the runs in RULER's prompt by the rule of this module."""

    def verdicts(self, runs: dict[str, list[Block]]) -> dict[str, tuple[float, str]]:
        """Score and reason for each run, by the rule."""
        read = {name: _values_read(blocks) for name, blocks in runs.items()}
        borne_out = set[str]().union(*read.values())
        return {name: _verdict(runs[name], read[name], borne_out) for name in runs}


def _asked(blocks: list[Block]) -> tuple[str, str, str]:
    question = next((text for kind, text in blocks if kind == "user"), "")
    found = _ASKED.search(question)
    return (found[1], found[2], found[3]) if found else ("", "", "")


def _values_read(blocks: list[Block]) -> set[str]:
    """What the pages that a run has read say of what it was asked for."""
    measure, station, month = _asked(blocks)
    says = re.compile(rf"^{re.escape(station)}, {re.escape(month)}\n.*\b({measure} \d+)")
    found = (says.search(text) for kind, text in blocks if kind == "result")
    return {match[1] for match in found if match}


def _verdict(blocks: list[Block], read: set[str], borne_out: set[str]) -> tuple[float, str]:
    kind, text = blocks[-1] if blocks else ("", "")
    said = text.strip(" .\n") if kind == "assistant" else ""
    if said and said in borne_out:
        return 1.0, f"answered {said}, which a page about the station says"
    if read:
        return READ_PAGE, f"read that it is {' or '.join(sorted(read))}, and answered {said!r}"
    station = _asked(blocks)[1]
    if station and any(k == "result" and station in t.splitlines() for k, t in blocks):
        return LISTED, f"listed the stations, and answered {said!r}"
    return 0.0, f"answered {said!r}, which no page that was read says"
