"""A judge for the demo that costs nothing: a chat model that follows a rule instead of a network.

It stands where a paid model would be called, and is given what that would be given: RULER's prompt
about a group of runs, and nothing else. It does not know the right dates. Its rule is what a
careful reader of the runs would do:

1. Which event is asked for? It stands in quotes in the question.
2. What do the mails say of it that were read, in any run of the group? ``… is on 14 March`` and
   ``… moves from 2 May to 14 March`` say when it is; whatever else has a date does not.
3. A run that answered once, with a date that such a mail bears out, is worth 1. One that read such
   a mail and answered otherwise, or not at all, is worth 0.2. Any other is worth 0.

So it errs where all runs of a group failed to read the right mail, as any reader would.
"""

from __future__ import annotations

import json
import re

from examples.support.scripted_judge import Block, RuleJudge

READ_MAIL = 0.2
DATE = r"(\d{1,2} [A-Z][a-z]+)"


class ScriptedJudge(RuleJudge):
    """Reads the runs in RULER's prompt and scores them by the rule of this module.

    Example:
        >>> from langchain_art import RulerEvaluator
        >>> ruler = RulerEvaluator(ScriptedJudge())  # doctest: +SKIP
    """

    def verdicts(self, runs: dict[str, list[Block]]) -> dict[str, tuple[float, str]]:
        """Score and reason for each run, by the rule."""
        return verdicts(runs)


def verdicts(runs: dict[str, list[Block]]) -> dict[str, tuple[float, str]]:
    """Score and reason for each run, by the rule."""
    dates = {name: _dates_read(blocks) for name, blocks in runs.items()}
    borne_out = set[str]().union(*dates.values())
    return {name: _verdict(runs[name], dates[name], borne_out) for name in runs}


def _verdict(blocks: list[Block], read: set[str], borne_out: set[str]) -> tuple[float, str]:
    answers = [said for kind, text in blocks if kind == "call" and (said := _answer(text))]
    if len(answers) == 1 and answers[0] in borne_out:
        return 1.0, f"answered {answers[0]}, which a mail about the event says"
    if read:
        return READ_MAIL, f"read that it is {' or '.join(sorted(read))}, and answered {answers}"
    return 0.0, f"answered {answers}, which no mail that was read says"


def _dates_read(blocks: list[Block]) -> set[str]:
    """What the mails that a run has read say of the event that it was asked for."""
    question = next((text for kind, text in blocks if kind == "user"), "")
    asked = re.search(r'"([^"]+)"', question)
    if asked is None:
        return set()
    says = re.compile(rf"\b{re.escape(asked[1])} (?:is on|moves from {DATE} to) {DATE}\.")
    results = [text for kind, text in blocks if kind == "result"]
    return {found[2] for text in results for found in says.finditer(text)}


def _answer(call: str) -> str | None:
    """The text that a call of the tool `answer` gives."""
    name, _, arguments = call.partition(" ")
    if name != "answer":
        return None
    try:
        text = json.loads(arguments)["text"]
    except (ValueError, KeyError, TypeError):
        return None
    return " ".join(text.strip(" .").split()) if isinstance(text, str) else None
