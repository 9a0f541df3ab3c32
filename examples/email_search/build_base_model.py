"""Build the small base model that the example trains.

Run `python -m examples.email_search.build_base_model`. The warm start imitates a random policy
(`demonstrations`), so the model can speak to the tools and copy from what they return, and has to
learn by reinforcement which choices are good.

Conversations of a random policy: calls are well formed, choices are drawn by lot.

The warm start learns the language of the tools from these, and no more: which words to search for,
which hit to open and which date to answer with are left to chance, so that each is right at times
and reinforcement has a choice to make.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from examples.email_search import inbox
from examples.email_search.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT, TOOLS
from examples.email_search.inbox import Inbox, MailStore, Scenario
from examples.support import mail_words, tiny_model
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


# No database of the example is built with this seed; the tokenizer is the same whatever the seed of
# the weights.
INBOX_SEED = 1234
SHIPPED = Path(__file__).parent / "base_model"


def words() -> list[str]:
    """Words and numbers that must be one token, with a space before them or without."""
    names = [*mail_words.PROJECTS, *mail_words.EVENTS]
    spaced = [*names, *mail_words.MONTHS, *mail_words.SENDERS, *inbox.ERRANDS]
    return [*names, *(f" {word}" for word in spaced), *(str(number) for number in range(10, 100))]


def conversations(count: int) -> list[tiny_model.Conversation]:
    """Conversations of the random policy about training pairs, each in an inbox of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = inbox.MailStore(inbox.build(Path(folder) / "mails.db", count, 0, INBOX_SEED))
        found = [
            tiny_model.Conversation(messages, TOOLS)
            for messages in demonstrations(store, INBOX_SEED)
        ]
        store.close()
    return found


RECIPE = tiny_model.Recipe(
    conversations, count=12_000, words=words(), vocab_size=768, dtype=torch.float32
)


if __name__ == "__main__":
    tiny_model.main(RECIPE, SHIPPED)
