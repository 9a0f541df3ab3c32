"""A policy: the shape of its LoRA adapter, its checkpoints, its status; and the server's status."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from langchain_art.wire.field_hints import Options
from langchain_art.wire.identifiers import Name, Several, Wire


class LoraConfig(Options):
    """The LoRA adapter's shape, fixed when the policy is created."""

    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(default=32.0, gt=0, le=65536)
    targets: Literal["all-linear"] | Several[str] = "all-linear"
    """Module names as PEFT matches them, or all linear layers but the output head."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)


class PolicySpec(Options):
    """What ``POST /v1/policies`` takes. Creating the same policy twice is the same as once."""

    name: Name
    lora: LoraConfig = LoraConfig()


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
    """``GET /status``: the state of a server."""

    version: str
    ready: bool
    reasons: dict[str, str]
    """Why it is not, by part: ``sampler``, ``learner``, ``store``, ``disk`` or ``server``."""
    base_model: str
    model_path: str
    device: str
    dtype: str
    max_model_len: int
    parameters: int
    sampler: str
    learner: str
    policies: Several[PolicyStatus]
    calls: int
    trajectories: int
    jobs: dict[str, int]
    stored_bytes: int
    """Of the database and the adapters, a few seconds ago."""
    running_calls: int
    engine_restarts: int
    gateway_pause: float
    """Longest time in the last minute that the gateway's event loop did not turn, in seconds."""
    sampler_pause: float | None
    """The same of the sampler's loop: of its longest step (of vLLM, of the process that holds it).
    Null while it does not answer."""
    uptime: float
    """Seconds."""
