"""A reviewer for the demo who costs nothing: he marks and corrects runs by a rule.

He is given what a person has in front of him: a run as it is stored (question, calls, what tools
returned), and the inbox to look things up in, with the same two tools as the agent. Neither the
scenario with the right date nor its rewards are given to him. His rule is that of a careful reader:

1. Which event is asked for? It stands in quotes in the question.
2. He searches the inbox for it and reads the hits. The mail that says ``… is on 14 March`` or
   ``… moves from 2 May to 14 March`` has the date; whatever else has a date does not.
3. A run that answered once, with that date, is worth 1. One that read the mail and answered
   otherwise, or not at all, is worth 0.5. Any other is worth 0.
4. In a run that is worth less than 1, he corrects the first call that he would have made otherwise:
   a search for the event until a search has listed the mail, then the mail's number, then its date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from examples.email_search.inbox import Inbox
from langchain_art.wire import Message, Review, Trajectory

REVIEWER = "scripted"
READ_MAIL = 0.5
_DATE = r"(\d{1,2} [A-Z][a-z]+)"
Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""


@dataclass(frozen=True)
class Mail:
    """The mail that says when the event is."""

    id: int
    text: str
    date: str


def review(run: Trajectory, inbox: Inbox, at: float) -> list[Review]:
    """The reward of a run, and the correction of one of its calls, if one is wrong.

    Args:
        run: with at least one call.
        inbox: of the question.
        at: when, in seconds since the epoch.

    Raises:
        ValueError: the question names no event, or no mail of the inbox says when it is.
    """
    event = _event(run)
    mail = find_mail(event, inbox)
    worth = _worth(run, mail)
    about: dict[str, Any] = {"source": REVIEWER, "reviewer": REVIEWER, "at": at}
    about["trajectory"] = run.id
    mark = Review(id=run.id, kind="reward", name="human_reward", value=worth, **about)
    if worth == 1.0:
        return [mark]
    correction = _correction(run, event, mail, inbox)
    if correction is None:
        return [mark]
    call, reply = correction
    about |= {"id": call, "call_id": call, "correction": reply}
    return [mark, Review(kind="correction", name="correction", **about)]


def find_mail(event: str, inbox: Inbox) -> Mail:
    """Search the inbox for an event, and read until a mail says when it is.

    Raises:
        ValueError: none does.
    """
    says = re.compile(rf"\b{re.escape(event)} (?:is on|moves from {_DATE} to) {_DATE}\.")
    for number in _hits([inbox.search(event)]):
        text = inbox.read(number)
        if found := says.search(text):
            return Mail(number, text, found[2])
    raise ValueError(f"got an inbox in which no mail says when {event!r} is")


def _event(run: Trajectory) -> str:
    question = str(run.prompt(0)[-1].get("content"))
    asked = re.search(r'"([^"]+)"', question)
    if asked is None:
        raise ValueError(f"got the question {question!r}, expected an event in quotes")
    return asked[1]


def _worth(run: Trajectory, mail: Mail) -> float:
    replies = [_call(turn.reply) for turn in run.turns]
    answers = [call[1].get("text") for call in replies if call is not None and call[0] == "answer"]
    if len(answers) == 1 and str(answers[0]).strip(" .") == mail.date:
        return 1.0
    return READ_MAIL if ("read", {"mail_id": mail.id}) in replies else 0.0


def _correction(
    run: Trajectory, event: str, mail: Mail, inbox: Inbox
) -> tuple[str, Message] | None:
    """The id of the first call that he would have made otherwise, and how."""
    for index, turn in enumerate(run.turns):
        shown, said = _shown(run, index), _call(turn.reply)
        if mail.text in shown:
            better: Call = ("answer", {"text": mail.date})
        elif mail.id in _hits(shown):
            better = ("read", {"mail_id": mail.id})
        else:
            better = ("search", {"query": event})
        # Another search that finds the mail is as good.
        found = False
        if said is not None and said[0] == better[0] == "search":
            found = mail.id in _hits([inbox.search(str(said[1].get("query", "")))])
        if said != better and not found and turn.call_id is not None:
            return turn.call_id, _message(better)
    return None


def _shown(run: Trajectory, index: int) -> list[str]:
    """What tools had returned before a call."""
    return [str(one.get("content")) for one in run.prompt(index) if one.get("role") == "tool"]


def _hits(results: Iterable[str]) -> list[int]:
    """Numbers of the mails that searches listed."""
    return [int(one) for text in results for one in re.findall(r": (\d+)$", text, re.MULTILINE)]


def _call(reply: Message | None) -> Call | None:
    """The single tool call of a reply; None if there is none, several, or one that is malformed."""
    calls = (reply or {}).get("tool_calls") or []
    if len(calls) != 1:
        return None
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
    except ValueError:
        return None
    return (calls[0]["function"]["name"], arguments) if isinstance(arguments, dict) else None


def _message(call: Call) -> Message:
    function = {"name": call[0], "arguments": json.dumps(call[1])}
    calls = [{"id": "corrected", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}
