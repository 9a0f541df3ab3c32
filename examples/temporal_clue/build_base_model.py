"""Build the small base model that the example trains.

Run `python -m examples.temporal_clue.build_base_model`. The warm start imitates a detective that
reads well and answers about any suspect (`demonstrations`).
"""

from __future__ import annotations

from pathlib import Path

from examples.support import tiny_model
from examples.support.tiny_model import Conversation, Recipe
from examples.support.warm_start import WarmStart
from examples.temporal_clue.demonstrations import demonstrations
from examples.temporal_clue.environment import CATEGORIES, PEOPLE

SHIPPED = Path(__file__).parent / "base_model"
# No puzzle of a fit is drawn with this seed.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """`count` answers of the random detective."""
    return [Conversation(messages) for messages in demonstrations(count, SEED)]


RECIPE = Recipe(
    conversations=conversations,
    count=38_400,
    words=[*PEOPLE, *(f" {value}" for values in CATEGORIES for value in values)],
    vocab_size=576,
    plan=WarmStart(steps=1200, copy_steps=120),
)


def main(argv: list[str] | None = None) -> None:
    """Read the command line (or `argv`) and build."""
    tiny_model.main(RECIPE, SHIPPED, argv)


if __name__ == "__main__":
    main()
