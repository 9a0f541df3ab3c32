"""Interface of a tracker, and one in a thread of its own: it may hang or raise, the fit goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeAlias

from pydantic import ValidationError

from langchain_art.packages import replace_file
from langchain_art.wire.identifiers import Frozen

#: Cells of a table: texts are cut and redacted before they get here.
TableRow: TypeAlias = "Mapping[str, str | float | int | None]"


@dataclass(frozen=True)
class FitCard:
    """Facts of a fit that a tracker gets before its first record."""

    fit_id: str
    """Twelve hexadecimal digits, the same for a resumed fit and another for a fresh one."""
    name: str
    """Name of the fit's folder."""
    folder: Path
    config: Mapping[str, str | float | int | bool | None]
    """Config and settings, flat: ``{"config.learning_rate": 2e-5, "seed": 0}``."""


@dataclass(frozen=True)
class TrackerRun:
    """Progress of a tracker's own run."""

    id: str | None
    """Id by which the tracker finds its run again; None: it cannot, and begins another one."""
    sent: int = 0
    """Records of the fit's history that the run has."""
    words: str = ""
    """Place where it can be seen, for a line."""


@dataclass(frozen=True)
class TrackedRecord:
    """One line of a fit's ``history.jsonl``, a step or an evaluation, as trackers get it."""

    number: int
    """Number of the line, from 0: rises by one with every record, also after a resume."""
    step: int
    """The training step, the x axis. An evaluation has the step after which it was made."""
    metrics: Mapping[str, float]
    tables: Mapping[str, Sequence[TableRow]] = field(default_factory=dict[str, Sequence[TableRow]])
    """``runs`` and ``actions`` of a step, capped; empty where a record is sent late."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter in PEFT's format, of the best version or of the last."""

    name: str
    """Name of the policy."""
    folder: Path
    """Deleted when the fit has ended."""
    aliases: tuple[str, ...]
    """``best``, ``last`` or both, and ``v12``."""
    metadata: Mapping[str, Any]


class Tracker(Protocol):
    """Shows a fit somewhere. Whatever it raises is said once, and never ends the fit.

    All methods are called from one thread, which is not the trainer's, in the order `start`, `log`
    for each record, `keep` for at most two adapters a policy, `finish`. What `log` raised for is
    sent again with the next record, and by the resumed fit.
    """

    name: str
    settles: float
    """Seconds after `log` until what was logged would survive a crash of this process."""

    def start(self, fit: FitCard, former: TrackerRun | None) -> TrackerRun:
        """Begin the tracker's run, or go on with the `former` one; says how far it is."""
        ...

    def log(self, record: TrackedRecord) -> None:
        """Show one record."""
        ...

    def keep(self, adapter: AdapterFiles) -> bool:
        """Store an adapter; False if this tracker keeps none."""
        ...

    def finish(self) -> str:
        """End the run; returns where it can be seen, in words."""
        ...


#: Folder of a fit in which its trackers' progress is kept, a file for each.
FOLDER = "trackers"


class TrackerProgress(Frozen):
    """Progress of a tracker, for the resumed fit: ``trackers/wandb.json``."""

    fit_id: str
    run: str | None
    sent: int


class TrackerThread:
    """Gives records to one tracker, in order, each until it was taken.

    Nothing that the tracker does reaches the caller: what it raises is said once through `say`, and
    what it could not take is kept and offered again with the next record. Of `history` it is sent
    what its own run lacks.
    """

    def __init__(
        self,
        tracker: Tracker,
        fit: FitCard,
        history: Sequence[TrackedRecord],
        say: Callable[[str], None],
    ) -> None:
        self._tracker, self._fit, self._say = tracker, fit, say
        self._path = fit.folder / FOLDER / f"{tracker.name}.json"
        self._orders: SimpleQueue[TrackedRecord | AdapterFiles | None] = SimpleQueue()
        self._records = deque(history)
        self._adapters: deque[AdapterFiles] = deque()
        self._begun: TrackerRun | None = None
        self._sent = self._saved = self._kept = 0
        self._first_error: str | None = None
        self._ending = ""
        self._thread = Thread(target=self._work, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    def put(self, what: TrackedRecord | AdapterFiles | None) -> None:
        """Hand over a record or an adapter (None: no more will come); returns at once."""
        self._orders.put(what)

    def outcome(self, seconds: float) -> str:
        """Wait for the end, at most so long; the line says what did not arrive, if anything."""
        self._thread.join(max(0.0, seconds))
        name = self._tracker.name
        left = len(self._records) + len(self._adapters)
        if self._thread.is_alive():
            return (
                f"{name}: it has not finished; {left + self._orders.qsize()} records and adapters "
                "wait. A resumed fit sends what is missing there; history.jsonl has all records."
            )
        if left or self._first_error:
            missing = f"{left} records and adapters are missing there" if left else "all is there"
            return (
                f"{name}: {missing}. The first error: {self._first_error}. {self._ending}".strip()
            )
        adapters = f", adapters: {self._kept}" if self._kept else ""
        return f"{name}: records: {self._sent}{adapters}. {self._ending}".strip()

    def _work(self) -> None:
        self._deliver()
        while (order := self._orders.get()) is not None:
            if isinstance(order, AdapterFiles):
                self._adapters.append(order)
            else:
                self._records.append(order)
            if self._orders.empty():
                self._deliver()
                if self._saved < self._sent and self._orders.empty():
                    time.sleep(self._tracker.settles)  # sent twice is better than lost
                    self._attempt(self._save)
        self._deliver()
        if self._attempt(self._finish) and self._saved < self._sent:
            self._attempt(self._save)

    def _deliver(self) -> None:
        """Offer all that waits, in order, until something is not taken."""
        if self._attempt(self._start):
            while self._records and self._attempt(self._log):
                pass
            while not self._records and self._adapters and self._attempt(self._keep):
                pass

    def _attempt(self, part: Callable[[], None]) -> bool:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            if self._first_error is None:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                self._first_error = reason
                self._say(
                    f"{self._tracker.name}: {reason}. The fit goes on without it; what is missing "
                    "there is offered again with each step."
                )
            return False
        return True

    def _start(self) -> None:
        if self._begun is not None:
            return
        progress = self._progress()
        former = TrackerRun(progress.run, progress.sent) if progress else None
        self._begun = begun = self._tracker.start(self._fit, former)
        while self._records and self._records[0].number < begun.sent:
            self._records.popleft()
        self._sent = self._saved = begun.sent
        if begun.words:
            self._say(f"{self._tracker.name}: {begun.words}")

    def _log(self) -> None:
        record = self._records[0]
        if record.number >= self._sent:
            self._tracker.log(record)
            self._sent = record.number + 1
        self._records.popleft()

    def _keep(self) -> None:
        self._kept += self._tracker.keep(self._adapters[0])
        self._adapters.popleft()

    def _finish(self) -> None:
        if self._begun is not None:
            self._ending = self._tracker.finish()

    def _progress(self) -> TrackerProgress | None:
        """Saved state of this fit; None if missing, unreadable or another fit's."""
        if not self._path.exists():
            return None
        try:
            found = TrackerProgress.model_validate_json(self._path.read_bytes())
        except ValidationError as error:
            self._say(f"{self._path} cannot be read, so a new run begins there: {error}")
            return None
        return found if found.fit_id == self._fit.fit_id else None

    def _save(self) -> None:
        run = self._begun.id if self._begun else None
        progress = TrackerProgress(fit_id=self._fit.fit_id, run=run, sent=self._sent)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, progress.model_dump_json().encode())
        self._saved = self._sent
