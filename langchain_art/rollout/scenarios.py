"""Ids of groups, the same in every run of a program; scenarios: their check, content and order."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from pydantic_core import PydanticSerializationError, to_jsonable_python

from langchain_art.errors import ConfigError
from langchain_art.wire import ID

S = TypeVar("S")

#: Bytes of JSON above which a scenario is left out of its group's metadata.
MAX_SCENARIO = 64_000


def check_scenarios(scenarios: object, name: str) -> None:
    """Raise ConfigError if `scenarios`, the argument `name`, are no sequence of scenarios.

    A text is a sequence too: of its letters, each of which would be a scenario.
    """
    if isinstance(scenarios, str | bytes):
        raise ConfigError(
            f"{name}: got the text {scenarios!r:.100}, expected a list of scenarios; write "
            f"[{scenarios!r:.100}] for a single one"
        )
    if isinstance(scenarios, Mapping):
        raise ConfigError(
            f"{name}: got one mapping ({scenarios!r:.100}), expected a list of scenarios; put a "
            "single one in brackets"
        )
    if not (hasattr(scenarios, "__len__") and hasattr(scenarios, "__getitem__")):
        raise ConfigError(
            f"{name}: got {type(scenarios).__name__} ({scenarios!r:.100}), expected a list of "
            "scenarios; write list(…) around it"
        )


def portable(scenario: Any) -> dict[str, Any]:
    """``{"scenario": ...}`` for a group's metadata, where an evaluator finds it.

    Models and data classes become mappings. Empty if the scenario is not JSON, or more than 64 kB.
    """
    try:
        text = json.dumps(to_jsonable_python(scenario), allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (PydanticSerializationError, TypeError, ValueError, RecursionError):
        return {}
    return {"scenario": json.loads(text)} if size < MAX_SCENARIO else {}


def group_ids(prefix: str, scenarios: Iterable[str]) -> Iterator[str]:
    """``prefix:scenario``; later groups of the same scenario get ``:2``, ``:3`` … behind it."""
    seen: Counter[str] = Counter()
    for scenario in scenarios:
        seen[scenario] += 1
        number = f":{seen[scenario]}" if seen[scenario] > 1 else ""
        name = f"{prefix}:{scenario}{number}"
        if not ID.fullmatch(name):
            digest = hashlib.sha256(scenario.encode()).hexdigest()[:16]
            slug = re.sub(r"[^A-Za-z0-9._-]+", "-", scenario)[:24]
            name = f"{prefix}:{slug}-{digest}{number}"
        yield name


def draw(scenarios: Sequence[S], position: int, seed: int) -> S:
    """The scenario at a position, from 0, of shuffled epochs, each without replacement.

    Depends on its arguments only, so that a resumed fit goes on where the former one stopped.
    """
    if not scenarios:
        raise ConfigError("got no training scenarios, expected at least one")
    epoch, place = divmod(position, len(scenarios))
    return scenarios[_order(len(scenarios), epoch, seed)[place]]


@lru_cache(maxsize=4)
def _order(count: int, epoch: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
