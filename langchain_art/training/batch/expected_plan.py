"""The server's plan of a group, as far as the client knows its calls: for dynamic sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from langchain_art.credit.batch_plan import BatchPlan, plan, unscored
from langchain_art.credit.candidates import CandidateCall
from langchain_art.credit.turns import candidate_call, candidate_run, why_excluded
from langchain_art.training.batch.advantage_hook import RunAdvantages
from langchain_art.wire import TrainConfig, Trajectory, TrajectoryGroup, Turn


def expected_plan(
    group: TrajectoryGroup,
    policy: str,
    config: TrainConfig,
    trainable: Mapping[str, bool],
    advantages: Mapping[str, RunAdvantages] | None = None,
) -> BatchPlan:
    """The decisions on a group's calls in a step of `policy`, and what is excluded.

    The server alone knows how a call was sampled, by how old a version, and which prompts are equal
    token by token. Here every call can be trained, none is stale, and all were asked in one state:
    so no group is excluded that the server would train.
    """
    runs = [
        candidate_run(run, (_call(turn, policy, trainable) for turn in run.turns), advantages)
        for run in group.trajectories
    ]
    return plan([runs], config, given=advantages is not None)


def group_has_zero_variance(
    group: TrajectoryGroup,
    policy: str,
    config: TrainConfig,
    trainable: Mapping[str, bool],
    advantages: Mapping[str, RunAdvantages] | None = None,
) -> bool:
    """True if the server would exclude the whole group, because its runs have equal rewards."""
    excluded = expected_plan(group, policy, config, trainable, advantages).excluded
    return any(reason.startswith("groups.") for reason in excluded)


def is_rewarded(run: Trajectory, config: TrainConfig) -> bool:
    """True if a run has what is learned from: a reward, a call's reward, or all chosen scores."""
    calls = (candidate_call(turn, True, {}) for turn in run.turns)
    return unscored(candidate_run(run, calls), config.scores) is None


def _call(turn: Turn, policy: str, trainable: Mapping[str, bool]) -> CandidateCall:
    """A call whose model or usage is not known counts as one of the policy with one token."""
    sampled_by = ((turn.model or "").partition("@")[0] or policy) if turn.ours else None
    return replace(
        candidate_call(turn, sampled_by == policy, trainable),
        tokens=1 if turn.usage is None else turn.usage.completion_tokens,
        excluded_because=why_excluded(turn, sampled_by, policy, trainable),
        prompt=(),
    )
