"""The files of a fit, from which it resumes after a crash.

``fit.json`` identifies it, ``history.jsonl`` has a line per step and evaluation, ``pending.json``
the step that is in progress.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from langchain_art.errors import ConfigError
from langchain_art.packages import locked, replace_file
from langchain_art.training.advantages import RunAdvantages
from langchain_art.training.identity import FitIdentity
from langchain_art.training.learning_rates import next_rate
from langchain_art.training.records import (
    BatchFacts,
    EvalResult,
    FitResult,
    Rates,
    Rollback,
    StepRecord,
    best_of_evals,
)
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup
from langchain_art.wire.identifiers import Frozen

M = TypeVar("M", bound=BaseModel)
#: The names of a fit's files.
FIT, HISTORY, LOCK = "fit.json", "history.jsonl", "fit.lock"
#: Of a fit's name in its keys, which have 128 characters, up to 64 of them a policy's name.
_NAME_LENGTH = 32


def read_state(path: Path, kind: type[M]) -> M | None:
    """The record in a file; None if there is no file. Raises ConfigError if it is broken."""
    if not path.exists():
        return None
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Delete it, or choose another out_dir."
        ) from error


def write_state(path: Path, value: BaseModel) -> None:
    """Replace a file atomically; when this returns, it is on disk."""
    replace_file(path, value.model_dump_json(fallback=str).encode())


@contextmanager
def alone(directory: Path) -> Generator[None, None, None]:
    """Holds a fit's folder; raises ConfigError if another process runs the fit in it."""
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / LOCK) as mine:
        if not mine:
            raise ConfigError(
                f"Another process runs the fit in {directory} just now. Wait for it or stop it, "
                "or give this one a folder of its own: Trainer(name=…)."
            )
        yield


def is_running(directory: Path) -> bool:
    """True if some process runs the fit of a folder just now."""
    path = directory / LOCK
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class FitState(Frozen):
    """State of a fit: ``fit.json``; its steps are in ``history.jsonl``."""

    fit_id: str
    name: str = ""
    """The name of its folder, as far as a key can have it: in the names of jobs and curves."""
    identity: FitIdentity
    steps: int = 0
    """Steps that the latest call of `Trainer.fit` asked for."""
    finished: int = 0
    """Steps of which the whole fit, with its last evaluation, is done; 0: it is not."""
    trainable: dict[str, bool] = Field(default_factory=dict)
    """Calls that were trained in the latest step."""
    began_with: dict[str, int] = Field(default_factory=dict)
    """policy -> the version that served when the fit began."""
    learning_rate: Rates = Field(default_factory=dict)
    """Rates of the first step, without its schedule: the config's own, or the one that was chosen;
    empty: no step has begun. Rates of later steps: `History.rates`."""
    pinned: frozenset[str] = frozenset()
    """The best versions and the latest, as far as this fit pinned them."""
    stopped: str = ""
    """Reason why the fit ended before its steps did."""
    failed_jobs: dict[int, int] = Field(default_factory=dict)
    """step -> number of failed jobs; each attempt needs new idempotency keys."""

    @property
    def used(self) -> FitIdentity:
        """The identity, with the learning rate that was chosen where the config names none."""
        return self.identity.with_rates(self.learning_rate)

    def config(self, config: TrainConfig, policy: str) -> TrainConfig:
        """A step's config for one policy: a KL penalty without a reference gets the fit's own."""
        if config.kl is None or config.kl.reference is not None:
            return config
        kl = config.kl.model_copy(update={"reference": self.began_with.get(policy)})
        return config.model_copy(update={"kl": kl})

    def key(self, policy: str, step: int) -> str:
        """The idempotency key of a policy's job: the same step is never trained twice."""
        attempt = self.failed_jobs.get(step, 0)
        fit = f"{self.name}-{self.fit_id}" if self.name else self.fit_id
        return f"{fit}:{policy}:step:{step}" + (f":{attempt + 1}" if attempt else "")


class PendingStep(BatchFacts):
    """A step with judged groups: ``pending.json``, written before anything is sent.

    After a crash the same groups are sent under the same keys, so that no policy is trained twice.
    """

    groups: tuple[TrajectoryGroup, ...]
    configs: dict[str, TrainConfig]
    trainable: dict[str, bool] = Field(default_factory=dict)
    advantages: dict[str, RunAdvantages] | None = None
    """Run's id -> the advantages of its turns, where `Trainer(advantages=)` gives them."""
    remote: bool = False
    """The server has the runs already, assembled from their calls: only rewards are sent."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All runs of the step."""
        return [t for group in self.groups for t in group.trajectories]


Line: TypeAlias = EvalResult | StepRecord | Rollback
"""A line of ``history.jsonl``."""
_line: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


def read_records(path: Path) -> Iterator[Line]:
    """The records of a ``history.jsonl``, without a last line that is being written.

    Raises ConfigError if a line is none.
    """
    # Only a line feed ends a line: a scenario's name may have U+2028 and the like.
    whole = path.read_bytes().rpartition(b"\n")[0]
    for number, text in enumerate(whole.split(b"\n") if whole else (), 1):
        try:
            yield _line.validate_json(text)
        except ValidationError as error:
            raise ConfigError(
                f"{path}, line {number} is not a record of a fit: {error}. Pass fresh=True to "
                "begin anew."
            ) from error


@dataclass(kw_only=True)
class FitRecords:
    """Records of a fit, sorted."""

    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    evals: list[EvalResult] = field(default_factory=list[EvalResult])
    rollbacks: list[Rollback] = field(default_factory=list[Rollback])
    kept: list[StepRecord] = field(default_factory=list[StepRecord])
    """The steps that were not rolled back."""
    kept_evals: list[EvalResult] = field(default_factory=list[EvalResult])
    """The evaluations of versions that were not rolled back."""
    last: Line | None = None

    def keep(self, record: Line) -> None:
        """Add the next record."""
        self.last = record
        if isinstance(record, StepRecord):
            self.steps.append(record)
            self.kept.append(record)
        elif isinstance(record, EvalResult):
            self.evals.append(record)
            self.kept_evals.append(record)
        else:
            self.rollbacks.append(record)
            self.kept = [one for one in self.kept if one.step <= record.to_step]
            self.kept_evals = [one for one in self.kept_evals if (one.step or 0) <= record.to_step]

    @property
    def done(self) -> int:
        """Steps that are finished."""
        return self.steps[-1].step if self.steps else 0

    @property
    def versions(self) -> dict[str, int]:
        """Versions by policy after the last step, or the rollback after it; empty before."""
        if self.rollbacks and self.rollbacks[-1].step == self.done:
            return self.rollbacks[-1].versions
        return self.steps[-1].versions if self.steps else {}

    def eval_at(self, step: int) -> EvalResult | None:
        """The latest evaluation taken after `step`, of versions that were not rolled back since."""
        return next((e for e in reversed(self.kept_evals) if e.step == step), None)

    def result(self, state: FitState, versions: Mapping[str, int]) -> FitResult:
        """The result of the fit so far; `versions` are those that serve."""
        asked = self.done if state.stopped else max(state.steps, self.done)
        return FitResult(
            fit_id=state.fit_id,
            name=state.name,
            versions=dict(versions),
            before=self.eval_at(0),
            after=self.eval_at(asked),
            best=best_of_evals(self.evals),
            history=tuple(self.steps),
            evals=tuple(self.evals),
            rollbacks=tuple(self.rollbacks),
            stopped=state.stopped,
        )


class History(FitRecords):
    """The files of one fit under `directory`. If it is `fresh`, those of a former one are moved.

    They go to the folder ``earlier/<fit id>``. Raises ConfigError if the directory has another fit,
    naming what differs, or a broken file.
    """

    def __init__(self, directory: Path, identity: FitIdentity, *, fresh: bool = False) -> None:
        super().__init__()
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = directory / HISTORY
        self._pending = directory / "pending.json"
        state = read_state(directory / FIT, FitState)
        pinned = frozenset[str]() if state is None else state.pinned
        if state is None or fresh:  # lines whose fit.json somebody deleted are of no known fit
            earlier = directory / "earlier" / (state.fit_id if state else uuid.uuid4().hex[:12])
            for path in (self._pending, self._lines, directory / FIT):  # what it is known by, last
                if path.exists():
                    earlier.mkdir(parents=True, exist_ok=True)
                    path.rename(earlier / path.name)
            state = None
        self.resumed = state is not None
        # A fresh fit takes over what the former one pinned, and unpins it with its own first step.
        self.state = state or FitState(
            fit_id=uuid.uuid4().hex[:12],
            name=re.sub(r"[^A-Za-z0-9.-]+", "-", directory.name).strip("-.")[:_NAME_LENGTH],
            identity=identity,
            pinned=pinned,
        )
        if self._lines.exists():
            whole, newline, torn = self._lines.read_bytes().rpartition(b"\n")
            if torn:  # an incomplete last line: the client ended while it wrote
                self._lines.write_bytes(whole + newline)
            for record in read_records(self._lines):
                self.keep(record)
        if differences := self.state.identity.differences(identity):
            raise ConfigError(self._another(differences))
        if not self.resumed:
            self.save()

    def _another(self, differences: Sequence[str]) -> str:
        policies = self.state.identity.policies
        serving = self.state.began_with | self.versions
        trained = " and ".join(f"{name}@{serving.get(name, 0)}" for name in policies)
        return (
            f"{self.directory} holds another fit ({self.state.fit_id}, {self.done} steps, "
            f"{trained}). What differs: {'; '.join(differences)}. Give this one a folder of its "
            "own, Trainer(name=…) or out_dir=…: it goes on from what the policy has learned. Or "
            "begin anew from the base with fit(…, fresh=True), which moves the other one's files "
            f"to {self.directory / 'earlier' / self.state.fit_id}."
        )

    def append(self, record: Line) -> None:
        """Add a line; when this returns, it is on disk."""
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.keep(record)

    def save(self, **changes: Any) -> None:
        """Change the state, and replace ``fit.json``."""
        state = self.state.model_copy(update=changes)
        write_state(self.directory / FIT, state)
        self.state = state

    def why_finished(self, steps: int) -> str | None:
        """Reason why nothing is left of a fit of so many steps, in words; None: something is."""
        state = self.state
        if state.finished == 0 or (steps > self.done and not state.stopped):
            return None
        found = f"{self.done} steps are in {self.directory}, so nothing was run."
        if state.stopped:
            return (
                f"Ended already: {found} Why it ended: {state.stopped} To go on from what serves, "
                "give the next fit another folder; fresh=True begins anew from the base."
            )
        return (
            f"Finished already: {found} Ask for more steps to go on; fresh=True begins anew from "
            "the base."
        )

    def configs(self, configs: Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
        """The configs of the next step, with their learning rates."""
        rates = self.rates(configs)
        return {
            policy: config.model_copy(update={"learning_rate": rates[policy]})
            for policy, config in configs.items()
        }

    def rates(self, configs: Mapping[str, TrainConfig]) -> Rates:
        """The learning rates of the next step, without its schedule; those of a rollback stay."""
        if self.rollbacks:
            return self.rollbacks[-1].learning_rate
        first = self.state.learning_rate
        return {
            policy: next_rate(first[policy], config, policy, self.steps)
            for policy, config in configs.items()
        }

    def pending(self) -> PendingStep | None:
        """The step in progress, if there is one."""
        found = read_state(self._pending, PendingStep)
        return found if found is not None and found.step == self.done + 1 else None

    def begin(self, pending: PendingStep) -> None:
        """Store a step before it is sent."""
        write_state(self._pending, pending)

    def end(self) -> None:
        """Delete the step in progress."""
        self._pending.unlink(missing_ok=True)
