"""Interface of a tracker: four methods, called by one thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

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
