"""Mailboxes in which the right mail has to be told from others about the same event.

Every scenario has a mailbox of its own: three mails about the event asked for, from three senders
and of three days, each with another date, and some about other events. The question says which of
the three counts: the newest, the oldest, or the one of a sender. Lists show subjects alone, so a
mail is found by searching, then filtering or sorting, then selecting.

Held-out questions are about (project, event) pairs that occur nowhere in training, neither in a
question nor in a mail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from examples.support.mail_words import MONTHS, SENDERS, Pair, Split, split_pairs

Kind = Literal["newest", "oldest", "sender"]
QUESTIONS: Mapping[Kind, str] = {
    "newest": 'When is "{pair}", by the newest mail?',
    "oldest": 'When was "{pair}" to be at first, by the oldest mail?',
    "sender": 'When is "{pair}", as "{sender}" says?',
}
#: What a run has to do beside searching, selecting and answering.
TELLS: Mapping[Kind, str] = {"newest": "sort", "oldest": "sort", "sender": "filter"}

ABOUT_EVENT = 3
OTHERS = 5
SHOWN = 4
#: Model calls of a run without a detour: search, filter or sort, select, answer.
FEWEST_CALLS = 4


@dataclass(frozen=True)
class Mail:
    """One mail. `day` counts from the first day of the mailbox, and no two mails share one."""

    sender: str
    day: int
    subject: str
    body: str


@dataclass(frozen=True)
class Scenario:
    """A question about a mailbox; an evaluator reads the last two fields."""

    id: str
    question: str
    answer: str
    kind: Kind
    split: Split
    mails: list[Mail]
    required_actions: list[str]
    optimal_steps: int


class Mailbox:
    """The mails of one scenario, and the list that one run is looking at. Not shared by runs."""

    def __init__(self, mails: list[Mail]) -> None:
        """Show no mail until something is searched for."""
        self._mails = mails
        self._listed: list[Mail] = []

    def search(self, query: str) -> str:
        """List the mails whose subject or text has all words of `query`; case does not matter."""
        words = query.casefold().split()
        if not words:
            return "Empty query."
        self._listed = [mail for mail in self._mails if _has(mail, words)]
        return self._shown()

    def filter(self, sender: str) -> str:
        """Keep those of the list that a sender wrote."""
        self._listed = [m for m in self._listed if m.sender.casefold() == sender.casefold().strip()]
        return self._shown()

    def sort(self, order: str) -> str:
        """Put the list into an order: `newest` or `oldest` first."""
        if order not in ("newest", "oldest"):
            return "Order is newest or oldest."
        self._listed = sorted(self._listed, key=lambda m: m.day, reverse=order == "newest")
        return self._shown()

    def select(self, number: int) -> str:
        """Open a mail by its place in the list, from 1."""
        if not 1 <= number <= min(len(self._listed), SHOWN):
            return "No such mail."
        mail = self._listed[number - 1]
        return f"From: {mail.sender}, day {mail.day}\n{mail.body}"

    def _shown(self) -> str:
        lines = [f"{at}: {mail.subject}" for at, mail in enumerate(self._listed[:SHOWN], 1)]
        if more := len(self._listed) - SHOWN:
            lines += [f"and {more} more"] if more > 0 else []
        return "\n".join(lines) or "No mail found."


def _has(mail: Mail, words: list[str]) -> bool:
    text = f"{mail.subject} {mail.body}".casefold().replace(".", "").split()
    return all(word in text for word in words)


def _mail(rng: random.Random, pair: Pair, sender: str, day: int, date: str) -> Mail:
    words = " ".join(pair)
    body = rng.choice(("{0} is on {1}.", "{0} will be on {1}.")).format(words, date)
    return Mail(sender, day, words, body)


def make_scenario(
    rng: random.Random, number: int, split: Split, pairs: list[Pair], asked: list[Pair]
) -> Scenario:
    """Draw a question and its mailbox.

    Args:
        rng: source of every choice.
        number: of the scenario within its split.
        split: "train" or "test".
        pairs: what the other mails may be about.
        asked: what the question may be about.
    """
    pair = rng.choice(asked)
    kind: Kind = rng.choice(("newest", "oldest", "sender"))
    senders = rng.sample(SENDERS, ABOUT_EVENT)
    days = rng.sample(range(1, 60), ABOUT_EVENT + OTHERS)
    dates = _dates(rng, ABOUT_EVENT)
    about = [
        _mail(rng, pair, sender, day, date)
        for sender, day, date in zip(senders, days[:ABOUT_EVENT], dates, strict=True)
    ]
    near = [other for other in pairs if other != pair and set(other) & set(pair)]
    others = [
        _mail(rng, other, rng.choice(SENDERS), day, _dates(rng, 1)[0])
        for other, day in zip(rng.sample(near, OTHERS), days[ABOUT_EVENT:], strict=True)
    ]
    right = rng.randrange(ABOUT_EVENT)
    if kind != "sender":
        choose = max if kind == "newest" else min
        right = about.index(choose(about, key=lambda mail: mail.day))
    mails = [*about, *others]
    rng.shuffle(mails)
    return Scenario(
        id=f"{split}-{number}",
        question=QUESTIONS[kind].format(pair=" ".join(pair), sender=senders[right]),
        answer=dates[right],
        kind=kind,
        split=split,
        mails=mails,
        required_actions=["search", TELLS[kind], "select", "answer"],
        optimal_steps=FEWEST_CALLS,
    )


def _dates(rng: random.Random, count: int) -> list[str]:
    days = rng.sample(range(28 * len(MONTHS)), count)
    return [f"{day % 28 + 1} {MONTHS[day // 28]}" for day in days]


def scenarios(split: Split, count: int, seed: int) -> Iterator[Scenario]:
    """The scenarios of a split; the same arguments give the same ones.

    Held-out questions are about pairs that no training mail is about, whatever the seed.
    """
    pairs = split_pairs()
    everything = sorted(pairs["train"] + pairs["test"]) if split == "test" else pairs["train"]
    for number in range(count):
        rng = random.Random(f"assistant-{split}-{seed}-{number}")
        yield make_scenario(rng, number, split, everything, pairs[split])


def is_right(scenario: Scenario, answer: str | None) -> bool:
    """Whether an answer is the date asked for; case and outer punctuation do not matter."""
    return answer is not None and _plain(answer) == _plain(scenario.answer)


def _plain(text: str) -> str:
    return " ".join(text.casefold().strip(" .,!?\"'").split())
