"""Build the small base model: ``python -m examples.email_assistant.build_base_model``.

It imitates a random policy: it can speak to the tools and copy from what they
return, and has to learn by reinforcement which of them a question calls for.

Conversations of a random policy: calls are well formed, choices are drawn by lot.

Which words are searched for, whether the list is filtered, sorted or neither, and which mail is
opened are left to chance, whatever the question asks for, so that the warm start learns the tools
and no strategy. The sender and the order that the question names are only taken more often than
others (`HEEDS`): a small model does not begin to read what it was never shown to matter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from examples.email_assistant.agent import MAX_MODEL_CALLS, SYSTEM_PROMPT, TOOLS
from examples.email_assistant.mailbox import Mailbox, Scenario, scenarios
from examples.support import mail_words, tiny_model
from examples.support.mail_player import MailPlayer, Message
from examples.support.mail_words import SENDERS
from examples.support.warm_start import WarmStart

#: Probability that a filter or a sort takes what the question names, if it names one; else any.
HEEDS = 0.8
ORDERS = ("newest", "oldest")


class RandomPolicy(MailPlayer):
    """Plays one scenario by lot."""

    def __init__(
        self, rng: random.Random, scenario: Scenario, weights: Sequence[int] = (3, 3, 4)
    ) -> None:
        """Start a conversation with the system prompt and the question.

        Args:
            rng: source of every choice.
            scenario: what is asked, and of which mailbox.
            weights: of filter, sort and select, whatever is asked.
        """
        super().__init__(rng, SYSTEM_PROMPT, scenario.question)
        self._scenario = scenario
        self._box = Mailbox(scenario.mails)
        self._weights = weights
        self._listed = 0

    def _list(self, name: str, arguments: dict[str, Any], result: str) -> None:
        self._listed = len(re.findall(r"^\d: ", result, re.MULTILINE))
        self._call(name, arguments, result)

    def _search(self) -> None:
        pair = re.findall(r'"(.+?)"', self._scenario.question)[0]
        query = self._rng.choices([pair, *pair.split()], weights=[70, 15, 15])[0]
        self._list("search", {"query": query}, self._box.search(query))

    def _drawn(self, choices: Sequence[str]) -> str:
        asked = [one for one in choices if one in self._scenario.question]
        return self._rng.choice(asked if asked and self._rng.random() < HEEDS else choices)

    def _filter(self) -> None:
        sender = self._drawn(SENDERS)
        self._list("filter", {"sender": sender}, self._box.filter(sender))

    def _sort(self) -> None:
        order = self._drawn(ORDERS)
        self._list("sort", {"order": order}, self._box.sort(order))

    def _select(self) -> None:
        number = self._rng.randint(1, max(1, self._listed))
        self._open("select", {"number": number}, self._box.select(number))

    def play(self) -> list[Message]:
        """Play to the answer, or to the cap on model calls, and return the messages."""
        self._search()
        for _ in range(MAX_MODEL_CALLS - 2):
            if self._dates and self._rng.random() < 0.95:
                break
            if not self._listed and self._rng.random() < 0.9:
                self._search()
            else:
                steps = [self._filter, self._sort, self._select]
                self._rng.choices(steps, self._weights)[0]()
        self._answer()
        return self.messages


def demonstrations(
    scenarios: Iterable[Scenario], seed: int, weights: Sequence[int] = (3, 3, 4)
) -> Iterator[list[Message]]:
    """Yield one conversation for each scenario; the same for the same seed and `weights`."""
    for scenario in scenarios:
        yield RandomPolicy(random.Random(f"demo-{seed}-{scenario.id}"), scenario, weights).play()


#: No scenario of the example is drawn with this seed.
SEED = 1234
SHIPPED = Path(__file__).parent / "base_model"


def words() -> list[str]:
    """Words and numbers that must be one token, with a space before them or without."""
    names = [*mail_words.PROJECTS, *mail_words.EVENTS, *mail_words.SENDERS]
    spaced = [*names, *mail_words.MONTHS]
    return [*names, *(f" {word}" for word in spaced), *(str(number) for number in range(10, 100))]


def conversations(count: int) -> list[tiny_model.Conversation]:
    """Conversations of the random policy about training pairs, each in a mailbox of its own."""
    played = demonstrations(scenarios("train", count, SEED), SEED)
    return [tiny_model.Conversation(messages, TOOLS) for messages in played]


def filtering(count: int) -> list[tiny_model.Conversation]:
    """The same with more filters, three in five of them about questions that name a sender.

    In what `conversations` gives, one call in twenty takes a name from the question, and 600 steps
    of it do not teach that: the names are drawn by lot afterwards. In these it is one call in ten.
    """
    rng = random.Random(SEED)
    drawn = scenarios("train", 3 * count, SEED + 1)
    kept = (one for one in drawn if one.kind == "sender" or rng.random() < 1 / 3)
    played = demonstrations(islice(kept, count), SEED + 1, weights=(4, 3, 3))
    return [tiny_model.Conversation(messages, TOOLS) for messages in played]


RECIPE = tiny_model.Recipe(
    conversations,
    count=12_000,
    words=words(),
    vocab_size=832,
    plan=WarmStart(steps=600, copy_steps=150),
    further=tiny_model.Phase(
        filtering, count=5_000, plan=WarmStart(steps=360, copy_steps=0, lr=2e-3)
    ),
)


def main(argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build."""
    tiny_model.main(RECIPE, SHIPPED, argv)


if __name__ == "__main__":
    main()
