"""A fit's trackers by `Trainer(trackers=)` or W&B's environment variables; those of accelerate."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.trackers.tracker_thread import (
    AdapterFiles,
    FitCard,
    TrackedRecord,
    Tracker,
    TrackerRun,
)
from langchain_art.trackers.wandb_tracker import WandbTracker

#: Names of accelerate's trackers, and the package that each needs.
PACKAGES = {
    "aim": "aim",
    "clearml": "clearml",
    "comet_ml": "comet-ml",
    "dvclive": "dvclive",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
}
PROJECT = "langchain-art"
#: What MLflow refuses in the name of a metric, which may hold the name of a node.
_REFUSED = re.compile(r"[^\w\-./ :]")


class AccelerateTracker:
    """Curves of a fit through one of accelerate's `GeneralTracker`s (`PACKAGES`), which need torch.

    A resumed fit goes on with the run in TensorBoard, MLflow and Trackio. In the others it begins
    another run, which has the whole history. Tables are not shown; MLflow keeps adapters.
    """

    settles = 0.0

    def __init__(self, name: str) -> None:
        self.name = name
        self._tracker: Any = None
        self._where = ""

    def start(self, fit: FitCard, former: TrackerRun | None) -> TrackerRun:
        """Begin the run, or go on with it."""
        library: Any = import_module("accelerate.tracking")
        import_module("accelerate").PartialState()  # accelerate's own log needs it
        title = f"{fit.name}-{fit.fit_id}"
        options, run_id, self._where = self._options(fit, title, former)
        self._tracker = library.LOGGER_TYPE_TO_CLASS[self.name](**options)
        self._tracker.start()
        if self.name == "mlflow":
            run_id = self._tracker.tracker.info.run_id
            self._where = f"the run {run_id} of the experiment {PROJECT}"
        goes_on = former is not None and run_id is not None and former.id == run_id
        if not goes_on:
            self._tracker.store_init_configuration(dict(fit.config))
        sent = former.sent if goes_on and former is not None else 0
        return TrackerRun(run_id, sent, self._where)

    def _options(
        self, fit: FitCard, title: str, former: TrackerRun | None
    ) -> tuple[dict[str, Any], str | None, str]:
        if self.name == "tensorboard":
            folder = fit.folder / "tensorboard"
            options = {"run_name": title, "logging_dir": folder}
            return options, title, f"tensorboard --logdir {folder}"
        if self.name == "trackio":
            options = {"run_name": PROJECT, "name": title, "resume": "allow"}
            return options, title, f"trackio show --project {PROJECT}"
        if self.name == "mlflow":
            run_id = former.id if former else None
            return {"experiment_name": PROJECT, "run_id": run_id, "run_name": title}, run_id, ""
        if self.name == "aim":
            return {"run_name": title, "logging_dir": fit.folder / "aim"}, None, ""
        return {"run_name": title}, None, ""

    def log(self, record: TrackedRecord) -> None:
        """The record's metrics; its tables are not shown."""
        values = {_REFUSED.sub("_", name): value for name, value in record.metrics.items()}
        self._tracker.log(values, step=record.step)

    def keep(self, adapter: AdapterFiles) -> bool:
        """Keep it as an artifact of MLflow, ``policy/best``; the others keep none."""
        if not hasattr(self._tracker, "log_artifacts"):
            return False
        self._tracker.log_artifacts(str(adapter.folder), f"{adapter.name}/{adapter.aliases[0]}")
        return True

    def finish(self) -> str:
        """End the run."""
        self._tracker.finish()
        return self._where or "its own page"


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
    name, settles = getattr(one, "name", None), getattr(one, "settles", None)
    has_both = isinstance(name, str) and isinstance(settles, int | float)
    methods = (callable(getattr(one, method, None)) for method in _METHODS)
    if not isinstance(one, str) and has_both and all(methods):
        return one
    raise ConfigError(
        f"got the tracker {one!r:.80}, expected one of {', '.join(KNOWN)}, or an object with the "
        f"methods {', '.join(_METHODS)}, a text `name` and a number `settles` "
        "(langchain_art.trackers.Tracker)"
    )


def _installed(module: str) -> bool:
    """True if there is a package, not only a folder of that name, such as W&B's ``./wandb``."""
    found = find_spec(module)
    return found is not None and found.origin is not None


def _require(name: str, *, by_environment: bool) -> None:
    if name not in KNOWN:
        return
    extra = "wandb" if name == "wandb" else "trackers"
    needed = {"accelerate": "accelerate"} if name in PACKAGES else {}
    needed[name] = PACKAGES.get(name, name)
    if missing := [package for module, package in needed.items() if not _installed(module)]:
        more = "" if name in ("wandb", "tensorboard") else f" {PACKAGES[name]}"
        instead = " Or unset WANDB_PROJECT and WANDB_MODE." if by_environment else ""
        raise ConfigError(
            f"The tracker {name!r} needs {' and '.join(missing)}, which is not installed here: "
            f"pip install 'langchain-art[{extra}]'{more}.{instead}"
        )
