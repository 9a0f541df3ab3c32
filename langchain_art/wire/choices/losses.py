"""Losses of a step by rewards, what corrects their sampling, and what is added to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from langchain_art.wire.choices.group import CHOICE, MAX_COUNT, MAX_FACTOR, Group, kinds
from langchain_art.wire.identifiers import NAME, Name


class ConstantAggregation(Group):
    """Each token weighs ``1/value``, however many there are: Dr. GRPO (arXiv 2503.20783)."""

    kind: Literal["constant"] = "constant"
    value: float = Field(ge=1e-6, le=MAX_FACTOR)


Aggregation = Literal["token", "sequence", "run"] | ConstantAggregation
"""Unit of equal weight in a step: every token, every call, every run; or 1/value per token."""


class TruncatedIS(Group):
    """Each token's loss times ``min(learner / sampler, high)``."""

    kind: Literal["truncated"] = "truncated"
    high: float = Field(default=2.0, gt=1, le=MAX_FACTOR)


class IcePop(Group):
    """Each token's loss times ``learner / sampler``; 0 outside ``[low, high]``.

    Source: arXiv 2510.18855.
    """

    kind: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, gt=0, lt=1)
    high: float = Field(default=5.0, gt=1, le=MAX_FACTOR)


class SequenceMask(Group):
    """The product of ``learner / sampler`` over the call; 0 outside ``[low, high]``."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    low: float | None = Field(default=None, gt=0, lt=1)
    high: float = Field(default=3.0, gt=1, le=MAX_FACTOR)


ImportanceSampling = Annotated[TruncatedIS | IcePop | SequenceMask, *CHOICE]
"""Correction of the difference between sampler and learner before the first optimizer step."""


class ClippedRatio(Group):
    """PPO's clipped ratio with one bound for each side (DAPO, arXiv 2503.14476), and dual clip."""

    kind: Literal["clip"] = "clip"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio's lower bound is ``1 - clip_low``."""
    clip_high: float = Field(default=0.28, gt=0, le=MAX_FACTOR)
    """The ratio's upper bound is ``1 + clip_high``."""
    dual_clip: float | None = Field(default=3.0, gt=1, le=MAX_FACTOR)
    """Largest ratio at which a negative advantage has a gradient; None: no such bound."""
    importance_sampling: ImportanceSampling | None = TruncatedIS()
    aggregation: Aggregation = "token"


class GSPO(Group):
    """The clipped ratio with one ratio for a whole call (arXiv 2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    clip_high: float = Field(default=4e-4, gt=0, le=MAX_FACTOR)
    importance_sampling: ImportanceSampling | None = TruncatedIS()
    aggregation: Aggregation = "sequence"


class CISPO(Group):
    """Clipped weights on the policy gradient (arXiv 2506.13585); ``clip_low=1``: no lower bound."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    clip_high: float = Field(default=4.0, gt=0, le=MAX_FACTOR)
    importance_sampling: ImportanceSampling | None = TruncatedIS()
    aggregation: Aggregation = "token"


class DPPOTV(Group):
    """DPPO bounded by total variation (arXiv 2602.04879).

    Its bounds are differences of probabilities. Its ratio is against the sampler, so it takes no
    importance sampling.
    """

    kind: Literal["dppo_tv"] = "dppo_tv"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.2, gt=0, lt=1)
    aggregation: Aggregation = "token"


BuiltInLoss = ClippedRatio | GSPO | CISPO | DPPOTV
BUILT_IN_LOSSES = kinds(BuiltInLoss)


class OwnLoss(Group):
    """A loss that the server's operator has registered; the string of its name stands for it.

    The server's setting ``[losses]`` has the function (`langchain_art_server.losses`).
    """

    kind: Literal["own"] = "own"
    name: Name
    """Name in the server's settings; `ServerStatus.losses` has all names."""
    options: dict[str, Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)]] = Field(
        default_factory=dict, max_length=64
    )
    """Keyword arguments of the function."""
    importance_sampling: ImportanceSampling | None = TruncatedIS()
    aggregation: Aggregation = "token"


def _by_name(value: object) -> object:
    if not isinstance(value, str):
        return value
    return {"kind": value} if value in BUILT_IN_LOSSES else {"kind": "own", "name": value}


Loss = Annotated[BuiltInLoss | OwnLoss, Field(discriminator="kind"), BeforeValidator(_by_name)]


class KLPenalty(Group):
    """Divergence from a reference, added to the loss."""

    estimator: Literal["k1", "k2", "k3"]
    coefficient: float = Field(gt=0, le=MAX_FACTOR)
    reference: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Version of the policy that is the reference; 0 is the base model. None: in a fit the version
    that it began with, which after a warm start is what that made; else the base model."""


class Distillation(Group):
    """Learning on the policy's own runs from a teacher that scores their tokens. Experimental.

    The loss of each sampled token gets ``coefficient (log π - log teacher)²/2``, outside of the
    clipped ratio: `KLPenalty`'s ``k2``. Its gradient is that of an advantage of
    ``-coefficient (log π - log teacher)``, and on average that of the reverse divergence
    KL(π ‖ teacher): on-policy distillation (GKD, arXiv 2306.13649;
    thinkingmachines.ai/blog/on-policy-distillation). Groups of equal rewards are trained, too.
    """

    teacher: str
    """``policy@version`` on the same server; of version 0, and so of any, the base model."""
    coefficient: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    rewards: bool = True
    """True if rewards count beside it; if not, runs need none."""

    @field_validator("teacher")
    @classmethod
    def _named(cls, value: str) -> str:
        policy, at, version = value.rpartition("@")
        if not (at and NAME.fullmatch(policy) and version.isdecimal() and len(version) < 10):
            raise ValueError(f"got teacher={value!r}, expected 'policy@version', as in 'solver@7'")
        return value

    @property
    def version(self) -> tuple[str, int]:
        """The teacher's policy, and its version."""
        policy, _, version = self.teacher.rpartition("@")
        return policy, int(version)
