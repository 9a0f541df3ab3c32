"""How a job trains: `TrainConfig` by rewards, `SFTConfig` by examples, `PreferenceConfig` by pairs.

Choices that have settings of their own (loss, advantage, credit assignment, importance sampling)
are unions discriminated by `kind`, so that a setting exists only where it is read. The plain string
of a kind stands for it with its defaults: ``loss="gspo"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from langchain_art.wire.field_hints import Options
from langchain_art.wire.identifiers import NAME

#: AdamW moves a weight by about the learning rate in an optimizer step, and an adapter's weights
#: are some hundredths: one step with more than this leaves nothing of what was learned.
MAX_LEARNING_RATE = 0.1
#: Of a factor and of a bound: products of some of them are far from overflowing in 32 bits.
MAX_FACTOR = 1e6
MAX_COUNT = 2**31 - 1


class _Group(Options):
    """Numbers that are not finite are refused too."""

    model_config = ConfigDict(allow_inf_nan=False)

    def model_post_init(self, context: Any, /) -> None:
        """Count `kind` as set, so that JSON without unset fields (as clients send) has it."""
        if "kind" in type(self).model_fields:
            self.model_fields_set.add("kind")


def _by_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


_Choice = (Field(discriminator="kind"), BeforeValidator(_by_kind))


class LRSchedule(_Group):
    """Learning rate by step: linear warm-up, then linear decay.

    A fit and a warm start each count their own steps from 1. A job that does not say its step
    (`TrainRequest.schedule_step`) has that of its version: how many steps it is away from the base.

    The server computes it in `algorithms.loss.lr_schedule`.
    """

    warmup_steps: int = Field(default=0, ge=0, le=MAX_COUNT)
    decay_steps: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Step at which the decay ends; None: no decay."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the learning rate left at `decay_steps`."""

    @model_validator(mode="after")
    def _ordered(self) -> LRSchedule:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"got decay_steps={self.decay_steps} with warmup_steps={self.warmup_steps}, "
                "expected decay_steps to be the larger"
            )
        return self


class ConstantAggregation(_Group):
    """Each token weighs ``1/value``, however many there are: Dr. GRPO (arXiv 2503.20783)."""

    kind: Literal["constant"] = "constant"
    value: float = Field(ge=1e-6, le=MAX_FACTOR)


Aggregation = Literal["token", "sequence", "run"] | ConstantAggregation
"""What has equal weight in a step: every token, every call, every run; or 1/value per token."""


class TruncatedIS(_Group):
    """Each token's loss times ``min(learner / sampler, high)``."""

    kind: Literal["truncated"] = "truncated"
    high: float = Field(default=2.0, gt=1, le=MAX_FACTOR)


class IcePop(_Group):
    """Each token's loss times ``learner / sampler``; 0 outside ``[low, high]``.

    Source: arXiv 2510.18855.
    """

    kind: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, gt=0, lt=1)
    high: float = Field(default=5.0, gt=1, le=MAX_FACTOR)


class SequenceMask(_Group):
    """The product of ``learner / sampler`` over the call; 0 outside ``[low, high]``."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    low: float | None = Field(default=None, gt=0, lt=1)
    high: float = Field(default=3.0, gt=1, le=MAX_FACTOR)


ImportanceSampling = Annotated[TruncatedIS | IcePop | SequenceMask, *_Choice]
"""Correction of the difference between sampler and learner before the first optimizer step."""


class ClippedRatio(_Group):
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


class GSPO(_Group):
    """The clipped ratio with one ratio for a whole call (arXiv 2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    clip_high: float = Field(default=4e-4, gt=0, le=MAX_FACTOR)
    importance_sampling: ImportanceSampling | None = TruncatedIS()
    aggregation: Aggregation = "sequence"


class CISPO(_Group):
    """Clipped weights on the policy gradient (arXiv 2506.13585); ``clip_low=1``: no lower bound."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    clip_high: float = Field(default=4.0, gt=0, le=MAX_FACTOR)
    importance_sampling: ImportanceSampling | None = TruncatedIS()
    aggregation: Aggregation = "token"


class DPPOTV(_Group):
    """DPPO bounded by total variation (arXiv 2602.04879).

    Its bounds are differences of probabilities. Its ratio is against the sampler, so it takes no
    importance sampling.
    """

    kind: Literal["dppo_tv"] = "dppo_tv"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: float = Field(default=0.2, gt=0, lt=1)
    aggregation: Aggregation = "token"


Loss = Annotated[ClippedRatio | GSPO | CISPO | DPPOTV, *_Choice]


class SimpleAdvantage(_Group):
    """A run's reward against its group's: an advantage without settings.

    ``mean``: minus the group's mean (Dr. GRPO). ``leave_one_out``: minus the mean of the others
    (RLOO). ``maxrl``: minus the mean, over the mean (MaxRL). ``batch_standardized``: minus the
    group's mean, over the standard deviation in the whole batch (REINFORCE++-Baseline).
    """

    kind: Literal["mean", "leave_one_out", "maxrl", "batch_standardized"] = "mean"


_Weight = Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)]


class Standardized(_Group):
    """Reward minus the group's mean, over the sample standard deviation (GRPO)."""

    kind: Literal["standardized"] = "standardized"
    scores: dict[str, _Weight] = Field(default_factory=dict, max_length=64)
    """Name -> weight of the run's scores that replace its reward (GDPO); empty: the reward."""


Advantage = Annotated[SimpleAdvantage | Standardized, *_Choice]


class SimpleCredit(_Group):
    """Credit assignment without settings.

    ``run``: whole runs are compared. ``node``: runs by node, as in Dr. MAS (arXiv 2602.08847).
    ``call``: runs by their own rewards, and calls of one node by theirs; one without a reward is
    not compared, and counts as 0 nowhere.
    """

    kind: Literal["run", "node", "call"] = "run"


class TurnCredit(_Group):
    """Calls are compared by their returns: the rewards from the call on."""

    kind: Literal["turn"] = "turn"
    discount: float = Field(default=1.0, ge=0, le=1)
    """Of later rewards, per call."""


class AnchorCredit(_Group):
    """Runs are compared, and calls that were asked in the same state (GiGPO, arXiv 2505.10978)."""

    kind: Literal["anchor"] = "anchor"
    discount: float = Field(default=0.95, ge=0, le=1)
    """Of later rewards, per call."""
    weight: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Of the comparison by state; the comparison of runs weighs 1."""


Credit = Annotated[SimpleCredit | TurnCredit | AnchorCredit, *_Choice]


class KLPenalty(_Group):
    """Divergence from a reference, added to the loss."""

    estimator: Literal["k1", "k2", "k3"]
    coefficient: float = Field(gt=0, le=MAX_FACTOR)
    reference: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Version of the policy that is the reference; 0 is the base model. None: in a fit the version
    that it began with, which after a warm start is what that made; else the base model."""


class Distillation(_Group):
    """Learning on the policy's own runs from a teacher that scores their tokens.

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
    """Whether rewards count beside it; if not, runs need none."""

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


class OverlongPenalty(_Group):
    """Lower rewards for long runs (DAPO, arXiv 2503.14476, eq. 13)."""

    tokens: int = Field(ge=1, le=MAX_COUNT)
    """Sampled tokens of a run from which its reward is lowered by 1."""
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


class _Optimizer(_Group):
    """The optimizer step. AdamW without weight decay, as is usual for LoRA."""

    schedule: LRSchedule = LRSchedule()
    max_grad_norm: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    optimizer_steps: int = Field(default=1, ge=1, le=16)
    """Optimizer steps on the same batch."""
    tokens_per_microbatch: int = Field(default=16384, ge=64, le=MAX_COUNT)
    """Padded tokens that go through the model at once; bounds memory, changes no result."""
    mask_truncated: bool = False
    """Exclude replies that `max_tokens` cut off, and runs that a limit cut off; their rewards stay
    in the baseline."""


class TrainConfig(_Optimizer):
    """How a batch of groups of runs becomes an optimizer step.

    The defaults: mean-only advantages of whole runs (Dr. GRPO, arXiv 2503.20783); PPO's clipped
    ratio with DAPO's wider upper bound and the same weight for every token (arXiv 2503.14476);
    truncated importance sampling between sampler and learner.

    Example::

        TrainConfig(learning_rate=1e-4, advantage="standardized", loss=GSPO(clip_high=1e-3))
    """

    kind: Literal["rl"] = "rl"
    learning_rate: float | None = Field(default=None, gt=0, le=MAX_LEARNING_RATE)
    """None: chosen by the model's size and the adapter's scale (`wire.default_learning_rate`). The
    job, a fit's ``fit.json`` and each step's metrics have the number."""
    advantage: Advantage = SimpleAdvantage()
    """How rewards of a group become advantages."""
    credit: Credit = SimpleCredit()
    """Credit assignment: whether runs, nodes, calls, turns or states are compared."""
    zero_variance_tolerance: float = Field(default=1e-6, ge=0, le=MAX_FACTOR)
    """Rewards that differ by no more than this are equal: there is nothing to learn from them."""
    overlong: OverlongPenalty | None = None
    max_staleness: int | None = Field(default=8, ge=0, le=MAX_COUNT)
    """Groups with a call sampled by an older version than this many versions ago are excluded;
    None: none are."""
    loss: Loss = ClippedRatio()
    kl: KLPenalty | None = None
    distillation: Distillation | None = None
    entropy_bonus: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Factor of the entropy of each token's distribution, in nats, that is taken off the loss. It
    keeps a policy from becoming certain of its first luck; try 0.001 to 0.03."""
    guard: float | None = Field(default=1.25, gt=1, le=MAX_FACTOR)
    """Calls whose geometric mean of learner / sampler is further than this factor from 1 are not
    trained; None: all are."""
    max_logprob_gap: float | None = Field(default=0.1, gt=0, le=MAX_FACTOR)
    """Mean gap between learner and sampler, in nats per token, above which a step is refused;
    multiplied by 1 + mean staleness. None: never refuse."""

    if TYPE_CHECKING:  # type checkers learn here that the string of a kind is accepted

        def __init__(
            self,
            *,
            advantage: Advantage
            | Literal["mean", "standardized", "leave_one_out", "maxrl", "batch_standardized"] = ...,
            credit: Credit | Literal["run", "node", "call", "turn", "anchor"] = ...,
            loss: Loss | Literal["clip", "gspo", "cispo", "dppo_tv"] = ...,
            **settings: Any,
        ) -> None: ...

    @property
    def scores(self) -> dict[str, float]:
        """Weights of the scores that replace the reward; empty: the reward counts."""
        return self.advantage.scores if isinstance(self.advantage, Standardized) else {}

    @property
    def divergence(self) -> KLPenalty | None:
        """The penalty on the distance to the reference, or to the teacher."""
        if (found := self.distillation) is None:
            return self.kl
        return KLPenalty(estimator="k2", coefficient=found.coefficient)

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.kl and self.distillation:
            raise ValueError(
                "got kl and distillation, expected one of them: a step has one reference, and the "
                "teacher is it"
            )
        unread = (self.advantage, self.credit, self.overlong) != (
            SimpleAdvantage(),
            SimpleCredit(),
            None,
        )
        if self.distillation and not self.distillation.rewards and unread:
            raise ValueError(
                "got advantage, credit or overlong with distillation.rewards=False, where no "
                "reward is read; leave them out"
            )
        if self.scores and self.credit.kind != "run":
            raise ValueError(
                f"got scores with credit={self.credit.kind!r}, expected credit='run': scores are "
                "of whole runs"
            )
        if self.overlong and self.credit.kind == "call":
            raise ValueError(
                "got overlong with credit='call', where a run may have no reward that could be "
                "lowered; shape the reward"
            )
        if self.overlong and (self.scores or self.advantage.kind == "maxrl"):
            raise ValueError(
                "got overlong with scores or advantage='maxrl', which have no reward that could be "
                "lowered (maxrl: below 0); make length a score, or shape the reward"
            )
        return self


class SFTConfig(_Optimizer):
    """A supervised step (SFT): the mean negative log-likelihood of replies, whoever sampled them.

    Example::

        trainer.warm_start_sync(conversations, config=SFTConfig(learning_rate=2e-4))
    """

    kind: Literal["sft"] = "sft"
    learning_rate: float | None = Field(default=None, gt=0, le=MAX_LEARNING_RATE)
    """None: five times that of a `TrainConfig` (`wire.default_learning_rate`)."""
    aggregation: Aggregation = "token"


class PreferenceConfig(_Group):
    """A preference step: direct preference optimization (DPO, arXiv 2305.18290, eq. 7).

    Its batch are pairs of runs, the chosen one first. With ``π`` the policy's probability of all
    replies of a run and ``ref`` that of the base model (the adapter off), it minimises the mean of
    ``-log sigmoid(beta ((log π/ref)(chosen) - (log π/ref)(rejected)))`` in one optimizer step.

    Example::

        client.prefer([(corrected, sampled)], "email-agent", PreferenceConfig(beta=0.1))
    """

    kind: Literal["dpo"] = "dpo"
    learning_rate: float = Field(default=2e-5, gt=0, le=MAX_LEARNING_RATE)
    beta: float = Field(default=0.1, gt=0, le=MAX_FACTOR)
    """How closely the policy stays to the base model: the larger, the closer."""
    schedule: LRSchedule = LRSchedule()
    max_grad_norm: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    tokens_per_microbatch: int = Field(default=16384, ge=64, le=MAX_COUNT)
    """Padded tokens that go through the model at once; bounds memory, changes no result."""

    @property
    def weighted(self) -> SFTConfig:
        """The supervised step that this step is, once its tokens have their weights."""
        return SFTConfig(
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            max_grad_norm=self.max_grad_norm,
            tokens_per_microbatch=self.tokens_per_microbatch,
        )


def _kind_of_job(value: Any) -> str:
    return value.get("kind", "rl") if isinstance(value, dict) else getattr(value, "kind", "rl")  # type: ignore[arg-type]


StepConfig = TrainConfig | SFTConfig
"""What a learner is given: a preference step is a supervised step whose tokens have weights."""
JobConfig = Annotated[
    Annotated[TrainConfig, Tag("rl")]
    | Annotated[SFTConfig, Tag("sft")]
    | Annotated[PreferenceConfig, Tag("dpo")],
    Discriminator(_kind_of_job),
]
"""The config of a job; without a `kind` it is a `TrainConfig`."""
