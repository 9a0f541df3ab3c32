"""What survives a crash of the client at any moment: the files of a fit.

`fit.json` says who it is, `history.jsonl` what it did, `pending.json` which step it is in.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from langchain_art.errors import ConfigError
from langchain_art.training.results import EvalResult, Record, StepRecord
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup

M = TypeVar("M", bound=BaseModel)


class FitState(Record):
    """Who a fit is: ``fit.json``."""

    fit_id: str
    policies: tuple[str, ...]
    seed: int
    trainable: dict[str, bool] = Field(default_factory=dict)
    """Which calls learned in the latest step."""
    pinned: dict[str, int] = Field(default_factory=dict)
    """policy -> the version that this fit pinned as its best."""
    failed_jobs: dict[int, int] = Field(default_factory=dict)
    """step -> times that one of its jobs failed; each new attempt needs new keys."""

    def key(self, policy: str, step: int) -> str:
        """The idempotency key of a policy's job: the same step is never trained twice."""
        attempt = self.failed_jobs.get(step, 0)
        return f"{self.fit_id}:{policy}:step:{step}" + (f":{attempt + 1}" if attempt else "")


class PendingStep(Record):
    """A step whose groups are judged, written before any of it is sent: ``pending.json``.

    After a crash exactly these groups are sent under exactly this step's keys, so that the server
    finds, for each policy, either a job it knows or one that never was.
    """

    step: int
    groups: tuple[TrajectoryGroup, ...]
    config: TrainConfig
    trainable: dict[str, bool] = Field(default_factory=dict)
    remote: bool = False
    """The server has the runs already, put together from their calls: only rewards are sent."""
    unjudged: int = 0
    retried: int = 0
    resampled: int = 0
    drawn: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All runs of the step."""
        return [t for group in self.groups for t in group.trajectories]


_line: TypeAdapter[EvalResult | StepRecord] = TypeAdapter(
    Annotated[EvalResult | StepRecord, Field(discriminator="kind")]
)


class History:
    """The files of one fit under `directory`.

    Args:
        directory: made if it is missing.
        policies: whose fit it is.
        seed: of the order of the scenarios.
        resume: go on with the fit that is there. False: put its files aside (``….<fit id>``).

    Raises:
        ConfigError: the directory holds the fit of other policies or seed, or a broken file.
    """

    def __init__(
        self, directory: Path, policies: Sequence[str], seed: int, *, resume: bool
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = directory / "history.jsonl"
        self._pending = directory / "pending.json"
        state = self._read(directory / "fit.json", FitState)
        if state is not None and not resume:
            for path in (directory / "fit.json", self._lines, self._pending):
                if path.exists():
                    path.rename(path.with_name(f"{path.name}.{state.fit_id}"))
            state = None
        if state is not None and (state.policies, state.seed) != (tuple(policies), seed):
            raise ConfigError(
                f"{directory} holds a fit of {' and '.join(state.policies)} with seed "
                f"{state.seed}, got {' and '.join(policies)} with seed {seed}. Choose another "
                "out_dir, or pass resume=False."
            )
        self.resumed = state is not None
        self.state = state or FitState(
            fit_id=uuid.uuid4().hex[:12], policies=tuple(policies), seed=seed
        )
        if state is None:
            self.save(self.state)
        self.steps: list[StepRecord] = []
        self.evals: list[EvalResult] = []
        self._load()

    def _load(self) -> None:
        if not self._lines.exists():
            return
        whole, newline, torn = self._lines.read_text().rpartition("\n")
        if torn:  # the last line of a client that died while it wrote: it never happened
            self._lines.write_text(whole + newline)
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                self._keep(_line.validate_json(text))
            except ValidationError as error:
                raise ConfigError(
                    f"{self._lines}, line {number} is not a record of a fit: {error}. Pass "
                    "resume=False to begin anew."
                ) from error

    def _keep(self, record: EvalResult | StepRecord) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)
        else:
            self.evals.append(record)

    def append(self, record: EvalResult | StepRecord) -> None:
        """Add a line; when this returns, it is on disk."""
        with self._lines.open("a") as file:
            file.write(record.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._keep(record)

    def save(self, state: FitState) -> None:
        """Replace ``fit.json``."""
        self._write(self.directory / "fit.json", state)
        self.state = state

    def selects(self, trainable: Mapping[str, bool]) -> dict[str, bool] | None:
        """Note which calls learn from now on; returns the former choice if it was another."""
        former = self.state.trainable
        if former == trainable:
            return None
        self.save(self.state.model_copy(update={"trainable": dict(trainable)}))
        return former if self.resumed else None

    @property
    def done(self) -> int:
        """Steps that are finished."""
        return self.steps[-1].step if self.steps else 0

    def eval_at(self, step: int) -> EvalResult | None:
        """The evaluation taken after `step`."""
        return next((e for e in self.evals if e.step == step), None)

    def pending(self) -> PendingStep | None:
        """The half-done step, if there is one."""
        found = self._read(self._pending, PendingStep)
        return found if found is not None and found.step == self.done + 1 else None

    def begin(self, pending: PendingStep) -> None:
        """Write a step down before it is sent."""
        self._write(self._pending, pending)

    def end(self) -> None:
        """Forget the half-done step."""
        self._pending.unlink(missing_ok=True)

    def drawn(self, per_step: int) -> int:
        """Scenarios that were drawn until now, those of the half-done step included.

        Args:
            per_step: scenarios of a step, for fits that began before this was written down.
        """
        if (pending := self.pending()) is not None:
            return pending.drawn or pending.step * per_step
        return (self.steps[-1].drawn or self.done * per_step) if self.steps else 0

    def _read(self, path: Path, kind: type[M]) -> M | None:
        if not path.exists():
            return None
        try:
            return kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(
                f"{path} cannot be read: {error}. Delete it, or choose another out_dir."
            ) from error

    def _write(self, path: Path, value: BaseModel) -> None:
        temporary = path.with_name(f".{path.name}.new")
        with temporary.open("w") as file:
            file.write(value.model_dump_json(fallback=str))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
