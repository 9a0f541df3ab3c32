"""Rollouts and scenarios that are named on the command line."""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from langchain_art.cli.options import say, stderr
from langchain_art.client.conversations import read_jsonl
from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import is_graph
from langchain_art.rollout.runner import Rollout
from langchain_art.rollout.scenarios import load
from langchain_art.training.identity import is_own_module

if TYPE_CHECKING:
    from langchain_art.chat_models.chat_art import ChatART

#: Fields of a chat model that another one makes anew: its name, its address, its connections.
_OF_ITS_OWN = {
    *("model_name", "openai_api_base", "callbacks", "metadata"),
    *("client", "async_client", "root_client", "root_async_client"),
}


@dataclass(frozen=True)
class Loaded:
    """A rollout of the command line, and the chat model that it will call."""

    rollout: Rollout
    model: ChatART | None
    """None: it is one that the rollout makes itself, where it cannot be seen."""
    notes: list[str]


def load_rollout(name: str, policy: str, base_url: str | None, root: Path) -> Loaded:
    """The rollout `name`, which will call `policy` with the settings of its own chat model.

    Its own is the default of its parameter ``model``, or a ChatART that it can reach: in bindings,
    chains and graphs of its program, too. Those that have the policy's name get the new name.
    Where a rollout with the parameter has none, the settings are those of the latest fit of the
    policy below `root`. Raises ConfigError.
    """
    rollout = load(name)
    if is_graph(rollout):
        raise ConfigError(
            f"{name!r} is a graph, which brings no reward; name a function that runs it on a "
            "scenario and returns a number"
        )
    if not callable(rollout):
        raise ConfigError(f"{name!r} is {rollout!r:.100}, expected a function of one scenario")
    from langchain_art.training.fits import latest_of

    base, loaded = policy.partition("@")[0], cast(Rollout, rollout)
    fit = latest_of(root, base) if root.is_dir() else None
    trained = None if fit is None else fit.state.identity.models.get(base)
    where = "" if fit is None else f"training ({root / fit.name})"
    parameter = inspect.signature(rollout).parameters.get("model")
    models = _own_models(rollout, name, parameter)
    named = [model for model in models if model.model_name.partition("@")[0] == base]
    for model in named:
        model.model_name = policy
    if parameter is None and named:
        return Loaded(loaded, named[0], _different(named[0], trained, where))
    if parameter is None:
        others = sorted({model.model_name for model in models})
        note = f"{name} calls no ChatART of {base} that could be found, only {others}"
        return Loaded(loaded, None, [note] if others else [])
    chosen, notes = _one_of(named or models, policy, base_url), list[str]()
    if chosen is None and trained is not None:
        chosen = _chat_model(policy, base_url, trained)
        notes.append(f"{name} has no ChatART of its own: its settings are those of {where}")
    elif chosen is None:
        chosen = _chat_model(policy, base_url, {})
        notes.append(
            f"{name} has no single ChatART of its own, and no fit of {base} is below {root}: "
            "replies are as long as the server allows (no max_tokens). Give its parameter a "
            "default, such as model=ChatART(model=…, max_tokens=…)"
        )
    else:
        notes += _different(chosen, trained, where)
    return Loaded(partial(cast("Any", loaded), model=chosen), chosen, notes)


def rollout_of(name: str, policy: str, base_url: str | None, root: Path) -> Rollout:
    """The rollout of `load_rollout`, whose notes are printed."""
    if base_url is not None:
        os.environ["ART_BASE_URL"] = base_url  # of the program's own ChatART
    loaded = load_rollout(name, policy, base_url, root)
    for note in loaded.notes:
        say(note, on=stderr, style="bold red")
    return loaded.rollout


def _own_models(rollout: Any, name: str, parameter: inspect.Parameter | None) -> list[ChatART]:
    from langchain_art.chat_models.chat_art import ChatART

    if parameter is not None and isinstance(parameter.default, ChatART):
        return [parameter.default]
    found: list[ChatART] = []
    others = [one for one in list(sys.modules.values()) if not is_own_module(one)]
    seen = {id(one) for other in others for one in (other, getattr(other, "__dict__", None))}
    left = [rollout, sys.modules[name.partition(":")[0]]]
    while left:
        one: Any = left.pop()
        kind = cast("type[Any]", type(one))
        if id(one) in seen or (
            issubclass(kind, type) and not is_own_module(sys.modules.get(one.__module__))
        ):
            continue
        seen.add(id(one))
        if issubclass(kind, ChatART):  # `isinstance` would ask proxies for their object
            found.append(one)
        else:
            left += gc.get_referents(one)
    return found


def _one_of(models: list[ChatART], policy: str, base_url: str | None) -> ChatART | None:
    """A model with the settings of all of `models`; None if they differ, or there is none."""
    if not models or any(_settings(one) != _settings(models[0]) for one in models):
        return None
    first = models[0]
    given = {name: getattr(first, name) for name in first.model_fields_set - _OF_ITS_OWN}
    return _chat_model(policy, base_url or first.openai_api_base, given)


def _chat_model(policy: str, base_url: str | None, settings: dict[str, Any]) -> ChatART:
    from langchain_art.chat_models.chat_art import ChatART

    given: dict[str, Any] = dict(settings)
    if base_url:
        given["base_url"] = base_url
    return ChatART(model=policy, **given)


def _settings(model: ChatART) -> dict[str, Any]:
    from langchain_art.training.addresses import sampling_settings

    return sampling_settings(model)[model.model_name]


def _different(model: ChatART, trained: dict[str, Any] | None, where: str) -> list[str]:
    if trained is None:
        return []
    here = _settings(model)
    return [
        f"{name} is {here.get(name)} here and was {trained.get(name)} in {where}"
        for name in sorted({*here, *trained})
        if here.get(name) != trained.get(name)
    ]


def load_scenarios(name: str) -> list[Any]:
    """Scenarios of a file (JSONL, or one JSON list), or of a sequence or function ``module:NAME``.

    Raises ConfigError if there is none.
    """
    if name.endswith(".json") and (listed := _listed(Path(name))) is not None:
        scenarios = listed
    elif name.endswith((".jsonl", ".json")) or Path(name).is_file():
        scenarios = list(read_jsonl(Path(name)))
    else:
        found = load(name)
        found = found() if callable(found) else found
        if not isinstance(found, Iterable) or isinstance(found, str | Mapping):
            raise ConfigError(f"{name!r} is {found!r:.100}, expected a list of scenarios")
        scenarios = list(cast(Iterable[Any], found))
    if not scenarios:
        raise ConfigError(f"{name!r} has no scenarios")
    return scenarios


def _listed(path: Path) -> list[Any] | None:
    """The list that a file is, as one JSON value; None: it is another one, or has several lines."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        return cast("list[Any]", found) if isinstance(found, list) else None
    return None
