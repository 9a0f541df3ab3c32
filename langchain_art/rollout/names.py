"""Rollouts by name, ``module:function``: how a fit and its workers mean the same one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.rollout.graph_rollout import is_remote

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
    if not module or not inner or "<" in inner:
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
