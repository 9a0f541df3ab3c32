"""Build the small base model that the example trains.

Run `python -m examples.email_search.build_base_model`. The warm start imitates a random policy
(`demonstrations`), so the model can speak to the tools and copy from what they return, and has to
learn by reinforcement which choices are good.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from examples.email_search import inbox
from examples.email_search.agent import TOOLS
from examples.email_search.demonstrations import demonstrations
from examples.support import mail_words, tiny_model

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


def main(argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build."""
    tiny_model.main(RECIPE, SHIPPED, argv)


if __name__ == "__main__":
    main()
