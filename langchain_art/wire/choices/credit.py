"""Advantages from rewards: estimators, credit assignment, a penalty for length."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from langchain_art.wire.choices.group import CHOICE, MAX_COUNT, MAX_FACTOR, Group


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
