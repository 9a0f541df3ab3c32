"""What a fit measures and writes down, so that it survives a crash of the client at any moment.

`fit.json` says who it is, `history.jsonl` what it did, `pending.json` which step it is in.
"""

from __future__ import annotations

import os
import statistics
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from langchain_art.errors import ConfigError
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup

M = TypeVar("M", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EvalResult(_Record):
    """Mean reward of some scenarios, sampled from exactly one version of a model.

    Failed and unjudged runs have no reward; they are counted and not part of `mean`.

    Example::

        EvalResult(mean=0.62, ci95=0.08, n=128, version="email-agent@17", …)   # 0.62 ± 0.08
    """

    kind: Literal["eval"] = "eval"
    step: int | None = None
    """The training step after which it was taken; 0 is before the first."""
    version: str | None
    """``email-agent@17``: what the calls were sampled by; None if no call was heard."""
    mean: float | None
    """None if no run has a reward."""
    ci95: float | None
    """Half width of the 95 % interval, 1.96 · s/√n over the scenarios (over their means, where a
    scenario was sampled more than once); None with fewer than two scenarios."""
    n: int
    """Runs that have a reward."""
    failed: int = 0
    unscored: int = 0
    """Runs that ended well and have no reward."""
    tokens: dict[str, int] = Field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        mean = "no rewards" if self.mean is None else f"{self.mean:.3f}"
        spread = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        failed = f", {self.failed} failed" if self.failed else ""
        unscored = f", {self.unscored} unscored" if self.unscored else ""
        return f"{mean}{spread} (n={self.n}{failed}{unscored})"


class StepRecord(_Record):
    """One training step, as a line of ``history.jsonl``."""

    kind: Literal["step"] = "step"
    step: int
    version: int
    """The version that served when the step was done."""
    reward_mean: float | None
    reward_std: float | None
    """Standard deviation over all runs of the step."""
    groups: int
    failed: int = 0
    retried: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    """reason -> count, as the server says it, and ``groups.unjudged`` of the client."""
    metrics: dict[str, float] = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)
    """``rollout``, ``judge``, ``train`` and ``total``."""
    tokens: dict[str, int] = Field(default_factory=dict)


class FitState(_Record):
    """Who a fit is: ``fit.json``."""

    fit_id: str
    policy: str
    seed: int
    pinned: int | None = None
    """The version that this fit pinned as its best."""
    failed_jobs: dict[int, int] = Field(default_factory=dict)
    """step -> jobs that failed there; each new attempt needs a new key."""

    def key(self, step: int) -> str:
        """The idempotency key of a step's job: the same step is never trained twice."""
        attempt = self.failed_jobs.get(step, 0)
        return f"{self.fit_id}:step:{step}" + (f":{attempt + 1}" if attempt else "")


class FitResult(_Record):
    """How a fit went.

    Example::

        result = await trainer.fit(rollout, train, steps=50, eval_scenarios=held_out)
        result.before.mean, result.after.mean, result.adapter   # 0.31, 0.84, "email-agent@50"
    """

    fit_id: str
    policy: str
    version: int
    """The version that serves now."""
    before: EvalResult | None = None
    after: EvalResult | None = None
    best: EvalResult | None = None
    """The evaluation with the highest mean; its version is pinned on the server."""
    history: tuple[StepRecord, ...] = ()
    evals: tuple[EvalResult, ...] = ()
    dropped: dict[str, int] = Field(default_factory=dict)
    """What all steps left out, by reason."""

    @property
    def adapter(self) -> str:
        """The final version's name: ``email-agent@50``."""
        return f"{self.policy}@{self.version}"


class PendingStep(_Record):
    """A step whose groups are judged, written before any of it is sent: ``pending.json``.

    After a crash exactly these groups are sent under exactly this step's key, so that the server
    finds either a job it knows or one that never was.
    """

    step: int
    groups: tuple[TrajectoryGroup, ...]
    config: TrainConfig
    unjudged: int = 0
    retried: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All runs of the step."""
        return [t for group in self.groups for t in group.trajectories]


_line: TypeAdapter[EvalResult | StepRecord] = TypeAdapter(
    Annotated[EvalResult | StepRecord, Field(discriminator="kind")]
)


def summarize(
    trajectories: Sequence[Trajectory], *, step: int | None, version: str | None, seconds: float
) -> EvalResult:
    """Mean and 95 % interval of the rewards there are."""
    by_scenario: defaultdict[str | None, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            by_scenario[trajectory.scenario].append(trajectory.reward)
    rewards = [reward for group in by_scenario.values() for reward in group]
    means = [statistics.fmean(group) for group in by_scenario.values()]
    failed = sum(t.status == "failed" and t.reward is None for t in trajectories)
    return EvalResult(
        step=step,
        version=version,
        mean=statistics.fmean(rewards) if rewards else None,
        ci95=1.96 * statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None,
        n=len(rewards),
        failed=failed,
        unscored=len(trajectories) - len(rewards) - failed,
        tokens=tokens(trajectories),
        seconds=seconds,
    )


def tokens(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Tokens of all calls whose usage is known: ``prompt`` and ``completion``."""
    usages = [turn.usage for t in trajectories for turn in t.turns if turn.usage]
    return {
        "prompt": sum(u.prompt_tokens for u in usages),
        "completion": sum(u.completion_tokens for u in usages),
    }


class History:
    """The files of one fit under `directory`.

    Args:
        directory: made if it is missing.
        policy: whose fit it is.
        seed: of the order of the scenarios.
        resume: go on with the fit that is there. False: put its files aside (``….<fit id>``).

    Raises:
        ConfigError: the directory holds the fit of another policy or seed, or a broken file.
    """

    def __init__(self, directory: Path, policy: str, seed: int, *, resume: bool) -> None:
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
        if state is not None and (state.policy, state.seed) != (policy, seed):
            raise ConfigError(
                f"{directory} holds a fit of policy {state.policy!r} with seed {state.seed}, got "
                f"{policy!r} with seed {seed}. Choose another out_dir, or pass resume=False."
            )
        self.resumed = state is not None
        self.state = state or FitState(fit_id=uuid.uuid4().hex[:12], policy=policy, seed=seed)
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

    @property
    def done(self) -> int:
        """Steps that are finished."""
        return self.steps[-1].step if self.steps else 0

    def eval_at(self, step: int) -> EvalResult | None:
        """The evaluation taken after `step`."""
        return next((e for e in self.evals if e.step == step), None)

    def dropped(self) -> dict[str, int]:
        """What all steps left out, by reason."""
        total: Counter[str] = Counter()
        for record in self.steps:
            total.update(record.dropped)
        return dict(total)

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

    def _read(self, path: Path, kind: type[M]) -> M | None:
        if not path.exists():
            return None
        try:
            return kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def _write(self, path: Path, value: BaseModel) -> None:
        temporary = path.with_name(f".{path.name}.new")
        with temporary.open("w") as file:
            file.write(value.model_dump_json(fallback=str))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
