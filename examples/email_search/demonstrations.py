"""Conversations of a random policy: calls are well formed, choices are drawn by lot.

The warm start learns the language of the tools from these, and no more: which words to search for,
which hit to open and which date to answer with are left to chance, so that each is right at times
and reinforcement has a choice to make.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from examples.email_search.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT
from examples.email_search.inbox import Inbox, MailStore, Scenario
from examples.support.mail_words import MONTHS, PROJECTS

Message = dict[str, Any]
_DATE = re.compile(rf"\d+ (?:{'|'.join(MONTHS)})")


def _query(rng: random.Random, scenario: Scenario) -> str:
    """Words to search for: from the question mostly, from elsewhere at times."""
    words = [scenario.project, scenario.event]
    elsewhere = rng.choice([*PROJECTS, "date", "day"])
    choices = [" ".join(words), *words, elsewhere]
    return rng.choices(choices, weights=[50, 20, 20, 10])[0]


class RandomPolicy:
    """Plays one scenario with well-formed calls and keeps the messages in OpenAI's shape."""

    def __init__(self, rng: random.Random, scenario: Scenario, inbox: Inbox) -> None:
        """Start a conversation with the system prompt and the question."""
        self._rng, self._scenario, self._inbox = rng, scenario, inbox
        self._hits: list[int] = []
        self._dates: list[str] = []
        self.answer = ""
        self.messages: list[Message] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": scenario.question},
        ]

    def _call(self, name: str, arguments: dict[str, Any], result: str) -> None:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
        ]

    def _search(self) -> None:
        query = _query(self._rng, self._scenario)
        result = self._inbox.search(query)
        self._hits = [int(number) for number in re.findall(r": (\d+)$", result, re.MULTILINE)]
        self._call("search", {"query": query}, result)

    def _read(self) -> None:
        known = self._hits and self._rng.random() < 0.97
        mail_id = self._rng.choice(self._hits) if known else self._rng.randint(40, 99)
        result = self._inbox.read(mail_id)
        self._dates = _DATE.findall(result)
        self._call("read", {"mail_id": mail_id}, result)

    def _answer(self) -> None:
        date = f"{self._rng.randint(1, 28)} {self._rng.choice(MONTHS)}"
        self.answer = self._rng.choice(self._dates) if self._dates else date
        self._call("answer", {"text": self.answer}, self.answer)
        self.messages.pop()

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
