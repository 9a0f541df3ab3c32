"""Build the small base model that the example trains.

Run `python -m examples.deep_research.build_base_model`. It imitates the calls of a random policy
(`demonstrations`), each in a corpus whose facts are others than those of the demo.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from examples.deep_research.agent import PLAN, READ, WRITE
from examples.deep_research.demonstrations import demonstrations
from examples.deep_research.environment import RECORD, RUMOUR, TOPICS, TOWNS
from examples.support.tiny_model import Conversation, Recipe, main
from examples.support.warm_start import WarmStart

SHIPPED = Path(__file__).parent / "base_model"
# No corpus of the example is drawn with this seed, nor with one of the next hundred.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """The first `count` calls of a random policy on training scenarios."""
    return [Conversation(call) for call in islice(demonstrations(SEED), count)]


def words() -> list[str]:
    """Names and values as they stand in questions, documents and replies."""
    values = [value for domain in TOPICS.values() for value in domain]
    names = [*TOWNS, *values]
    instructions = re.findall(r" \w+", f"{PLAN} {READ} {WRITE}")
    spaced = [f" {name}" for name in (*names, *TOPICS)]
    return [*names, *spaced, *sorted(set(instructions)), RECORD, RUMOUR]


RECIPE = Recipe(
    conversations=conversations,
    count=12_000,
    words=words(),
    vocab_size=640,
    plan=WarmStart(steps=1200, copy_steps=150),
)

if __name__ == "__main__":
    main(RECIPE, SHIPPED)
