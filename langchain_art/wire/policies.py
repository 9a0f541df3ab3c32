"""A policy: its LoRA adapter, checkpoints and status; and the server's status."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

from pydantic import Field

from langchain_art.wire.field_hints import Options
from langchain_art.wire.identifiers import Finite, Name, Several, Wire
from langchain_art.wire.rollouts import WorkerStatus
from langchain_art.wire.train_config import PreferenceConfig, SFTConfig, TrainConfig

Config = TypeVar("Config", bound=TrainConfig | SFTConfig | PreferenceConfig)
MAX_RANK = 512
#: (parameters of the base model, learning rate) of the two ends of the power law.
_SMALL, _LARGE = (0.2e6, 2.4e-3), (1e9, 5e-5)
#: alpha / rank for which these hold: that of `LoraConfig`'s defaults.
_SCALE = 2.0
#: Largest default: above it, a few steps of AdamW leave nothing of what small models had learned.
LARGEST_DEFAULT_RATE = 3e-2
#: A supervised step's rate over that of a step by rewards, whose gradients are noisier.
_SUPERVISED = 5.0


class LoraConfig(Options):
    """The LoRA adapter's shape, fixed when the policy is created."""

    rank: int = Field(default=16, ge=1, le=MAX_RANK)
    alpha: float = Field(default=32.0, gt=0, le=65536)
    targets: Literal["all-linear"] | Several[str] = "all-linear"
    """Module names as PEFT matches them, or all linear layers but the output head."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)


def default_learning_rate(parameters: int, lora: LoraConfig, kind: str = "rl") -> float:
    """The learning rate of a LoRA adapter whose config names none.

    ``kind="rl"``: ``2.4e-3 · (parameters / 0.2e6)^-0.454 · 2 / (alpha / rank)``: a power law
    through 2.4e-3 at 0.2 million parameters and 5e-5 at one billion; 5e-5 also for larger models.
    ``"sft"``: five times as much. At most 3e-2. A fit begins with it; what its steps teach comes
    after (`training.learning_rates`).

    - 0.2 million: with the default steps of four scenarios, the demos' models learn fastest at
      2.4e-3, and they learn nothing at 2e-5 (docs/benchmarks.md).
    - 135 million: 1.2e-4. SmolLM2-135M learns at 3e-4 and hardly at 6e-5.
    - one billion and more: 1e-5 for 3 billion and 5e-5 for 0.6 billion (TRL's examples of LoRA),
      4e-5 for 9 billion (Tinker), whose own formula gives five times the rate of this one at one
      billion. LoRA takes about ten times the rate of full fine-tuning, and at a fixed alpha / rank
      the best rate hardly depends on the rank (Thinking Machines, "LoRA Without Regret", 2025).
    - alpha / rank multiplies the adapter's change of the weights, so the rate is divided by it.
    """
    (small, high), (large, low) = _SMALL, _LARGE
    slope = math.log(low / high) / math.log(large / small)
    rate = high * (min(max(parameters, 1), large) / small) ** slope
    rate *= _SCALE / (lora.alpha / lora.rank) * (_SUPERVISED if kind == "sft" else 1.0)
    return min(LARGEST_DEFAULT_RATE, rate)


def with_learning_rate(config: Config, parameters: int, lora: LoraConfig) -> Config:
    """`config` itself if it names a learning rate, else with `default_learning_rate`."""
    if config.learning_rate is not None:
        return config
    rate = default_learning_rate(parameters, lora, config.kind)
    return config.model_copy(update={"learning_rate": rate})


class PolicySpec(Options):
    """Body of ``POST /v1/policies``. Creating the same policy twice is the same as once."""

    name: Name
    lora: LoraConfig = LoraConfig()


class RolledBack(Wire):
    """A rollback, as a version that it took out of service shows it."""

    at: Finite
    """Seconds since the epoch."""
    to: int
    """The version that served from then on."""
    why: str
    """Reason as it was given; empty: none was."""


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
    rolled_back: RolledBack | None = None
    """The rollback since which neither this version nor one that was made from it has served."""
    metrics: dict[str, float] = Field(default_factory=dict)


class PolicyStatus(Wire):
    """A policy and the version that its bare name is routed to."""

    name: Name
    version: int
    lora: LoraConfig
    checkpoints: int


class ReplicaStatus(Wire):
    """One of several engines that sample."""

    name: str
    """Number from 0, which its log and its GPUs go by."""
    problem: str | None
    """Reason why it is given no calls now; None: it is."""
    running_calls: int
    restarts: int
    missing: int
    """Versions that it has yet to load; their calls go to the others."""


class ServerStatus(Wire):
    """``GET /status``: the state of a server."""

    version: str
    ready: bool
    reasons: dict[str, str]
    """Reasons for which it is not, by part: ``sampler``, ``learner``, ``store``, ``disk`` or
    ``server``."""
    base_model: str
    model_path: str
    device: str
    dtype: str
    max_model_len: int
    parameters: int
    sampler: str
    learner: str
    replicas: Several[ReplicaStatus] = ()
    """The sampler's replicas, if ``[sampler] replicas`` is more than 1."""
    losses: Several[str]
    """Names that `TrainConfig.loss` may have: the built-in ones and the operator's own."""
    policies: Several[PolicyStatus]
    max_policies: int
    max_loras: int | None
    """Adapters that the sampler computes in one batch; calls of more wait. None: no bound."""
    calls: int
    trajectories: int
    jobs: dict[str, int]
    rollouts: dict[str, int] = Field(default_factory=dict)
    """Rollouts that workers are to run, by state: ``queued``, ``leased`` and ``finished``."""
    workers: Several[WorkerStatus] = ()
    stored_bytes: int
    """Bytes of the database and the adapters, a few seconds ago."""
    free_bytes: int | None
    """Free bytes of the data's disk, a few seconds ago."""
    min_free_bytes: int
    """Bytes of free disk below which the server is not ready and adds nothing."""
    running_calls: int
    engine_restarts: int
    gateway_pause: float
    """Longest time in the last minute that the gateway's event loop did not turn, in seconds."""
    sampler_pause: float | None
    """The same of the sampler's loop: of its longest step (of vLLM, of the process that holds it).
    Null while it does not answer."""
    uptime: float
    """Seconds."""


#: Nats per token between two healthy engines, or one engine asked twice. Measured with the embedded
#: pair on a CPU: 1e-6 in float32, 0.004 to 0.013 (at most 0.03) in bfloat16. A float16 number has
#: three bits more.
FULL_PRECISION = 1e-4
FLOAT16_PRECISION = 0.01
HALF_PRECISION = 0.05


def logprob_tolerance(dtype: str) -> float:
    """Nats per token that rounding explains, by dtype (torch's name) of the model's weights."""
    if dtype in ("float32", "float64"):
        return FULL_PRECISION
    if dtype == "float16":
        return FLOAT16_PRECISION
    return HALF_PRECISION
