"""Build the small base model: ``python -m examples.email_assistant.build_base_model``.

It imitates a random policy (`demonstrations`): it can speak to the tools and copy from what they
return, and has to learn by reinforcement which of them a question calls for.
"""

from __future__ import annotations

from pathlib import Path

from examples.email_assistant.agent import TOOLS
from examples.email_assistant.demonstrations import demonstrations
from examples.email_assistant.mailbox import scenarios
from examples.support import mail_words, tiny_model

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


RECIPE = tiny_model.Recipe(conversations, count=12_000, words=words(), vocab_size=832)


def main(argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build."""
    tiny_model.main(RECIPE, SHIPPED, argv)


if __name__ == "__main__":
    main()
