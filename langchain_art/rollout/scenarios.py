"""Scenarios: their check, content, order and groups' ids; rollouts by name, ``module:function``."""

from __future__ import annotations

import hashlib
import inspect
import json
import operator
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from pydantic_core import PydanticSerializationError, to_jsonable_python

from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import is_remote
from langchain_art.wire import ID
from langchain_art.wire.identifiers import comparable

S = TypeVar("S")

#: Bytes of JSON above which a scenario is left out of its group's metadata.
MAX_SCENARIO = 64_000
_HASH = re.compile("[0-9a-f]{16}")


def check_scenarios(scenarios: object, name: str) -> None:
    """Raise ConfigError if `scenarios`, the argument `name`, are no sequence of scenarios.

    A text is a sequence too: of its letters, each of which would be a scenario.
    """
    is_single = isinstance(scenarios, str | bytes | Mapping)
    if is_single or not (hasattr(scenarios, "__len__") and hasattr(scenarios, "__getitem__")):
        what_to_do = "put a single one in brackets" if is_single else "write list(…) around it"
        raise ConfigError(
            f"{name}: got {type(scenarios).__name__} ({scenarios!r:.100}), expected a list of "
            f"scenarios; {what_to_do}"
        )


def shown(scenario: Any, name: str) -> str:
    """A scenario in an error: its `name`, and its beginning where that name is a hash of it."""
    return f"{name!r}: {scenario!r:.100}" if _HASH.fullmatch(name) else repr(name)


def check_count(value: Any, name: str, least: int | None = None) -> int:
    """`value`, the option `name`, as Python's integer (NumPy's cannot be stored as JSON).

    Raises ConfigError if it is no integer of at least `least`.
    """
    bound = "" if least is None else f" of at least {least}"
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or (least is not None and count < least):
        raise ConfigError(f"got {name}={value!r:.100}, expected an integer{bound}")
    return count


def portable(scenario: Any) -> dict[str, Any]:
    """``{"scenario": ...}`` for a group's metadata, where an evaluator finds it.

    Models and data classes become mappings, arrays lists, and sets sorted lists, the same in every
    process. A scenario that is not JSON, or 64 kB or more of it, is left out, and
    ``{"scenario_left_out": …}`` says why.
    """
    try:
        plain = to_jsonable_python(comparable(scenario))
        text = json.dumps(plain, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (PydanticSerializationError, TypeError, ValueError, RecursionError):
        return {"scenario_left_out": "it is not JSON throughout"}
    if size >= MAX_SCENARIO:
        return {"scenario_left_out": f"it is {size:,} bytes of JSON, of at most {MAX_SCENARIO:,}"}
    return {"scenario": json.loads(text)}


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
            before = re.sub(r"[^A-Za-z0-9._:@+=-]+", "-", prefix)  # a base model's is ORG/NAME
            name = f"{before}:{slug}-{digest}{number}"
        yield name


def draw(scenarios: Sequence[S], position: int, seed: int) -> S:
    """The scenario at a position, from 0, of shuffled epochs, each without replacement.

    Depends on its arguments only, so that a resumed fit goes on where the former one stopped.
    """
    epoch, place = divmod(position, len(scenarios))
    return scenarios[_order(len(scenarios), epoch, seed)[place]]


@lru_cache(maxsize=4)
def _order(count: int, epoch: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


_WHAT_TO_DO = (
    "Give `fit` the name by which workers run it instead, such as 'my_agent:rollout', or put it "
    "into a module of its own"
)


def load(name: str) -> Any:
    """Import ``module:attribute``, from the current directory too. Raises ConfigError."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"got {name!r}, expected MODULE:NAME, such as my_agent:rollout")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be loaded: {error}") from error


def rollout_name(rollout: object) -> str:
    """The name by which workers run a rollout; a text is one already.

    Of a function in the program that was started (``python train.py``) it begins with the file's
    name: ``train:rollout``.

    Raises:
        ConfigError: no other process finds the rollout by a name, or it is a `RemoteGraph`, which
            runs on another machine already.
    """
    if isinstance(rollout, str):
        return rollout
    if is_remote(rollout):
        raise ConfigError(
            "got a RemoteGraph for workers, expected a function: it runs on another machine already"
        )
    module = getattr(rollout, "__module__", None)
    inner = getattr(rollout, "__qualname__", None)
    bound = inspect.ismethod(rollout) and not isinstance(rollout.__self__, type)
    if not module or not inner or "<" in inner or bound:
        raise ConfigError(
            f"got the rollout {rollout!r:.200}, expected a function of a module: workers import it "
            f"by its name. {_WHAT_TO_DO}."
        )
    if module == "__main__":
        module = _main_module(rollout)
    return f"{module}:{inner}"


def _main_module(rollout: object) -> str:
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name).removesuffix(".__main__")
    if (file := getattr(main, "__file__", None)) is not None:
        return Path(file).stem
    raise ConfigError(
        f"got the rollout {rollout!r:.200} of a notebook or a prompt, which workers cannot import. "
        f"{_WHAT_TO_DO}."
    )


def check_portable(scenarios: Iterable[object], name: str) -> None:
    """Raise ConfigError if a scenario, of the argument `name`, does not go over the wire as it is.

    Workers get it as JSON: a model or a tuple would arrive as something else.
    """
    for index, scenario in enumerate(scenarios):
        try:
            text = json.dumps(scenario, allow_nan=False, ensure_ascii=False)
            same = json.loads(text.encode()) == scenario
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise ConfigError(
                f"{name}[{index}]: got {type(scenario).__name__} {scenario!r:.200}, expected a "
                "JSON value (a text, number, list or mapping with texts as keys): workers get "
                "scenarios over HTTP. Pass what the rollout makes it from, such as its id."
            )
