"""Choices within the config of a step by rewards, each with settings of its own: losses, credit."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from langchain_art.wire.field_hints import Options
from langchain_art.wire.identifiers import NAME, Name

#: Of a factor and of a bound: products of some of them are far from overflowing in 32 bits.
MAX_FACTOR = 1e6
MAX_COUNT = 2**31 - 1


class Group(Options):
    """Numbers that are not finite are refused too."""

    model_config = ConfigDict(allow_inf_nan=False)

    def model_post_init(self, context: Any, /) -> None:
        """Count `kind` as set, so that JSON without unset fields (as clients send) has it."""
        if "kind" in type(self).model_fields:
            self.model_fields_set.add("kind")


def kinds(choice: Any) -> tuple[str, ...]:
    """The kinds of a union of groups, in the union's order."""
    annotations = (one.model_fields["kind"].annotation for one in get_args(choice))
    return tuple(kind for one in annotations for kind in get_args(one))


def _by_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


#: Decorates a union that is discriminated by `kind`; the string of a kind stands for its defaults.
CHOICE = (Field(discriminator="kind"), BeforeValidator(_by_kind))


class SimpleAdvantage(Group):
    """A run's reward against its group's: an advantage without settings.

    ``mean``: minus the group's mean (Dr. GRPO). ``leave_one_out``: minus the mean of the others
    (RLOO). ``maxrl``: minus the mean, over the mean (MaxRL). ``batch_standardized``: minus the
    group's mean, over the standard deviation in the whole batch (REINFORCE++-Baseline).
    """

    kind: Literal["mean", "leave_one_out", "maxrl", "batch_standardized"] = "mean"


_Weight = Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)]


class Standardized(Group):
    """Reward minus the group's mean, over the sample standard deviation (GRPO)."""

    kind: Literal["standardized"] = "standardized"
    scores: dict[str, _Weight] = Field(default_factory=dict, max_length=64)
    """Name -> weight of the run's scores that replace its reward (GDPO); empty: the reward."""


Advantage = Annotated[SimpleAdvantage | Standardized, *CHOICE]


class SimpleCredit(Group):
    """Credit assignment without settings.

    ``run``: whole runs are compared. ``node``: runs by node, as in Dr. MAS (arXiv 2602.08847).
    ``call``: runs by their own rewards, and calls of one node by theirs; one without a reward is
    not compared, and counts as 0 nowhere.
    """

    kind: Literal["run", "node", "call"] = "run"


class TurnCredit(Group):
    """Calls are compared by their returns: the rewards from the call on."""

    kind: Literal["turn"] = "turn"
    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of later rewards, per call."""


class AnchorCredit(Group):
    """Runs are compared, and calls that were asked in the same state (GiGPO, arXiv 2505.10978)."""

    kind: Literal["anchor"] = "anchor"
    discount: float = Field(default=0.95, ge=0, le=1)
    """Discount of later rewards, per call."""
    weight: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Weight of the comparison by state; the comparison of runs weighs 1."""


Credit = Annotated[SimpleCredit | TurnCredit | AnchorCredit, *CHOICE]
CreditKind = Literal["run", "node", "call", "turn", "anchor"]
"""The kinds of `Credit`, each a module of `langchain_art.credit.schemes`."""


class OverlongPenalty(Group):
    """Lower rewards for long runs (DAPO, arXiv 2503.14476, eq. 13)."""

    tokens: int = Field(ge=1, le=MAX_COUNT)
    """Number of sampled tokens of a run from which its reward is lowered by 1."""
    buffer: int = Field(ge=1, le=MAX_COUNT)
    """Tokens before that over which the reward falls linearly; at most `tokens`."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongPenalty:
        if self.buffer > self.tokens:
            raise ValueError(
                f"got buffer={self.buffer} with tokens={self.tokens}, expected the buffer to be at "
                "most as large"
            )
        return self


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
