"""Build the small base model that the example trains.

Run `python -m examples.codenames.build_base_model`. The warm start imitates two players that know
words and not the game (`demonstrations`).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from examples.codenames.demonstrations import demonstrations
from examples.codenames.environment import LEVELS
from examples.codenames.words import KINDS
from examples.support import tiny_model
from examples.support.tiny_model import Conversation, Recipe
from examples.support.warm_start import WarmStart

SHIPPED = Path(__file__).parent / "base_model"
# No board of a fit is drawn with this seed.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """The first `count` calls of the random players."""
    return [Conversation(call) for call in islice(demonstrations(count, SEED), count)]


def words() -> list[str]:
    """The kinds of the first level, and their words, as they stand behind a space."""
    kinds = list(KINDS)[: LEVELS[1].vocabulary]
    return [f" {word}" for kind in kinds for word in (kind, *KINDS[kind])]


RECIPE = Recipe(
    conversations=conversations,
    count=20_000,
    words=words(),
    vocab_size=576,
    plan=WarmStart(steps=800, copy_steps=150),
)


def main(argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build."""
    tiny_model.main(RECIPE, SHIPPED, argv)


if __name__ == "__main__":
    main()
