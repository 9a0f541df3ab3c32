"""Conversations of a random policy: calls are well formed, choices are drawn by lot.

The warm start learns the language of the tools from these, and no more: which words to search for,
which hit to open and which date to answer with are left to chance, so that each is right at times
and reinforcement has a choice to make.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from examples.email_search.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT
from examples.email_search.inbox import Inbox, MailStore, Scenario
from examples.support.mail_player import MailPlayer, Message
from examples.support.mail_words import PROJECTS


def _query(rng: random.Random, scenario: Scenario) -> str:
    """Words to search for: from the question mostly, from elsewhere at times."""
    words = [scenario.project, scenario.event]
    elsewhere = rng.choice([*PROJECTS, "date", "day"])
    choices = [" ".join(words), *words, elsewhere]
    return rng.choices(choices, weights=[50, 20, 20, 10])[0]


class RandomPolicy(MailPlayer):
    """Plays one scenario by lot."""

    def __init__(self, rng: random.Random, scenario: Scenario, inbox: Inbox) -> None:
        """Start a conversation with the system prompt and the question."""
        super().__init__(rng, SYSTEM_PROMPT, scenario.question)
        self._scenario, self._inbox = scenario, inbox
        self._hits: list[int] = []

    def _search(self) -> None:
        query = _query(self._rng, self._scenario)
        result = self._inbox.search(query)
        self._hits = [int(number) for number in re.findall(r": (\d+)$", result, re.MULTILINE)]
        self._call("search", {"query": query}, result)

    def _read(self) -> None:
        known = self._hits and self._rng.random() < 0.97
        mail_id = self._rng.choice(self._hits) if known else self._rng.randint(40, 99)
        self._open("read", {"mail_id": mail_id}, self._inbox.read(mail_id))

    def play(self) -> list[Message]:
        """Play to the answer, or to the cap on model calls, and return the messages."""
        self._search()
        for _ in range(MAX_MODEL_CALLS - 2):
            if self._dates and self._rng.random() < 0.93:
                break
            if self._hits and self._rng.random() < 0.93:
                self._read()
            else:
                self._search()
        self._answer()
        return self.messages


def demonstrations(store: MailStore, seed: int) -> Iterator[list[Message]]:
    """Yield one conversation for each training scenario of `store`; the same for the same seed."""
    for scenario in store.scenarios("train"):
        rng = random.Random(f"demo-{seed}-{scenario.id}")
        yield RandomPolicy(rng, scenario, store.inbox(scenario.inbox)).play()
