"""Groups of runs of a mail agent whose quality is known: several turns, long tool outputs.

Each run searches an inbox and reads mails, one to four times each, then answers. Runs of a group
share the inbox, so they meet the same outputs when they make the same calls. What a run is worth
(`quality`) depends only on what its transcript shows.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from langchain_art import Trajectory, TrajectoryGroup, Turn
from langchain_art.wire import Message

RUNS, MAILS, HITS = 8, 14, 10
_WORDS = """
about after agenda already answer attached before board budget call change client contract copy
could date deadline delay department details draft estimate figures final follow forward from group
have heard hold hope hotel invoice item later letter list market meeting memo more next note number
office open order other paper partner people phone plan please price product project proposal
question quarter regards report request review room sales schedule see send server should sign site
staff status still supplier support table talk team terms thanks the them this ticket time today
tomorrow travel update vendor version visit wait week will with work would year your
"""
WORDS = tuple(_WORDS.split())
PEOPLE = ["ann", "ben", "carla", "dmitri", "eva", "farid", "gita", "hugo", "ines", "jonas"]
PROJECTS = ["Falcon", "Heron", "Kestrel", "Osprey", "Merlin", "Harrier"]
MONTHS = ["January", "March", "April", "May", "June", "August", "October", "November"]
SYSTEM = (
    "You are an assistant that answers questions about a person's mail. Search the inbox, read the "
    "mails that look relevant, and answer with what they say. Give the mail that you rely on. Do "
    "not guess: if the inbox does not tell, say so. Use as few calls as you can."
)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "search_inbox",
            "description": "Search the inbox. Gives the ten best hits with sender, date, subject "
            "and the beginning of the text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for"},
                    "sender": {"type": "string", "description": "only mails of this person"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "read_email",
            "description": "The whole text of one mail.",
            "parameters": {
                "type": "object",
                "properties": {"message_id": {"type": "string", "description": "as hits give it"}},
                "required": ["message_id"],
                "additionalProperties": False,
            },
        },
    },
)


@dataclass(frozen=True)
class Evidence:
    """What a transcript shows of a run."""

    right: bool
    grounded: bool
    """The fact stood in a tool's output before the run answered."""
    calls: int
    errors: int

    @property
    def quality(self) -> float:
        """In [0, 1]: the answer first, then whether it was found or guessed, then economy."""
        economy = max(0.0, 1 - (self.calls - 2) / 8)
        worth = 0.6 * self.right + 0.15 * self.grounded + 0.25 * economy - 0.05 * self.errors
        return min(1.0, max(0.0, worth))


@dataclass(frozen=True)
class Case:
    """One group, the fact that was asked for, and its runs' true qualities."""

    number: int
    fact: str
    group: TrajectoryGroup
    messages: tuple[tuple[Message, ...], ...]
    """Of each run, as a flat conversation."""
    qualities: tuple[float, ...]


def case(number: int) -> Case:
    """Case `number`, the same each time."""
    chance = random.Random(f"case {number}")
    name = f"{chance.choice(PROJECTS)}-{number}"
    fact = f"{chance.randint(1, 28)} {chance.choice(MONTHS)}"
    inbox = _Inbox(chance, name, fact)
    ask = f"Case {number}: on which day does project {name} begin, and who says so?"
    opening: tuple[Message, ...] = (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": ask},
    )
    found: dict[str, tuple[tuple[Message, ...], Evidence]] = {}
    while len(found) < RUNS:  # runs that are the same would be shown once: left out, to be fair
        run = _run(chance, inbox)
        found.setdefault(json.dumps([_without_id(m) for m in run[0]]), run)
    runs = list(found.values())
    chance.shuffle(runs)
    trajectories = tuple(
        _trajectory(f"{number}-{n}", opening, messages) for n, (messages, _) in enumerate(runs)
    )
    return Case(
        number=number,
        fact=fact,
        group=TrajectoryGroup(id=f"case-{number}", trajectories=trajectories),
        messages=tuple((*opening, *messages) for messages, _ in runs),
        qualities=tuple(evidence.quality for _, evidence in runs),
    )


class _Inbox:
    """Mails, one of which has the fact; what the tools answer."""

    def __init__(self, chance: random.Random, name: str, fact: str) -> None:
        self.fact, self.name = fact, name
        ids = [f"<{chance.randrange(16**12):012x}@mail.example>" for _ in range(MAILS)]
        self.ids, self.target = ids, ids[0]
        self.sender = {one: chance.choice(PEOPLE) for one in ids}
        self.texts: dict[str, str] = {}
        for one in ids:
            lines = [_sentence(chance) for _ in range(chance.randint(12, 40))]
            if one == self.target:
                place = chance.randrange(1, len(lines))
                lines.insert(place, f"We begin {name} on {fact}, as agreed with the board.")
            self.texts[one] = "\n".join(lines)
        self.queries = [f"{name} start", f"{name} begin date", f"project {name}", "kick-off day"]
        self.hits = {query: self._hits(chance) for query in self.queries}

    def read(self, one: str) -> str:
        if one not in self.texts:
            return f"error: no mail {one}"
        head = f"from: {self.sender[one]}@example.com\nto: me@example.com\nid: {one}\n\n"
        return head + self.texts[one]

    def _hits(self, chance: random.Random) -> str:
        shown = chance.sample(self.ids[1:], HITS - 1)
        shown.insert(chance.randrange(HITS), self.target)
        return "\n".join(
            f"id: {one}\nfrom: {self.sender[one]}@example.com\nsubject: {_sentence(chance)[:30]}\n"
            f"snippet: {_sentence(chance)} {_sentence(chance)}"
            for one in shown
        )


def _sentence(chance: random.Random) -> str:
    words = chance.choices(WORDS, k=chance.randint(8, 16))
    return f"{words[0].capitalize()} {' '.join(words[1:])}."


def _run(chance: random.Random, inbox: _Inbox) -> tuple[tuple[Message, ...], Evidence]:
    messages: list[Message] = []
    errors, grounded = 0, False
    plan = ["search"] * chance.randint(1, 4) + ["read"] * chance.randint(1, 4)
    for step in plan:
        if step == "search":
            query = chance.choice(inbox.queries)
            said = ("search_inbox", {"query": query}, inbox.hits[query])
        else:
            bad = chance.random() < 0.1
            one = (
                f"<{chance.randrange(10**6)}@mail.example>"
                if bad
                else chance.choice([inbox.target, *chance.sample(inbox.ids, 2)])
            )
            said = ("read_email", {"message_id": one}, inbox.read(one))
            errors += bad
            grounded |= one == inbox.target
        messages += _exchange(chance, *said)
    right = chance.random() < (0.8 if grounded else 0.25)
    day = inbox.fact if right else f"{chance.randint(1, 28)} {chance.choice(MONTHS)}"
    right = day == inbox.fact
    who = inbox.sender[inbox.target if grounded else chance.choice(inbox.ids)]
    reply = (
        f"Project {inbox.name} begins on {day}. {who.capitalize()} writes so. {_sentence(chance)}"
    )
    messages.append({"role": "assistant", "content": reply})
    return tuple(messages), Evidence(right, grounded, len(plan), errors)


def _exchange(
    chance: random.Random, name: str, arguments: dict[str, Any], output: str
) -> list[Message]:
    id_ = "call_" + "".join(chance.choices("abcdefghijklmnopqrstuvwxyzABCDEF0123456789", k=24))
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": id_, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id_, "content": output},
    ]


def _without_id(message: Message) -> Any:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"], calls]


def _trajectory(
    id_: str, opening: tuple[Message, ...], messages: tuple[Message, ...]
) -> Trajectory:
    turns: list[Turn] = []
    new = opening
    for message in messages:
        if message["role"] == "assistant":
            extends = len(turns) - 1 if turns else None
            turns.append(
                Turn(node="model", extends=extends, messages=new, tools=TOOLS, reply=message)
            )
            new = ()
        else:
            new = (message,)
    return Trajectory(id=id_, turns=tuple(turns))


@dataclass(frozen=True)
class Read:
    """One run as the judge found it in a prompt."""

    id: str
    calls: tuple[str, ...]
    results: tuple[str, ...]
    answer: str

    def evidence(self, fact: str) -> Evidence:
        return Evidence(
            right=fact in self.answer,
            grounded=any(fact in result for result in self.results),
            calls=len(self.calls),
            errors=sum(result.startswith("error") for result in self.results),
        )


def read_ours(prompt: str) -> list[Read]:
    """The runs of a prompt of ours, with the parts that they follow and the notes put back."""
    mark = prompt.split("\n", 1)[0].split()[1]
    prompt = re.sub(rf"<{mark} cut \d+>\n", "", prompt)
    pieces = re.findall(rf"<{mark} ([^>]*)> ?(.*?)(?=\n?<{mark} |\Z)", prompt, re.S)
    notes: dict[str, str] = {}
    places: dict[str, list[tuple[str, str]]] = {}
    runs: list[str] = []
    current: list[tuple[str, str]] = []
    for tag, text in pieces:
        words = tag.split()
        if words[0] == "note":
            notes[words[1]] = text
        elif words[0] in ("part", "run"):
            follows = places[words[3]] if words[2:3] == ["follows"] else []
            current = places[words[1]] = list(follows)
            runs += [words[1]] if words[0] == "run" else []
        elif words[0] not in ("task", "tools", "end"):
            current.append((words[0], notes[words[2]] if words[1:2] == ["="] else text))
    return [
        Read(
            run,
            calls=tuple(text for kind, text in places[run] if kind == "call"),
            results=tuple(text for kind, text in places[run] if kind == "result"),
            answer=[text for kind, text in places[run] if kind == "assistant"][-1],
        )
        for run in runs
    ]
