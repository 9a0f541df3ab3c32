"""Conversations of a random policy: calls are well formed, choices are drawn by lot.

Which words are searched for, whether the list is filtered, sorted or neither, by which sender, in
which order, and which mail is opened are left to chance. Whatever the question asks for, so that
the warm start learns the tools and no strategy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from examples.email_assistant.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT
from examples.email_assistant.mailbox import Mailbox, Scenario
from examples.support.mail_words import MONTHS, SENDERS

Message = dict[str, Any]
_DATE = re.compile(rf"\d+ (?:{'|'.join(MONTHS)})")


class RandomPolicy:
    """Plays one scenario with well-formed calls and keeps the messages in OpenAI's shape."""

    def __init__(self, rng: random.Random, scenario: Scenario) -> None:
        """Start a conversation with the system prompt and the question."""
        self._rng, self._scenario = rng, scenario
        self._box = Mailbox(scenario.mails)
        self._listed = 0
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

    def _list(self, name: str, arguments: dict[str, Any], result: str) -> None:
        self._listed = len(re.findall(r"^\d: ", result, re.MULTILINE))
        self._call(name, arguments, result)

    def _search(self) -> None:
        pair = re.findall(r'"(.+)"', self._scenario.question)[0]
        query = self._rng.choices([pair, *pair.split()], weights=[70, 15, 15])[0]
        self._list("search", {"query": query}, self._box.search(query))

    def _filter(self) -> None:
        asked = [name for name in SENDERS if f"as {name} says" in self._scenario.question]
        sender = self._rng.choice(asked if asked and self._rng.random() < 0.6 else SENDERS)
        self._list("filter", {"sender": sender}, self._box.filter(sender))

    def _sort(self) -> None:
        order = self._rng.choice(("newest", "oldest"))
        self._list("sort", {"order": order}, self._box.sort(order))

    def _select(self) -> None:
        number = self._rng.randint(1, max(1, self._listed))
        result = self._box.select(number)
        self._dates = _DATE.findall(result)
        self._call("select", {"number": number}, result)

    def _answer(self) -> None:
        date = f"{self._rng.randint(1, 28)} {self._rng.choice(MONTHS)}"
        self.answer = self._rng.choice(self._dates) if self._dates else date
        self._call("answer", {"text": self.answer}, self.answer)
        self.messages.pop()

    def play(self) -> list[Message]:
        """Play to the answer, or to the cap on model calls, and return the messages."""
        self._search()
        for _ in range(MAX_MODEL_CALLS - 2):
            if self._dates and self._rng.random() < 0.95:
                break
            if not self._listed and self._rng.random() < 0.9:
                self._search()
            else:
                self._rng.choices([self._filter, self._sort, self._select], weights=[3, 3, 4])[0]()
        self._answer()
        return self.messages


def demonstrations(scenarios: Iterable[Scenario], seed: int) -> Iterator[list[Message]]:
    """Yield one conversation for each scenario; the same for the same seed."""
    for scenario in scenarios:
        yield RandomPolicy(random.Random(f"demo-{seed}-{scenario.id}"), scenario).play()
