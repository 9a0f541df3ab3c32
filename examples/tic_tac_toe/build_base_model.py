"""Build the small base model that the example trains.

Run `python -m examples.tic_tac_toe.build_base_model`. The warm start imitates a player who draws
letters (`demonstrations`): the model can name squares, and has to learn by reinforcement which.
"""

from __future__ import annotations

from pathlib import Path

from examples.support import tiny_model
from examples.support.warm_start import WarmStart
from examples.tic_tac_toe.demonstrations import demonstrations
from examples.tic_tac_toe.environment import SQUARES

SEED = 1234
SHIPPED = Path(__file__).parent / "base_model"
WORDS = [*SQUARES, *(f" {word}" for word in (*SQUARES, *"XO", "You", "win", "wins", "at", "none"))]


def conversations(count: int) -> list[tiny_model.Conversation]:
    """Moves of the player who draws letters."""
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
