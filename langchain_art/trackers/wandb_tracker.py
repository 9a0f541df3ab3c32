"""Weights & Biases: curves by training step, tables of runs and actions, adapters as artifacts."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.trackers.tracker_thread import AdapterFiles, FitCard, TrackedRecord, TrackerRun

MODES = ("online", "offline", "disabled")
#: Seconds after which an online run that gets no answer becomes an offline one.
_INIT_TIMEOUT = 30.0
#: Seconds after which wandb writes what was logged to its file (its own default is 15: a killed
#: process would lose the steps of the last 15 seconds).
_FLUSH = 0.2


class WandbTracker:
    """Sends a fit to W&B, or to files of W&B that ``wandb sync`` sends later.

    The x axis is ``training_step``; W&B's own step is the number of the record, so that what is
    sent again is not shown twice. The run's id is the fit's: a resumed fit goes on with it.
    Offline, each part of a resumed fit is a folder of its own with that id, which ``wandb sync``
    joins.

    Args:
        project: None: ``WANDB_PROJECT``, else ``langchain-art``.
        mode: ``online``, ``offline``, or ``disabled``. None: ``WANDB_MODE``; without it ``online``
            if there is a key, else ``offline``. An online run that cannot be begun within 30 s is
            an offline one, and says so.

    Raises:
        ConfigError: no such mode.
    """

    name = "wandb"
    settles = 2 * _FLUSH

    def __init__(self, project: str | None = None, *, mode: str | None = None) -> None:
        chosen = mode or os.environ.get("WANDB_MODE") or None
        if chosen is not None and chosen not in MODES:
            raise ConfigError(f"got the W&B mode {chosen!r}, expected one of {', '.join(MODES)}")
        self._mode = chosen
        self._project = project or os.environ.get("WANDB_PROJECT") or "langchain-art"
        self._run: Any = None
        self._fallen_back = ""

    def start(self, fit: FitCard, former: TrackerRun | None) -> TrackerRun:
        """Begin the run, or go on with it: online with what the server has, offline with ours."""
        wandb: Any = import_module("wandb")
        try:
            mode = self._mode or ("online" if wandb.login(prompt=False) else "offline")
            known = former.id if former is not None and mode != "online" else None
            run_id = known or fit.fit_id
            run = self._init(wandb, fit, run_id, mode)
        except Exception as error:
            if self._mode not in (None, "online"):
                raise
            # wandb keeps the id of a run that it could not begin: the offline one has another.
            reason = " ".join(str(error).split())[:200]
            self._fallen_back = f" (offline, because online: {type(error).__name__}: {reason})"
            mode, run_id = "offline", f"{fit.fit_id}-offline"
            run = self._init(wandb, fit, run_id, mode)
        self._run = run
        run.define_metric("training_step", hidden=True)
        run.define_metric("*", step_metric="training_step")
        run.define_metric("val/reward", step_metric="training_step", summary="max,last")
        if mode == "online":
            sent = int(run.starting_step) if run.resumed else 0
        else:
            sent = former.sent if former is not None and former.id == run_id else 0
        return TrackerRun(run_id, sent, self._where())

    def _init(self, wandb: Any, fit: FitCard, run_id: str, mode: str) -> Any:
        settings = wandb.Settings(
            console="off",  # the terminal is the trainer's
            silent=True,
            init_timeout=_INIT_TIMEOUT,
            x_transaction_log_flush_interval=_FLUSH,
        )
        return wandb.init(
            project=self._project,
            id=run_id,
            name=fit.name,
            config=dict(fit.config),
            resume="allow",
            mode=mode,
            reinit="create_new",  # a run of the caller's own is left alone
            settings=settings,
        )

    def log(self, record: TrackedRecord) -> None:
        """All of a record at once, so that none of it waits for the next."""
        wandb: Any = import_module("wandb")
        values: dict[str, Any] = {"training_step": record.step, **record.metrics}
        for name, rows in record.tables.items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            data = [[row.get(column) for column in columns] for row in rows]
            values[name] = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log(values, step=record.number, commit=True)

    def keep(self, adapter: AdapterFiles) -> bool:
        """Keep it as a ``lora`` artifact. Offline, wandb copies the files to its data folder."""
        wandb: Any = import_module("wandb")
        artifact = wandb.Artifact(adapter.name, type="lora", metadata=dict(adapter.metadata))
        for path in sorted(adapter.folder.rglob("*")):
            if path.is_file():
                artifact.add_file(str(path), name=path.relative_to(adapter.folder).as_posix())
        self._run.log_artifact(artifact, aliases=list(adapter.aliases))
        return True

    def finish(self) -> str:
        """End the run; return its address, or the command that sends its files."""
        where = self._where()
        self._run.finish()
        return where

    def _where(self) -> str:
        run = self._run
        if run.disabled:
            return "disabled"
        if not run.offline:
            return f"{run.url}"
        folder = Path(run.settings.sync_dir)
        parts = sorted(folder.parent.glob(f"offline-run-*-{run.id}"))
        return f"wandb sync {' '.join(map(str, parts))}{self._fallen_back}"
