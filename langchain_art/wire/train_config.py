"""Settings of a job: of a step by rewards, of a supervised step, of a preference step.

Choices that have settings of their own (loss, advantage, credit assignment, importance sampling)
are unions discriminated by `kind`, so that a setting exists only where it is read. The plain string
of a kind stands for it with its defaults: ``loss="gspo"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from langchain_art.wire.choices import (
    MAX_COUNT,
    MAX_FACTOR,
    Advantage,
    Aggregation,
    ClippedRatio,
    Credit,
    CreditKind,
    Distillation,
    Group,
    KLPenalty,
    Loss,
    OverlongPenalty,
    SimpleCredit,
    Standardized,
)

#: AdamW moves a weight by about the learning rate in an optimizer step, and an adapter's weights
#: are some hundredths: one step with more than this leaves nothing of what was learned.
MAX_LEARNING_RATE = 0.1


class LRSchedule(Group):
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


class _Optimizer(Group):
    """The optimizer step. AdamW without weight decay, as is usual for LoRA."""

    schedule: LRSchedule = LRSchedule()
    max_grad_norm: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    optimizer_steps: int = Field(default=1, ge=1, le=16)
    """Optimizer steps on the same batch."""
    tokens_per_microbatch: int = Field(default=65536, ge=64, le=MAX_COUNT)
    """Padded tokens that go through the model at once; bounds memory, changes no result."""
    mask_truncated: bool = False
    """Exclude replies that `max_tokens` cut off, and runs that a limit cut off; their rewards stay
    in the baseline."""


class TrainConfig(_Optimizer):
    """Settings by which a batch of groups of runs becomes an optimizer step.

    The defaults: standardized advantages of whole runs (GRPO, arXiv 2402.03300); PPO's clipped
    ratio with DAPO's wider upper bound and the same weight for every token (arXiv 2503.14476);
    truncated importance sampling between sampler and learner; a trust region (`max_kl`).

    Example::

        TrainConfig(learning_rate=1e-4, advantage="mean", loss=GSPO(clip_high=1e-3))
    """

    kind: Literal["rl"] = "rl"
    learning_rate: float | None = Field(default=None, gt=0, le=MAX_LEARNING_RATE)
    """None: chosen by the model's size and the adapter's scale (`wire.default_learning_rate`); a
    fit then raises it after steps that are far shorter than `max_kl`, and lowers it after steps far
    longer. A rate that is named stays. Each step's metrics have the number."""
    momentum: float = Field(default=0.6, ge=0, le=0.999)
    """β1 of AdamW; β2 is ``1 - (1 - momentum) / 10``. About ``1 / (1 - momentum)`` steps count in
    the mean of the gradients, and ten times as many in that of their squares. The usual 0.9 makes a
    policy go on with what the last ten steps taught it, whose runs are older versions'."""
    advantage: Advantage = Standardized()
    """Estimator of advantages from the rewards of a group."""
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
    max_kl: float | None = Field(default=0.02, gt=0, le=MAX_FACTOR)
    """Trust region: largest KL(π_old ‖ π) of a step, in nats per trained token, π_old being the
    version that it starts from. Further `optimizer_steps` are left out once it is passed, and the
    step is shortened to it. None: no bound."""
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
            credit: Credit | CreditKind = ...,
            loss: Loss | str = ...,
            **settings: Any,
        ) -> None: ...

    @property
    def scores(self) -> dict[str, float]:
        """Weights of the scores that replace the reward; empty: the reward counts."""
        return self.advantage.scores if isinstance(self.advantage, Standardized) else {}

    @property
    def reads_rewards(self) -> bool:
        """True if anything is learned from rewards; if not, runs need none."""
        return self.distillation is None or self.distillation.rewards

    @property
    def reward_settings(self) -> list[str]:
        """Settings that turn rewards into advantages, as far as they are not the defaults."""
        fields, names = type(self).model_fields, ("advantage", "credit", "overlong")
        return [name for name in names if getattr(self, name) != fields[name].default]

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
        if not self.reads_rewards and self.reward_settings:
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


class PreferenceConfig(Group):
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
    """Closeness of the policy to the base model: the larger, the closer."""
    schedule: LRSchedule = LRSchedule()
    max_grad_norm: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    tokens_per_microbatch: int = Field(default=65536, ge=64, le=MAX_COUNT)
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
"""Config that a learner gets: a preference step is a supervised step whose tokens have weights."""
JobConfig = Annotated[
    Annotated[TrainConfig, Tag("rl")]
    | Annotated[SFTConfig, Tag("sft")]
    | Annotated[PreferenceConfig, Tag("dpo")],
    Discriminator(_kind_of_job),
]
"""The config of a job; without a `kind` it is a `TrainConfig`."""
