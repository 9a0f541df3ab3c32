"""A training job: its request, its state and events, its result; and the audit of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from langchain_art.wire.identifiers import Finite, Id, Name, Several, Wire
from langchain_art.wire.train_config import JobConfig, SFTConfig, TrainConfig
from langchain_art.wire.trajectories import Status

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class TrainRequest(Wire):
    """What ``POST /v1/train`` takes, beside the header ``Idempotency-Key``."""

    policy: Name
    groups: Several[Several[Id]] = Field(min_length=1, max_length=4096)
    """Ids of trajectories that the server has, group by group."""
    config: JobConfig = TrainConfig()
    trainable: dict[str, bool] = Field(default_factory=dict, max_length=256)
    """Which calls are trained, by name (`Turn.learns`); empty: all that the policy sampled."""
    retrain: bool = False
    """Train also what earlier jobs of this policy trained: another pass over the same tokens. Else
    each run and each call is trained once; what is left out is counted in `TrainResult.excluded`
    as ``runs.already_trained`` and ``calls.already_trained``. Supervised steps do not count."""

    @model_validator(mode="after")
    def _retrains_by_rewards(self) -> TrainRequest:
        if self.retrain and isinstance(self.config, SFTConfig):
            raise ValueError(
                "got retrain=true for a supervised step, which needs none; leave it out"
            )
        return self


class NodeReport(Wire):
    """One node's part of a step."""

    calls: int
    """Calls that were trained."""
    tokens: int
    """Sampled tokens that were trained."""
    advantage_mean: float
    """Over its trained tokens; 0.0 without any."""
    advantage_abs: float
    """Mean absolute advantage over its trained tokens."""
    excluded: dict[str, int]
    """reason -> calls of this node that were not trained."""


class TrainResult(Wire):
    """The result of one job, with counts of what was excluded, by reason."""

    policy: Name
    version: int
    """The version that is served now. Equal to the job's base version if nothing was trainable."""
    metrics: dict[str, float]
    excluded: dict[str, int]
    """reason -> count, in the unit that the reason names: ``groups.…``, ``runs.…``, ``calls.…``."""
    nodes: dict[str, NodeReport] = Field(default_factory=dict)
    """By path (``team/writer``), else node; ``-`` for calls outside of any graph."""


class TurnAudit(Wire):
    """Whether and why one turn is, or was, trained."""

    call_id: str | None
    node: str | None
    path: Several[str]
    model: str | None
    """``email-agent@17``: the version that sampled it."""
    prompt_tokens: int
    sampled_tokens: int
    trained_tokens: int
    """Of `sampled_tokens`; each token of a run is trained by one turn."""
    excluded_because: str | None
    """Why none is trained; None if they are."""
    prefix: Literal["starts", "extends", "forks"] | None
    """Its prompt shares no token with the turns before it (``starts``), begins with all of one's
    prompt and reply (``extends``), or with a part of them (``forks``). None: tokens lost."""
    prefix_turn: int | None
    """Index of the turn that it extends or forks from."""
    prefix_tokens: int
    """Tokens that it shares with that turn."""


class TrajectoryAudit(Wire):
    """``GET /v1/trajectories/{id}/audit``: a run's trained tokens, and why the rest is excluded."""

    trajectory: Id
    status: Status
    reward: Finite | None
    turns: Several[TurnAudit]
    rows: int
    """Sequences of the learner into which the run is packed."""
    trained_by: dict[str, str]
    """policy -> the job that trained the run; empty if none did."""

    @property
    def sampled_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def trained_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.trained_tokens for turn in self.turns)


class TrainJob(Wire):
    """A durable job: it survives a crash and trains exactly once."""

    id: str
    key: str
    policy: Name
    state: JobState
    base_version: int | None = None
    result: TrainResult | None = None
    error: str | None = None
    attempts: int = 0
    """How often it was begun; a restart of the server goes on with the same attempt."""
    retryable: bool = False
    """It failed for a reason that may pass (no space, an engine's death): the same request with the
    same Idempotency-Key queues it again."""
    created_at: float
    finished_at: float | None = None

    @property
    def ended(self) -> bool:
        """Whether it neither waits nor runs."""
        return self.state not in ("queued", "running")


class JobEvent(Wire):
    """One line of a job's log, in order of `seq`."""

    seq: int
    at: float
    message: str
    progress: float | None = None
    """0 to 1, where it is known."""
