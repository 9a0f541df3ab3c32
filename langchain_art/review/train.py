"""`langchain-art review train`: a policy learns from the rewards that people gave its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from langchain_art.errors import NotFound
from langchain_art.export.names import HUMAN_REWARD
from langchain_art.review.agreement import verdicts
from langchain_art.wire import Review, TrainConfig, TrainJob, Trajectory, Turn
from langchain_art.wire.calls import label

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient

#: Why a verdict is not trained on.
REASONS = {
    "disagreement": "runs and calls on which reviewers disagree",
    "gone": "verdicts on runs that the server does not have as trajectories",
    "no_scenario": "verdicts on runs without a scenario, which nothing can be compared with",
    "alone": "runs whose scenario has no other reviewed run",
    "all_equal": "runs whose scenario got the same reward for each run",
    "superseded": "calls that the graph discarded",
    "call_alone": "calls whose node has no other reviewed call in the runs of the scenario",
    "calls_equal": "calls whose node got the same reward for each call of the scenario",
    "taken_back": "verdicts that their reviewer took back",
}
KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class RewardPlan:
    """What a step by people's rewards will train on, and what it leaves out."""

    groups: tuple[tuple[str, ...], ...]
    """Ids of runs, by scenario."""
    rewards: Mapping[str, float]
    """Run's id -> the mean of its reviewers."""
    turns: Mapping[str, float]
    """Call's id -> the mean of its reviewers."""
    left_out: Counter[str]
    """Reason (`REASONS`) -> count."""


@dataclass
class _Scenario:
    """The verdicts on the runs of one scenario."""

    runs: dict[str, float] = field(default_factory=dict[str, float])
    calls: dict[str, dict[tuple[str, str], float]] = field(
        default_factory=dict[str, dict[tuple[str, str], float]]
    )
    """Node -> run and call -> value."""


def plan(
    reviews: Sequence[Review],
    runs: Mapping[str, Trajectory],
    *,
    name: str = HUMAN_REWARD,
    min_agreement: float = 0.0,
) -> RewardPlan:
    """Reviewed runs of one scenario as groups, whose rewards and whose calls' rewards are people's.

    Runs are compared with runs, and calls with calls of the same node; what has nothing to be
    compared with, and what is equal to all that it is compared with, is left out.

    Args:
        reviews: of any kind.
        runs: by id; those that are missing are left out.
        name: of the score that people gave.
        min_agreement: see `verdicts`.
    """
    said = verdicts(reviews, name, min_agreement=min_agreement)
    left_out: Counter[str] = Counter(
        disagreement=len(said.all) - len(said.used),
        taken_back=said.taken_back,
    )
    scenarios: dict[str, _Scenario] = {}
    for one in said.used:
        if (run := runs.get(one.trajectory)) is None:
            left_out["gone"] += 1
        elif run.scenario is None:
            left_out["no_scenario"] += 1
        elif one.call_id is None:
            scenarios.setdefault(run.scenario, _Scenario()).runs[run.id] = one.value
        elif (turn := _step(run, one.call_id)) is None:
            left_out["superseded"] += 1
        else:
            found = scenarios.setdefault(run.scenario, _Scenario())
            found.calls.setdefault(label(turn), {})[run.id, one.call_id] = one.value
    groups: list[tuple[str, ...]] = []
    rewards: dict[str, float] = {}
    turns: dict[str, float] = {}
    for scenario in scenarios.values():
        whole = _compared(scenario.runs, left_out, "alone", "all_equal")
        single = [
            _compared(calls, left_out, "call_alone", "calls_equal")
            for calls in scenario.calls.values()
        ]
        rewards |= whole
        turns |= {call: value for calls in single for (_, call), value in calls.items()}
        group = [*whole, *(run for calls in single for run, _ in calls)]
        if group:
            groups.append(tuple(dict.fromkeys(group)))
    return RewardPlan(tuple(groups), rewards, turns, +left_out)


def _step(run: Trajectory, call_id: str) -> Turn | None:
    """The call, if it is a step of the run."""
    found = (turn for turn in run.turns if turn.call_id == call_id)
    return next((turn for turn in found if turn.excluded_because is None), None)


def _compared(
    values: Mapping[KeyT, float], left_out: Counter[str], alone: str, equal: str
) -> Mapping[KeyT, float]:
    """The values if there is something to learn from them; else none, and they are counted."""
    if len(values) == 1:
        left_out[alone] += 1
    elif len(set(values.values())) == 1:
        left_out[equal] += len(values)
    else:
        return values
    return {}


def read_plan(
    client: ArtClient,
    reviews: Sequence[Review],
    *,
    name: str = HUMAN_REWARD,
    min_agreement: float = 0.0,
) -> RewardPlan:
    """The plan for reviews of runs that the server has: ``client.reviews(policy=…)``."""
    runs: dict[str, Trajectory] = {}
    for run in dict.fromkeys(one.trajectory for one in reviews if one.name == name):
        try:
            runs[run] = client.trajectory(run)
        except NotFound:  # its calls are tagged with its id, and it has no reward yet
            continue
    return plan(reviews, runs, name=name, min_agreement=min_agreement)


def order(
    client: ArtClient, policy: str, planned: RewardPlan, config: TrainConfig | None = None
) -> TrainJob | None:
    """Order the step; None: there is nothing to train on.

    Runs that were trained with another reward before are trained again. Their own rewards stay.
    Runs that are staler than `TrainConfig.max_staleness` are excluded and counted by the job.

    Args:
        client: of the server that has the runs.
        policy: the policy that learns.
        planned: what it learns from.
        config: None: the defaults, with credit by call. Other kinds of credit add the rewards of
            calls to the run's, where a call without a reward counts as 0.
    """
    if not planned.groups:
        return None
    return client.train(
        planned.groups,
        policy,
        config or TrainConfig(credit="call"),
        retrain=True,
        rewards=planned.rewards,
        turns=planned.turns,
    )
