"""How a batch of groups becomes an optimizer step: the choices, their defaults, what excludes what.

Pydantic only. Part of the wire; everything imports it from there.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: Where a default hangs on a choice: field -> its value -> what is set unless it was given.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "loss": {
        "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
        "gspo": {
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "dual_clip": None,
            "aggregation": "sequence",
        },
        "cispo": {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": None},
        "dppo_tv": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "importance": "off"},
        "sft": {
            "learning_rate": 1e-4,
            "dual_clip": None,
            "importance": "off",
            "guard": None,
            "max_logprob_gap": None,
            "max_staleness": None,
        },
    },
    "importance": {
        "truncated": {"importance_low": None, "importance_high": 2.0},
        "icepop": {"importance_low": 0.5, "importance_high": 5.0},
        "sequence_mask": {"importance_low": None, "importance_high": 3.0},
        "off": {"importance_low": None, "importance_high": None},
    },
    "credit": {
        "run": {"discount": 1.0, "anchor_weight": 0.0},
        "node": {"discount": 1.0, "anchor_weight": 0.0},
        "turn": {"discount": 1.0, "anchor_weight": 0.0},
        "anchor": {"discount": 0.95, "anchor_weight": 1.0},
    },
}


#: What a supervised step (``loss="sft"``) reads. Its other fields are of rewards, and stay as they
#: are set for it.
READ_BY_SFT = frozenset(
    {
        "learning_rate",
        "warmup_steps",
        "decay_steps",
        "final_learning_rate",
        "max_grad_norm",
        "updates",
        "tokens_per_microbatch",
        "mask_truncated",
        "loss",
        "aggregation",
        "aggregation_constant",
    }
)


class TrainConfig(BaseModel):
    """How a batch of groups becomes an optimizer step. Every field is read, or refused.

    The defaults: mean-only advantages of whole runs (Dr. GRPO, arXiv 2503.20783); PPO's clipped
    ratio with DAPO's wider upper bound and the same weight for every token (arXiv 2503.14476);
    sampler and learner reconciled by truncated importance weights. AdamW without weight decay, as
    is usual for LoRA: `learning_rate` is reached linearly after `warmup_steps` steps of the policy
    and, if `decay_steps` is set, falls linearly to a fraction of itself there.

    Some defaults hang on a choice (`DEFAULTS`): the bounds of a loss on `loss`, those of the
    weights on `importance`, `discount` on `credit`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # --- the optimizer
    learning_rate: float = Field(default=2e-5, gt=0, le=1.0)
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)
    final_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """Fraction of `learning_rate` left at `decay_steps`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    updates: int = Field(default=1, ge=1, le=16)
    """Optimizer steps on the same batch."""
    tokens_per_microbatch: int = Field(default=16384, ge=64)
    """Padded tokens that go through the model at once; bounds memory, changes no result."""

    # --- rewards to advantages (server: `algorithms.credit`)
    advantage: Literal["mean", "standardized", "leave_one_out", "maxrl"] = "mean"
    """What a reward is held against: its group's mean, the mean over the sample deviation (GRPO),
    the others' mean (RLOO), the mean over the mean (MaxRL)."""
    credit: Literal["run", "node", "turn", "anchor"] = "run"
    """What is compared: whole runs; runs by node (Dr. MAS); calls by the return that follows them;
    runs, and calls asked in the same state (GiGPO)."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Of later rewards, per call; for `credit` ``turn`` and ``anchor`` (0.95 there)."""
    anchor_weight: float = Field(default=0.0, ge=0)
    """Of the comparison by state beside the one by run, for `credit` ``anchor``."""
    scores: dict[str, float] = Field(default_factory=dict, max_length=64)
    """Name -> weight of the scores of a run that are learned from instead of its reward (GDPO)."""
    flat_tolerance: float = Field(default=1e-6, ge=0)
    """Rewards that differ by no more than this are equal: there is nothing to learn from them."""

    # --- what is left out (server: `algorithms.filters`)
    mask_truncated: bool = False
    """Do not train replies that `max_tokens` cut off, nor runs that a limit cut off; their rewards
    stay in the baseline. Off: being cut off is usually what should be unlearned."""
    max_staleness: int | None = Field(default=8, ge=0)
    """Groups with a call sampled by an older version than this many versions ago are left out."""
    overlong_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens of a run from which on its reward is lowered by 1 (DAPO)."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """How many tokens before that the reward begins to fall, linearly."""

    # --- the loss (server: `algorithms.loss`, `.kl`, `.aggregation`)
    loss: Literal["clip", "gspo", "cispo", "dppo_tv", "sft"] = "clip"
    """PPO's clipped ratio; the same per call (GSPO); clipped weights (CISPO); DPPO-TV. Or ``sft``:
    the tokens' negative log-likelihood, whatever they were worth and whoever said them (a
    supervised warm start)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio's lower bound is ``1 - clip_low``; for ``dppo_tv`` a difference of probability."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio's upper bound is ``1 + clip_high``; for ``dppo_tv`` a difference of probability."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """For ``clip``: the largest ratio at which a negative advantage still pushes; None: any."""
    aggregation: Literal["token", "sequence", "run", "constant"] = "token"
    """What weighs the same in a step: every token, call, or run; or a token 1/constant."""
    aggregation_constant: float | None = Field(default=None, gt=0)
    kl: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the divergence from the base model that is added to the loss; None: none."""
    kl_coefficient: float = Field(default=0.0, ge=0)

    # --- sampler against learner (server: `algorithms.mismatch`)
    importance: Literal["truncated", "icepop", "sequence_mask", "off"] = "truncated"
    """How a token is weighed by learner / sampler before the first update: at most the upper bound;
    0 outside of both bounds; the product over the call, 0 outside of the bounds; not at all."""
    importance_low: float | None = Field(default=None, gt=0, lt=1)
    importance_high: float | None = Field(default=2.0, gt=1)
    guard: float | None = Field(default=1.25, gt=1)
    """Calls whose geometric mean of learner / sampler is further than this factor from 1 are not
    learned from; None: all are."""
    max_logprob_gap: float | None = Field(default=0.1, gt=0)
    """Mean distance of learner and sampler, in nats per token, at which a step is refused: what was
    sampled is not what is trained. Grows with staleness, once per version. None: never refuse."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_choices(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given: dict[Any, Any] = dict(data)  # type: ignore[arg-type]
        for choice, options in DEFAULTS.items():
            value = given.get(choice, cls.model_fields[choice].default)
            for name, default in (options.get(value, {}) if isinstance(value, str) else {}).items():
                given.setdefault(name, default)
        return given

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        for problem in (
            self._of_sft(),
            self._of_schedule(),
            self._of_credit(),
            self._of_length(),
            self._of_loss(),
            self._of_kl(),
            self._of_importance(),
        ):
            if problem is not None:
                raise ValueError(problem)
        return self

    def _of_sft(self) -> str | None:
        if self.loss != "sft":
            return None
        set_for_it = DEFAULTS["credit"]["run"] | DEFAULTS["importance"]["off"]
        set_for_it |= DEFAULTS["loss"]["sft"]
        for name, field in type(self).model_fields.items():
            expected = set_for_it.get(name, field.get_default(call_default_factory=True))
            if name not in READ_BY_SFT and getattr(self, name) != expected:
                return (
                    f"got {name}={getattr(self, name)!r} with loss='sft', which learns from what "
                    f"was said and not from rewards, and does not read it; leave {name} out"
                )
        return None

    def _of_schedule(self) -> str | None:
        if self.decay_steps is None or self.decay_steps > self.warmup_steps:
            return None
        return (
            f"got decay_steps={self.decay_steps} with warmup_steps={self.warmup_steps}, "
            "expected decay_steps to be the larger"
        )

    def _of_credit(self) -> str | None:
        if self.discount != 1 and self.credit not in ("turn", "anchor"):
            return (
                f"got discount={self.discount} with credit={self.credit!r}, which has no steps to "
                "discount; expected credit='turn' or 'anchor', or discount=1"
            )
        if (self.anchor_weight > 0) != (self.credit == "anchor"):
            return (
                f"got anchor_weight={self.anchor_weight} with credit={self.credit!r}, expected it "
                "above 0 for credit='anchor' and 0 for every other"
            )
        if self.scores and (self.credit, self.advantage) != ("run", "standardized"):
            return (
                f"got scores with credit={self.credit!r} and advantage={self.advantage!r}, "
                "expected credit='run' and advantage='standardized': scores are made comparable "
                "by their deviation; otherwise sum them up yourself, as the reward"
            )
        return None

    def _of_length(self) -> str | None:
        limit, buffer = self.overlong_tokens, self.overlong_buffer
        if limit is None and buffer is None:
            return None
        if limit is None or buffer is None or buffer > limit:
            return (
                f"got overlong_tokens={limit} and overlong_buffer={buffer}, expected both, the "
                "buffer at most as large"
            )
        if self.scores or self.advantage == "maxrl":
            return (
                "got overlong_tokens with scores or advantage='maxrl', which have no reward that "
                "could be lowered (maxrl: below 0); make length a score, or shape the reward"
            )
        return None

    def _of_loss(self) -> str | None:
        if self.dual_clip is not None and self.loss != "clip":
            return f"got dual_clip={self.dual_clip} with loss={self.loss!r}, expected loss='clip'"
        if self.loss == "dppo_tv" and self.clip_high >= 1:
            return (
                f"got clip_high={self.clip_high} with loss='dppo_tv', expected less than 1: it is "
                "a difference of two probabilities"
            )
        if (self.aggregation == "constant") != (self.aggregation_constant is not None):
            return (
                f"got aggregation={self.aggregation!r} with "
                f"aggregation_constant={self.aggregation_constant}, expected the constant with "
                "'constant' and with no other"
            )
        return None

    def _of_kl(self) -> str | None:
        if (self.kl is None) == (self.kl_coefficient == 0):
            return None
        return (
            f"got kl={self.kl!r} with kl_coefficient={self.kl_coefficient}, expected an estimator "
            "with a coefficient above 0, or neither"
        )

    def _of_importance(self) -> str | None:
        low, high, kind = self.importance_low, self.importance_high, self.importance
        if self.loss == "dppo_tv" and kind != "off":
            return (
                f"got importance={kind!r} with loss='dppo_tv', expected 'off': its ratio is "
                "against the sampler already"
            )
        bounds = {"truncated": high, "icepop": low and high, "sequence_mask": high}
        if kind == "off" and (low, high) != (None, None):
            return f"got importance bounds {low} and {high} with importance='off', expected none"
        if kind == "truncated" and low is not None:
            return (
                f"got importance_low={low} with importance='truncated', which has no lower bound; "
                "expected none, or importance='icepop'"
            )
        if kind != "off" and not bounds[kind]:
            return f"got importance bounds {low} and {high}, expected those of {kind!r}"
        return None
