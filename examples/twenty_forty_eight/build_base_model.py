"""Build the small base model that the example trains.

Run `python -m examples.twenty_forty_eight.build_base_model`. The warm start imitates a player
without a plan (`demonstrations`): the model can name moves, and has to learn which are good.
"""

from __future__ import annotations

from pathlib import Path

from examples.support import tiny_model
from examples.support.warm_start import WarmStart
from examples.twenty_forty_eight.demonstrations import demonstrations
from examples.twenty_forty_eight.environment import MOVES

SEED = 1234
SHIPPED = Path(__file__).parent / "base_model"
WORDS = [*MOVES, " nothing", *(str(2**power) for power in range(1, 7)), "12", "20", "24", "28"]


def conversations(count: int) -> list[tiny_model.Conversation]:
    """Moves of the player without a plan."""
    return [tiny_model.Conversation(messages) for messages in demonstrations(count, SEED)]


RECIPE = tiny_model.Recipe(
    conversations,
    count=12_000,
    words=WORDS,
    vocab_size=384,
    plan=WarmStart(steps=600, copy_steps=150),
)

if __name__ == "__main__":
    tiny_model.main(RECIPE, SHIPPED)
