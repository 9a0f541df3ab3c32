"""A training job: its request, its state and events, its result; and the audit of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from langchain_art.wire.identifiers import Finite, Id, Name, Wire
from langchain_art.wire.train_config import JobConfig, TrainConfig
from langchain_art.wire.trajectories import Status

JobState = Literal["queued", "running", "succeeded", "failed"]


class TrainRequest(Wire):
    """What ``POST /v1/train`` takes, beside the header ``Idempotency-Key``."""

    policy: Name
    groups: tuple[tuple[Id, ...], ...] = Field(min_length=1, max_length=4096)
    """Ids of trajectories that the server has, group by group."""
    config: JobConfig = TrainConfig()
    trainable: dict[str, bool] = Field(default_factory=dict, max_length=256)
    """Which calls learn, by name (`Turn.learns`); empty: all that the policy sampled."""


class NodeReport(Wire):
    """What one node contributed to a step."""

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
    """What one job did. What was left out is said, by reason."""

    policy: Name
    version: int
    """The version that is served now. Equal to the job's base version if nothing was trainable."""
    metrics: dict[str, float]
    excluded: dict[str, int]
    """reason -> count, in the unit that the reason names: ``groups.…``, ``runs.…``, ``calls.…``."""
    nodes: dict[str, NodeReport] = Field(default_factory=dict)
    """By path (``team/writer``), else node; ``-`` for calls outside of any graph."""


class TurnAudit(Wire):
    """What training makes, or made, of one turn."""

    call_id: str | None
    node: str | None
    path: tuple[str, ...]
    model: str | None
    """``email-agent@17``: the version that sampled it."""
    prompt_tokens: int
    sampled_tokens: int
    trained_tokens: int
    """Of `sampled_tokens`; each token of a run is trained by one turn."""
    excluded_because: str | None
    """Why none is trained; None if they are."""
    prefix: Literal["starts", "extends", "forks"] | None
    """How its prompt meets the tokens of the turns before it: shares none of them, begins with all
    of such a turn's prompt and reply, or parts from them on the way. None: its tokens are lost."""
    prefix_turn: int | None
    """Index of the turn that it extends or forks from."""
    prefix_tokens: int
    """Tokens that it shares with that turn."""


class TrajectoryAudit(Wire):
    """``GET /v1/trajectories/{id}/audit``: which of a run's tokens learn, and why not the rest."""

    trajectory: Id
    status: Status
    reward: Finite | None
    turns: tuple[TurnAudit, ...]
    rows: int
    """Sequences that the run comes down to for the learner."""
    trained_by: dict[str, str]
    """policy -> the job that trained the run; empty if none did."""

    @property
    def sampled_tokens(self) -> int:
        """All that was sampled in the run."""
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def trained_tokens(self) -> int:
        """What of it learns."""
        return sum(turn.trained_tokens for turn in self.turns)


class TrainJob(Wire):
    """A durable job: it survives a crash and runs to its end exactly once."""

    id: str
    key: str
    policy: Name
    state: JobState
    base_version: int | None = None
    result: TrainResult | None = None
    error: str | None = None
    created_at: float
    finished_at: float | None = None


class JobEvent(Wire):
    """One line of a job's story, in order of `seq`."""

    seq: int
    at: float
    message: str
    progress: float | None = None
    """0 to 1, where it is known."""
