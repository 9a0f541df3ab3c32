"""Tasks for a server that nobody has written tasks for: a model writes them, from what it offers.

The model is shown the server's tools and text resources, and answers with tasks and, for each, the
record that it is about. Tasks are divided by these records, so no held-out task is about a record
that a training task is about.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from langchain_core.language_models import BaseChatModel

INSTRUCTIONS = """\
You write tasks for an agent that has the tools of an MCP server. Each task has one short answer
that the tools can find, and needs at least one call of a tool. Answer with JSON alone:
{"tasks": [{"task": "…", "about": "the one record that the task is about"}, …]}"""
PER_CALL = 50
MOST_IDLE_CALLS = 3
HELD_OUT_SHARE = 0.25

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Task:
    """A task, and the record that it is about.

    Example:
        >>> Task("train-0", "train", "What is the rain at Arvik hill in May?", "Arvik hill").about
        'Arvik hill'
    """

    id: str
    split: Split
    text: str
    about: str


def write_tasks(
    model: BaseChatModel, offered: str, n_train: int, n_test: int, seed: int = 0
) -> dict[Split, list[Task]]:
    """Let a model write tasks until there are enough of both splits.

    Args:
        model: Any chat model; the example's stand-in is `scripted_models.ScriptedWriter`.
        offered: What the server offers, in words (`session.describe`).
        n_train: Training tasks.
        n_test: Held-out tasks.
        seed: Part of the prompt, so that other seeds give other tasks.

    Raises:
        ValueError: The model wrote nothing new in several calls, and there are too few tasks.
    """
    found: dict[str, tuple[str, str]] = {}
    wanted: dict[Split, int] = {"train": n_train, "test": n_test}
    idle = 0
    for call in range(10_000):
        kept = divide(list(found.values()))
        if all(len(kept[split]) >= wanted[split] for split in wanted):
            return {split: kept[split][: wanted[split]] for split in wanted}
        if idle >= MOST_IDLE_CALLS:
            break
        asked = f"{offered}\n\nWrite {PER_CALL} tasks. This is request {call} of series {seed}."
        reply = model.invoke([("system", INSTRUCTIONS), ("user", asked)])
        before = len(found)
        for text, about in read_tasks(reply.text):
            found.setdefault(_normalised(text), (text, about))
        idle = idle + 1 if len(found) == before else 0
    have = {split: len(tasks) for split, tasks in divide(list(found.values())).items()}
    raise ValueError(
        f"wanted {wanted} tasks, got {have} after {MOST_IDLE_CALLS} calls of the task writer "
        "without a new one; ask for fewer, or give the server a resource that shows more records"
    )


def read_tasks(reply: str) -> list[tuple[str, str]]:
    """Tasks and their records in a model's reply; what is not well formed is left out."""
    try:
        written = json.loads(reply[reply.index("{") : reply.rindex("}") + 1])["tasks"]
        pairs = [(one["task"], one["about"]) for one in written]
    except (ValueError, KeyError, TypeError):
        return []
    return [(t, a) for t, a in pairs if isinstance(t, str) and isinstance(a, str) and t and a]


def divide(tasks: Sequence[tuple[str, str]]) -> dict[Split, list[Task]]:
    """Divide tasks by the records that they are about, each record wholly to one side.

    The side of a record depends on its name alone: it stays there however many tasks there are, and
    in every data set.
    """
    split: dict[Split, list[Task]] = {"train": [], "test": []}
    for text, about in tasks:
        draw = random.Random(_normalised(about)).random()
        side: Split = "test" if draw < HELD_OUT_SHARE else "train"
        split[side].append(Task(f"{side}-{len(split[side])}", side, text, about))
    return split


def _normalised(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
