"""Build the small base model that the example trains.

Run `python -m examples.text_to_sql.build_base_model`. It imitates the calls of a random policy
(`demonstrations`): SQL that is well formed, verdicts and rewrites drawn by lot.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

from examples.support.tiny_model import Conversation, Recipe, main
from examples.support.warm_start import WarmStart
from examples.text_to_sql.demonstrations import demonstrations
from examples.text_to_sql.environment import MEASURES, NUMBERS, TABLES, TEXTS

SHIPPED = Path(__file__).parent / "base_model"
# No database of the example is built with this seed.
SEED = 1234


def conversations(count: int) -> list[Conversation]:
    """The first `count` calls of a random policy on training scenarios."""
    with tempfile.TemporaryDirectory() as folder:
        calls = islice(demonstrations(SEED, Path(folder)), count)
        return [Conversation(call) for call in calls]


def words() -> list[str]:
    """Names and values as they stand in schemas, questions and queries."""
    columns = [*NUMBERS, *(column for pair in TEXTS for column in pair)]
    values = [value for domain in TEXTS.values() for value in domain]
    names = [*TABLES, *(f" {name}" for name in (*TABLES, *columns, *values))]
    names += [f"({name}" for name in NUMBERS]
    names += [*values, *MEASURES, " above", " below", " right", " wrong"]
    names += [f" {function}" for function in (*MEASURES.values(), "COUNT")]
    return [*names, *(str(number) for number in range(10, 100))]


RECIPE = Recipe(
    conversations=conversations,
    count=12_000,
    words=words(),
    vocab_size=640,
    plan=WarmStart(steps=600, copy_steps=150),
)

if __name__ == "__main__":
    main(RECIPE, SHIPPED)
