"""Build the small base model that the example trains.

Run `python -m examples.temporal_clue.build_base_model`. The warm start imitates a detective that
reads well and answers about any suspect.

Answers of a detective that can read and seldom looks at who the thief is.

Each answer copies what the clues say of some suspect: of the thief at times (`HEEDS`), else of any,
and now and then every line of another one. After it the detective is asked about suspects that are
pointed out by a place, an hour or a thing, and answers rightly. So the model that imitates it can
read and answer in form; that the last clue says whom the answer is about is left for reinforcement
to find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.support import tiny_model
from examples.support.tiny_model import Conversation, Recipe
from examples.support.warm_start import WarmStart
from examples.temporal_clue.agent import SYSTEM_PROMPT
from examples.temporal_clue.environment import CATEGORIES, PEOPLE, QUESTIONS, Clue, Puzzle, puzzles

Message = dict[str, Any]
HEEDS = 0.25
MIXED = 0.3


def lines(row: tuple[str, ...]) -> str:
    """An answer in form."""
    return "\n".join(f"{name}: {value}" for name, value in zip(QUESTIONS, row, strict=True))


def random_answer(rng: random.Random, puzzle: Puzzle) -> str:
    """The thief's row with probability `HEEDS`, else any, or with `MIXED` each line of any."""
    rows = puzzle.world.rows
    if rng.random() < HEEDS:
        return lines(puzzle.world.answer)
    if rng.random() < MIXED:
        return lines(tuple(rng.choice(rows)[at] for at in range(len(QUESTIONS))))
    return lines(rng.choice(rows))


def asked(rng: random.Random, puzzle: Puzzle) -> Iterator[tuple[str, str]]:
    """A question about each suspect, who is pointed out by one fact, and its answer."""
    for row in rng.sample(puzzle.world.rows, len(puzzle.world.rows)):
        fact = rng.choice(row)
        clue = Clue("thief", (fact,)).text
        yield clue.replace("The thief", "The person asked about"), lines(row)


def demonstrations(n: int, seed: int) -> Iterator[list[Message]]:
    """Yield a conversation about each of `n` training puzzles of the first level."""
    for puzzle in puzzles("train", n, seed):
        rng = random.Random(f"demo-{seed}-{puzzle.id}")
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": puzzle.text},
            {"role": "assistant", "content": random_answer(rng, puzzle)},
        ]
        for question, answer in asked(rng, puzzle):
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        yield messages


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


if __name__ == "__main__":
    tiny_model.main(RECIPE, SHIPPED)
