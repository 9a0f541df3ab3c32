"""Rollouts and scenarios that are named on the command line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from langchain_art.client.conversations import read_jsonl
from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import is_graph
from langchain_art.rollout.runner import Rollout


def load(name: str) -> Any:
    """What ``module:attribute`` names, in the current directory too. Raises ConfigError."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"got {name!r}, expected MODULE:NAME, such as my_agent:rollout")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be loaded: {error}") from error


def load_rollout(name: str, policy: str, base_url: str | None) -> Rollout:
    """The rollout `name`, its parameter ``model`` bound to a ChatART. Raises ConfigError."""
    rollout = load(name)
    if is_graph(rollout):
        raise ConfigError(
            f"{name!r} is a graph, which brings no reward; name a function that runs it on a "
            "scenario and returns a number"
        )
    if not callable(rollout):
        raise ConfigError(f"{name!r} is {rollout!r:.100}, expected a function of one scenario")
    if "model" not in inspect.signature(rollout).parameters:
        return cast(Rollout, rollout)
    from langchain_art.chat_models.chat_art import ChatART

    address: dict[str, Any] = {"base_url": base_url} if base_url else {}
    return cast(Rollout, partial(rollout, model=ChatART(model=policy, **address)))


def load_scenarios(name: str) -> list[Any]:
    """Scenarios of a JSONL file, or of a sequence or function ``module:NAME``; at least one."""
    if name.endswith((".jsonl", ".json")) or Path(name).is_file():
        scenarios = list(read_jsonl(Path(name)))
    else:
        found = load(name)
        found = found() if callable(found) else found
        if not isinstance(found, Iterable) or isinstance(found, str):
            raise ConfigError(f"{name!r} is {found!r:.100}, expected scenarios")
        scenarios = list(cast(Iterable[Any], found))
    if not scenarios:
        raise ConfigError(f"{name!r} has no scenarios")
    return scenarios
