"""Build the small base model that the example trains.

Run `python -m examples.deep_research.build_base_model`. It imitates the calls of a random policy
(`demonstrations`), each in a corpus whose facts are others than those of the demo.

Calls of a random policy: each node says something well formed, drawn by lot.

The warm start learns the language of the three nodes from these, and no more. Plans leave out or
mix up what the question asks for, readers believe any document, writers put the facts in any order.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from examples.deep_research.agent import NOTHING, PLAN, READ, WRITE, Note, documents, findings
from examples.deep_research.environment import (
    RECORD,
    RUMOUR,
    TOPICS,
    TOWNS,
    Scenario,
    World,
    make_world,
)
from examples.support.tiny_model import Conversation, Recipe, main
from examples.support.warm_start import WarmStart

Message = dict[str, str]
#: Scenarios that one corpus is used for.
PER_WORLD = 100


def random_plan(rng: random.Random, scenario: Scenario) -> list[str]:
    """A search for most parts of the question, in any order, with a wrong topic at times."""
    lines: list[str] = []
    for town, topic in scenario.pairs:
        chance = rng.random()
        if chance < 0.7:
            lines.append(f"{town} {topic}")
        elif chance < 0.85:
            lines.append(f"{town} {rng.choice(scenario.pairs)[1]}")
        elif chance < 0.9:
            lines.append(town)
    if rng.random() < 0.15:
        rng.shuffle(lines)
    return lines or [f"{rng.choice(TOWNS)} {rng.choice(list(TOPICS))}"]


def random_reading(rng: random.Random, hits: list[str]) -> str:
    """The last word of a hit that is drawn at random."""
    return re.findall(r"\w+", rng.choice(hits))[-1] if hits else NOTHING


def random_report(rng: random.Random, notes: list[Note]) -> str:
    """The findings, mostly in the order of the notes, at times with some left out."""
    found = [note["found"] for note in notes if rng.random() < 0.92] or [notes[0]["found"]]
    if rng.random() < 0.25:
        rng.shuffle(found)
    return ", ".join(found)


def play(rng: random.Random, scenario: Scenario, world: World) -> Iterator[list[Message]]:
    """Play one scenario and yield each call of the model as a conversation of its own."""
    lines = random_plan(rng, scenario)
    yield _call(PLAN, scenario.question, "\n".join(lines))
    notes: list[Note] = []
    for query in lines:
        hits = world.corpus.search(query)
        notes.append(Note(query=query, hits=hits, found=random_reading(rng, hits)))
        yield _call(READ, documents(query, hits), notes[-1]["found"])
    shown = findings(scenario.question, list(enumerate(notes)))
    yield _call(WRITE, shown, random_report(rng, notes))


def _call(system: str, asked: str, said: str) -> list[Message]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": said},
    ]


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Yield calls of training scenarios without end; the same for the same seed."""
    for number in itertools.count():
        world = make_world(seed + number)
        for scenario in world.scenarios("train", PER_WORLD):
            yield from play(random.Random(f"demo-{seed}-{number}-{scenario.id}"), scenario, world)


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
