"""Fits as their folders tell of them: for `langchain-art fits`, `curve` and `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from langchain_art.errors import ConfigError
from langchain_art.training.fit_state import (
    FIT,
    HISTORY,
    FitState,
    Line,
    is_running,
    read_records,
    read_state,
)
from langchain_art.training.results.records import EvalResult, StepRecord


@dataclass(frozen=True)
class Fit:
    """A fit that runs, was stopped or is finished."""

    name: str
    """Name of its folder, below the folder that was searched."""
    state: FitState
    lines: list[Line]
    """Lines of its ``history.jsonl``."""
    at: float
    """Seconds since the epoch: when its files were last written."""
    running: bool
    """True if a process runs it just now."""

    @property
    def steps(self) -> list[StepRecord]:
        """Steps, those that were rolled back included."""
        return [one for one in self.lines if isinstance(one, StepRecord)]

    @property
    def evals(self) -> list[EvalResult]:
        """Evaluations, those of versions that were rolled back included."""
        return [one for one in self.lines if isinstance(one, EvalResult)]

    @property
    def done(self) -> int:
        """Steps that are finished."""
        return self.steps[-1].step if self.steps else 0

    @property
    def words(self) -> str:
        """``finished``, ``running`` or ``stopped``."""
        return "running" if self.running else "finished" if self.finished else "stopped"

    @property
    def finished(self) -> bool:
        """True if all steps that were asked for are done (or it ended early), and evaluated."""
        ended = self.state.finished > 0 and bool(self.state.stopped)
        return ended or 0 < self.state.steps <= self.state.finished

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """(step, mean reward): held out if it was ever evaluated, else of the training batches."""
        held_out = [(e.step or 0, e.mean) for e in self.evals if e.mean is not None]
        return held_out or [
            (record.step, record.reward_mean)
            for record in self.steps
            if record.reward_mean is not None
        ]

    @property
    def held_out(self) -> bool:
        """True if `rewards` are those of held-out scenarios."""
        return any(e.mean is not None for e in self.evals)

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, mean reward) of the best, the earliest of equals."""
        return max(self.rewards, key=lambda one: (one[1], -one[0]), default=None)

    @property
    def versions(self) -> str:
        """Versions to use: the best, or where it was not evaluated the newest."""
        if self.best is not None and self.held_out:
            return next(e.version for e in self.evals if (e.step or 0, e.mean) == self.best)
        made = [one for one in self.lines if not isinstance(one, EvalResult)]
        last = made[-1].versions if made else {}
        return " + ".join(f"{name}@{last.get(name, 0)}" for name in self.state.identity.policies)


def read_fits(root: Path) -> list[Fit]:
    """The fits below a folder, the latest last; without those that a fresh one moved aside."""
    found = [
        path.parent for path in root.rglob(FIT) if "earlier" not in path.relative_to(root).parts
    ]
    fits = [fit for folder in found if (fit := _read(folder, root)) is not None]
    return sorted(fits, key=lambda fit: fit.at)


def chosen_fits(root: Path, names: Sequence[str]) -> list[Fit]:
    """The fits of these names, in their order; all if there is no name. Raises ConfigError."""
    known = {fit.name: fit for fit in read_fits(root)}
    if not known:
        raise ConfigError(
            f"There is no fit below {root}. A Trainer writes one there: Trainer(name=…) to "
            f"{root}/NAME. Search another folder with --root."
        )
    chosen: list[Fit] = []
    for name in names:
        moved = _read(root / name, root)  # also one in `earlier`
        if moved is None:
            raise ConfigError(
                f"got the fit {name!r}, expected one of those below {root}: {', '.join(known)}"
            )
        chosen.append(moved)
    return chosen or list(known.values())


def latest_of(root: Path, policy: str) -> Fit | None:
    """The latest fit of a policy below a folder, if there is one."""
    of_policy = [fit for fit in read_fits(root) if policy in fit.state.identity.policies]
    return of_policy[-1] if of_policy else None


def _read(folder: Path, root: Path) -> Fit | None:
    state = read_state(folder / FIT, FitState)
    if state is None:
        return None
    lines = folder / HISTORY
    return Fit(
        name=folder.relative_to(root).as_posix(),
        state=state,
        lines=list(read_records(lines)) if lines.exists() else [],
        running=is_running(folder),
        at=max(path.stat().st_mtime for path in (folder / FIT, lines) if path.exists()),
    )
