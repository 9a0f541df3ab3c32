"""`Exporter`: runs go to Langfuse, or to another OpenTelemetry backend, and never in the way."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from langchain_art.errors import ConfigError
from langchain_art.export.destinations import Destination, Where, destination
from langchain_art.export.ids import EXPORTED
from langchain_art.export.records import ExportedRun, Labels
from langchain_art.export.run_spans import recorded_spans, spans_of_turns
from langchain_art.export.spool import ExportOutcome, Sender, Spool
from langchain_art.tracing.run import Run
from langchain_art.wire import Trajectory, TrajectoryGroup

#: Seconds that the end of a program or of a fit waits for what is being sent.
DEADLINE = 1.5
_log = logging.getLogger("langchain_art.export")
_NAME = re.compile(r"[\w .@:/+-]{1,100}")


class Exporter:
    """Exports runs: one trace a run, sent once and whole when the run has ended.

    Give it to `capture`, for production traffic, or to `Trainer`. Runs are written to a folder, the
    spool, and sent from there by a thread. A destination that is down, slow or refuses delays the
    program's end by two seconds at most, and loses nothing: what is not sent stays in the spool,
    and ``langchain-art review push --spool FOLDER`` sends it later.

    Secrets in messages and metadata are redacted by pattern before they are sent, and counted.

    Args:
        to: ``langfuse`` (``LANGFUSE_PUBLIC_KEY``, ``LANGFUSE_SECRET_KEY``, ``LANGFUSE_BASE_URL``),
            or ``otlp``: any backend of OpenTelemetry's protocol (``OTEL_EXPORTER_OTLP_ENDPOINT``,
            ``OTEL_EXPORTER_OTLP_HEADERS``).
        name: of the agent, as the traces are called. None: ``agent``; of a fit: its policies.
        spool: folder of what is not sent yet. None: ``out/spool``; of a fit: ``spool`` in its own.
        sample_rate: fraction of the runs that is exported, by a hash of the run's id; of a fit,
            whole groups, by the group's. None: ``LANGFUSE_SAMPLE_RATE``, or all.
        tags: of all traces.

    Raises:
        ConfigError: a key or an address is missing, OpenTelemetry's exporter is not installed, or
            an argument is none of these.

    Example::

        exporter = Exporter("langfuse", name="email-agent", sample_rate=0.1)
        with capture(export=exporter) as run:
            graph.invoke(state)
    """

    def __init__(
        self,
        to: Where = "langfuse",
        *,
        name: str | None = None,
        spool: str | Path | None = None,
        sample_rate: float | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(f"got {name=!r:.120}, expected 1 to 100 letters, digits and ._@:/+-")
        if isinstance(tags, str) or "" in tags:
            raise ConfigError(f"got {tags=!r:.200}, expected a list of texts")
        self.to: Where = to
        self.name = name
        self.tags = tuple(tags)
        self.sample_rate = _rate(sample_rate)
        self._folder = None if spool is None else Path(spool)
        self._open: dict[Path, Outbox] = {}
        destination(to).close()  # raises now what would else be said when the first run has ended

    def chosen(self, id: str) -> bool:
        """True if a run or a group of this id is exported."""
        first = int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big")
        return first < self.sample_rate * 2**64

    def add(self, run: Run | Trajectory) -> None:
        """Export a run of production: one of `capture`, or a trajectory that the server has.

        The run's session is its thread, or ``langfuse_session_id`` of its metadata; its user is
        ``langfuse_user_id`` there. What goes wrong is logged, and never raised. A run that a
        `Trainer` exported stays as that did it, and the log says so.
        """
        if EXPORTED in run.metadata:
            _log.warning("run %s was exported by its fit or evaluation, and is not again", run.id)
        elif self.chosen(run.id):
            try:
                self.outbox().put(production_run(run, self.name, self.tags))
            except Exception as error:  # noqa: BLE001 - an export must not break what it looks at
                _log.warning("run %s was not exported: %s: %s", run.id, type(error).__name__, error)

    def mark(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """A `Trainer`'s group as the server is to have it: its runs say that they are exported."""
        return group.marked({EXPORTED: True}) if self.chosen(group.id) else group

    def outbox(
        self, folder: Path | None = None, warn: Callable[[str], None] = _log.warning
    ) -> Outbox:
        """The way out through `spool`, or else through `folder`; opened on first use."""
        where = self._folder or folder or Path("out/spool")
        known = self._open.get(where)
        if known is None or known.closed:
            waited = 0.0 if known is None else known.waited
            known = Outbox(Spool(where), destination(self.to), warn, waited)
            self._open[where] = known
        return known

    @property
    def waited(self) -> float:
        """Seconds for which programs and fits have waited for this export so far."""
        return sum(outbox.waited for outbox in self._open.values())

    def close(self) -> ExportOutcome | None:
        """Send what there is, for two seconds at most. None: nothing was exported.

        Without it, the end of the program does this.
        """
        outcomes = [outbox.close() for outbox in self._open.values() if not outbox.closed]
        return outcomes[0] if outcomes else None

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Outbox:
    """One spool, the thread that sends it, and the runs that are not in it yet."""

    def __init__(
        self, spool: Spool, to: Destination, warn: Callable[[str], None], waited: float = 0.0
    ) -> None:
        self._spool = spool
        self._sender = Sender(spool, to, warn)
        self._warn = warn
        self._waiting: list[ExportedRun] = []
        # Reentrant: the collector may end a half-read generator, and its scope, within `put`.
        self._lock, self._disk = threading.RLock(), threading.Lock()
        self._writer: threading.Timer | None = None
        self.closed = False
        self.waited = waited
        self._sender.wake()  # what an earlier program has left
        atexit.register(self.close)

    def put(self, run: ExportedRun) -> None:
        """Take a run, which is on disk a second later; does not wait."""
        with self._lock:
            self._waiting.append(run)
            if self._writer is None:  # runs that end within a second share a file
                self._writer = threading.Timer(1.0, self._save)
                self._writer.daemon = True
                self._writer.start()

    def _save(self) -> None:
        with self._disk:  # `close` waits for the writing that is under way
            with self._lock:
                runs, self._waiting, self._writer = self._waiting, [], None
            if runs:
                self.save(f"{time.time_ns():020}.{uuid.uuid4().hex[:8]}", runs)

    def save(
        self,
        name: str,
        runs: Sequence[ExportedRun],
        experiments: dict[str, dict[str, float]] | None = None,
    ) -> None:
        """Put a batch of runs on disk now; when this returns, they are not lost any more.

        A batch of the same name that was sent before is not sent again.
        """
        try:
            self._spool.write(name, runs, experiments)
        except OSError as error:
            self._warn(f"{len(runs)} runs are not exported: {self._spool.folder}: {error}")
            return
        self._sender.wake()

    def close(self) -> ExportOutcome:
        """Write what waits, and send for `DEADLINE` seconds at most."""
        begun = time.monotonic()
        atexit.unregister(self.close)
        self.closed = True
        self._save()
        outcome = self._sender.close(DEADLINE)
        self.waited += time.monotonic() - begun
        return outcome


def push_spool(folder: Path, to: Where = "langfuse") -> ExportOutcome:
    """Send what a spool holds, now, each file once; what is not taken stays there.

    Raises:
        ConfigError: there is no such folder, another process sends it just now, a file in it is
            none of a spool, or a key or an address is missing.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"got the spool {folder}, expected a folder; a fit's is out/NAME/spool, and that of "
            "production is out/spool"
        )
    return Sender(Spool(folder), destination(to), _log.warning).send_all()


def production_run(run: Run | Trajectory, name: str | None, tags: Sequence[str]) -> ExportedRun:
    """A run of production traffic, as it stands now."""
    captured = isinstance(run, Run)
    trajectory = run.trajectory() if captured else run
    spans = recorded_spans(run) if captured else spans_of_turns(trajectory.turns)
    metadata = trajectory.metadata
    threads = [turn.thread for turn in trajectory.turns if turn.thread]
    session = metadata.get("langfuse_session_id") or (threads[0] if threads else None)
    user = metadata.get("langfuse_user_id")
    labels = Labels(
        name=name or "agent",
        environment="production",
        session=None if session is None else str(session),
        user=None if user is None else str(user),
        tags=(*tags, *_texts(metadata.get("langfuse_tags"))),
    )
    return ExportedRun(trajectory=trajectory, spans=spans, labels=labels)


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _rate(given: float | None) -> float:
    told: Any = os.environ.get("LANGFUSE_SAMPLE_RATE", "1") if given is None else given
    try:
        rate = float(told)
    except ValueError:
        rate = -1.0
    if isinstance(told, bool) or not 0.0 <= rate <= 1.0:
        raise ConfigError(f"got a sample_rate of {told!r}, expected a number from 0 to 1")
    return rate
