"""Build the small base model that the example trains.

Run `python -m examples.tic_tac_toe.build_base_model`. The warm start imitates a player who draws
letters: the model can name squares, and has to learn by reinforcement which.

Moves of a player who draws a letter: the warm start learns from them to name a square.

The letter is drawn among those that the position's text has, each as likely as it is often there.
Now and then it is any letter at all, also that of a square that is taken.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.support import tiny_model
from examples.support.warm_start import WarmStart
from examples.tic_tac_toe.agent import SYSTEM_PROMPT
from examples.tic_tac_toe.environment import SQUARES, describe, random_board

BREAKS_THE_RULES = 0.1


def demonstrations(count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield moves as conversations in OpenAI's shape, each in a position after 0 to 8 moves."""
    for number in range(count):
        rng = random.Random(f"demo-{seed}-{number}")
        text = describe(random_board(rng, rng.randint(0, 8)))
        drawn = SQUARES if rng.random() < BREAKS_THE_RULES else re.findall(r"\b[a-i]\b", text)
        yield [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": text},
            {"role": "assistant", "content": rng.choice(drawn)},
        ]


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
