"""Everything that crosses the wall between client and server: small, frozen, pydantic only.

Token ids and logprobs are never here. The server keeps them under a completion's id (`call_id`);
a `Turn` points to them. Numbers that reach training are checked here, once: a reward is finite or
it is refused, and ``None`` (not scored) is not ``0.0``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from langchain_art.wire.train_config import JobConfig, TrainConfig

#: A policy's name: lower case, at most 64 characters, no path can be made of it.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
#: Ids that clients choose (trajectories, keys): they stand in URLs, so no slash; at most 128.
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}")

Status = Literal["completed", "failed", "interrupted", "truncated"]
JobState = Literal["queued", "running", "succeeded", "failed"]


def _name(value: str) -> str:
    if not NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            f"got {value!r}, expected a name of 1-64 characters from a-z 0-9 . _ - "
            "that begins with a letter or a digit"
        )
    return value


def _id(value: str) -> str:
    if not ID.fullmatch(value):
        raise ValueError(
            f"got {value[:160]!r}, expected an id of 1-128 characters from "
            "A-Z a-z 0-9 . _ : @ + = -"
        )
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(
            f"got {value!r}, expected a finite number; leave it out (null) if there is no score"
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
Id = Annotated[str, AfterValidator(_id)]
Finite = Annotated[float, AfterValidator(_finite)]
Tag = Annotated[str, Field(min_length=1, max_length=256)]
Message = dict[str, Any]
"""A chat message as OpenAI's dialect writes it (``role``, ``content``, ``tool_calls`` …)."""


class Wire(BaseModel):
    """Base of every value on the wire: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CallTags(Wire):
    """What a caller says about a model call: ``extra_body={"art": {...}}`` or ``x-art-*`` headers.

    Example::

        CallTags(trajectory_id="t-1", node="writer", path=("team", "writer"), step=3, attempt=1)
    """

    trajectory_id: Id | None = None
    scenario: str | None = Field(default=None, max_length=256)
    node: str | None = Field(default=None, max_length=256)
    path: tuple[str, ...] = Field(default=(), max_length=64)
    namespace: str | None = Field(default=None, max_length=2048)
    """LangGraph's checkpoint namespace: tells parallel branches of one node apart."""
    step: int | None = None
    attempt: int = Field(default=1, ge=1)
    thread: str | None = Field(default=None, max_length=256)
    tags: tuple[Tag, ...] = Field(default=(), max_length=32)
    """The caller's own (LangChain's ``tags``); `TrainRequest.trainable` may name them."""


class Usage(Wire):
    """Tokens of one call, as the sampler counted them."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class Turn(Wire):
    """One model call of a run, as the graph saw it.

    `messages` holds only what this call added: where `extends` is ``k``, the call's full prompt is
    turn ``k``'s prompt, its reply, and then `messages`; where it is ``None``, `messages` is the
    whole prompt. So a run's size grows with its turns, not with their square.

    Example: a tool agent's two calls::

        Turn(call_id="chatcmpl-a", node="model", messages=[system, user], reply=calls_search)
        Turn(call_id="chatcmpl-b", node="model", extends=0, messages=[tool_result], reply=answer)
    """

    call_id: str | None = None
    """The completion's id, under which the server keeps the tokens; None for a foreign model that
    reported none."""
    node: str | None = None
    path: tuple[str, ...] = ()
    namespace: str | None = None
    step: int | None = None
    attempt: int = Field(default=1, ge=1)
    thread: str | None = None
    tags: tuple[str, ...] = ()
    model: str | None = None
    """What the reply says it was sampled by: ``email-agent@17``, or a foreign model's name."""
    extends: int | None = Field(default=None, ge=0)
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    reply: Message | None = None
    usage: Usage | None = None
    started_at: Finite | None = None
    """Seconds since the epoch, by the client's clock."""
    latency: Finite | None = Field(default=None, ge=0)
    """Seconds."""
    ours: bool = True
    """False for a model that our server does not serve: seen and judged, never trained."""
    excluded_because: str | None = None
    """Why the graph threw this call away (``retried``, ``interrupted``, ``error``, ``unchosen``);
    such a call is kept for review and never trained."""
    error: str | None = None
    reward: Finite | None = None
    """Of this call alone, beside the trajectory's (`TrainConfig.credit`); None: none."""

    @property
    def names(self) -> frozenset[str]:
        """What `TrainRequest.trainable` may call this turn by: node, path, tags, model, policy."""
        model = self.model or ""
        named = (self.node or "", *self.path, *self.tags, model, model.partition("@")[0])
        return frozenset(name for name in named if name)

    def learns(self, trainable: Mapping[str, bool]) -> bool:
        """Whether `trainable` chooses this turn.

        A turn with a name that is False never learns. Of the others, all learn if no name is True,
        else those that have such a name.

        Example::

            Turn(node="critic").learns({"writer": True})     # False
            Turn(node="writer").learns({"critic": False})    # True
        """
        if any(not trainable.get(name, True) for name in self.names):
            return False
        return not any(trainable.values()) or any(trainable.get(name, False) for name in self.names)


class Trajectory(Wire):
    """One run of a graph on one scenario. ``reward=None``: not scored, which is not zero.

    Example::

        Trajectory(id="t-1", scenario="q-7", turns=(first, second), reward=1.0)
    """

    id: Id
    scenario: str | None = Field(default=None, max_length=256)
    turns: tuple[Turn, ...] = Field(default=(), max_length=4096)
    input: Any = None
    output: Any = None
    reward: Finite | None = None
    scores: dict[str, Finite] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    status: Status = "completed"
    error: str | None = None

    @model_validator(mode="after")
    def _extends_backwards(self) -> Trajectory:
        for index, turn in enumerate(self.turns):
            if turn.extends is not None and turn.extends >= index:
                raise ValueError(
                    f"turn {index} extends turn {turn.extends}, expected an earlier turn"
                )
        return self

    def prompt(self, index: int) -> list[Message]:
        """All messages that turn `index` was asked with."""
        parts: list[list[Message]] = []
        turn = self.turns[index]
        while turn.extends is not None:
            earlier = self.turns[turn.extends]
            parts.append([*([earlier.reply] if earlier.reply else []), *turn.messages])
            turn = earlier
        return [*turn.messages, *(message for part in reversed(parts) for message in part)]


class TrajectoryGroup(Wire):
    """Runs of one scenario: the unit of judging and of advantage."""

    id: Id
    trajectories: tuple[Trajectory, ...] = Field(max_length=1024)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("trajectories")
    @classmethod
    def _distinct(cls, value: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        ids = [t.id for t in value]
        if len(set(ids)) != len(ids):
            raise ValueError(f"got the same trajectory twice in one group: {sorted(ids)}")
        return value


class Reward(Wire):
    """A reward for a trajectory that the server already has, or can assemble from tagged calls."""

    reward: Finite | None = None
    """Left out: the run's reward stays as it is."""
    turns: dict[str, Finite | None] = Field(default_factory=dict, max_length=4096)
    """Call id -> reward of that call alone (`Turn.reward`); None takes it back."""
    scores: dict[str, Finite] = Field(default_factory=dict)
    scenario: str | None = Field(default=None, max_length=256)
    status: Status = "completed"
    metadata: dict[str, Any] = Field(default_factory=dict)


class LoraConfig(Wire):
    """The shape of a policy's adapter, fixed when the policy is made."""

    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(default=32.0, gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Module names as PEFT matches them, or all linear layers but the output head."""
    seed: int = Field(default=0, ge=0)


class PolicySpec(Wire):
    """What ``POST /v1/policies`` takes. Creating the same policy twice is the same as once."""

    name: Name
    lora: LoraConfig = LoraConfig()


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


class Checkpoint(Wire):
    """One immutable version of a policy's adapter."""

    policy: Name
    version: int
    name: str
    """``email-agent@17``: use it as a model's name to sample exactly this version."""
    parent: int | None
    created_at: float
    bytes: int
    pinned: bool = False
    serving: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)


class PolicyStatus(Wire):
    """A policy and the version that its bare name is routed to."""

    name: Name
    version: int
    lora: LoraConfig
    checkpoints: int


class ServerStatus(Wire):
    """``GET /status``: what a person wants to know about a server at a glance."""

    version: str
    ready: bool
    base_model: str
    model_path: str
    device: str
    dtype: str
    max_model_len: int
    parameters: int
    sampler: str
    learner: str
    policies: tuple[PolicyStatus, ...]
    calls: int
    trajectories: int
    jobs: dict[str, int]
    running_calls: int
    engine_restarts: int
    uptime: float
    """Seconds."""
