"""Build the small base model that the example trains.

Run `python -m examples.codenames.build_base_model`. The warm start imitates two players that know
words and not the game (`demonstrations`).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from examples.codenames.demonstrations import demonstrations
from examples.codenames.words import KIND_OF, KINDS
from examples.support import tiny_model
from examples.support.tiny_model import Conversation, Recipe
from examples.support.warm_start import WarmStart

SHIPPED = Path(__file__).parent / "base_model"
# No board of a fit is drawn with this seed.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """The first `count` calls of the random players."""
    return [Conversation(call) for call in islice(demonstrations(count, SEED), count)]


RECIPE = Recipe(
    conversations=conversations,
    count=20_000,
    words=[f" {word}" for word in (*KIND_OF, *KINDS)],
    vocab_size=640,
    plan=WarmStart(steps=700, copy_steps=0, batch=48),
)


def main(argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build."""
    tiny_model.main(RECIPE, SHIPPED, argv)


if __name__ == "__main__":
    main()
