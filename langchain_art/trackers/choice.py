"""Choice of a fit's trackers: by `Trainer(trackers=)`, or by W&B's environment variables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.trackers.accelerate_tracker import PACKAGES, AccelerateTracker
from langchain_art.trackers.base import Tracker
from langchain_art.trackers.wandb_tracker import WandbTracker

#: Names that `trackers` may have.
KNOWN = ("wandb", *PACKAGES)
_METHODS = ("start", "log", "keep", "finish")


def chosen_trackers(trackers: Sequence[str | Tracker] | None) -> tuple[Tracker, ...]:
    """The trackers of these names, or objects that are trackers.

    None: W&B if ``WANDB_PROJECT`` or ``WANDB_MODE`` is set, else none. Raises ConfigError for a
    name that is not known or is there twice, and for a package that is not installed.
    """
    if trackers is None:
        mode = os.environ.get("WANDB_MODE")
        asked = bool(mode or os.environ.get("WANDB_PROJECT")) and mode != "disabled"
        chosen: Sequence[Any] = ["wandb"] if asked else []
    elif isinstance(trackers, str):
        raise ConfigError(f"got trackers={trackers!r}, expected a list: trackers=[{trackers!r}]")
    else:
        chosen = list(trackers)
    found = tuple(_tracker(one) for one in chosen)
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"got trackers {names}, expected each only once")
    for name in names:
        _require(name, by_environment=trackers is None)
    return found


def _tracker(one: Any) -> Tracker:
    if one == "wandb":
        return WandbTracker()
    if isinstance(one, str) and one in PACKAGES:
        return AccelerateTracker(one)
    if not isinstance(one, str) and all(callable(getattr(one, name, None)) for name in _METHODS):
        return one
    raise ConfigError(
        f"got the tracker {one!r:.80}, expected one of {', '.join(KNOWN)}, or an object with the "
        f"methods {', '.join(_METHODS)} (langchain_art.trackers.Tracker)"
    )


def _installed(module: str) -> bool:
    """True if there is a package, not only a folder of that name, such as W&B's ``./wandb``."""
    found = find_spec(module)
    return found is not None and found.origin is not None


def _require(name: str, *, by_environment: bool) -> None:
    """Raise ConfigError if a package is missing, before anything runs."""
    if name == "wandb":
        missing = [] if _installed("wandb") else ["wandb"]
        install = "pip install 'langchain-art[wandb]'"
    elif name in PACKAGES:
        missing = [] if _installed(name) else [PACKAGES[name]]
        if not _installed("accelerate"):
            missing.insert(0, "accelerate")
        install = "pip install 'langchain-art[trackers]'"
        if name != "tensorboard":
            install += f" {PACKAGES[name]}"
    else:
        return
    if missing:
        instead = " Or unset WANDB_PROJECT and WANDB_MODE." if by_environment else ""
        raise ConfigError(
            f"The tracker {name!r} needs {' and '.join(missing)}, which is not installed here: "
            f"{install}.{instead}"
        )
