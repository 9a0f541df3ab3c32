"""Build the small base model: ``python -m examples.email_assistant.build_base_model``.

It imitates a random policy (`demonstrations`): it can speak to the tools and copy from what they
return, and has to learn by reinforcement which of them a question calls for.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

from examples.email_assistant.agent import TOOLS
from examples.email_assistant.demonstrations import demonstrations
from examples.email_assistant.mailbox import scenarios
from examples.support import mail_words, tiny_model
from examples.support.warm_start import WarmStart

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
