"""Any tracker that the library accelerate has: TensorBoard, MLflow, Trackio, Comet and others."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from langchain_art.trackers.base import AdapterFiles, FitCard, TrackedRecord, TrackerRun

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
    """Curves of a fit through one of accelerate's `GeneralTracker`s, which need torch.

    A resumed fit goes on with the run in TensorBoard, MLflow and Trackio. In the others it begins
    another run, which has the whole history. Tables are not shown; MLflow keeps adapters.

    Args:
        name: of `PACKAGES`.
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
        """Arguments of the tracker's class, the run's id if it is known, and where it is."""
        if self.name == "tensorboard":
            folder = fit.folder / "tensorboard"
            return (
                {"run_name": title, "logging_dir": folder},
                title,
                f"tensorboard --logdir {folder}",
            )
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
