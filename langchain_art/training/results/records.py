"""The records of a fit: the lines of its ``history.jsonl``.

Where several policies learn in one graph, whatever is one policy's (`StepRecord.metrics`,
``excluded``, ``nodes``) is named ``policy/name``; with a single policy it is just ``name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from langchain_art.errors import ConfigError
from langchain_art.wire import NodeReport, TrainResult

T = TypeVar("T")
Rates: TypeAlias = float | dict[str, float]
"""A learning rate of all policies, or each one's own."""


class Record(BaseModel):
    """Base of stored records: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EvalResult(Record):
    """Mean reward of some scenarios, sampled from exactly one version of each model.

    A run's reward is its total return: its own and those of its calls (`Run.reward_node`). Failed
    and unjudged runs have no reward; they are counted and not part of `mean`.

    Example::

        EvalResult(mean=0.62, ci95=0.08, n=128, versions=("email-agent@17",))   # 0.62 ± 0.08
    """

    kind: Literal["eval"] = "eval"
    step: int | None = None
    """The training step after which it was made; 0: before the first."""
    versions: tuple[str, ...]
    """The evaluated version of each model: ``("email-agent@17",)``."""
    mean: float | None
    """None if no run has a reward."""
    ci95: float | None
    """Half width of the 95 % interval, 1.96 · s/√n over the scenarios (over their means, where a
    scenario was sampled more than once); None with fewer than two scenarios."""
    n: int
    """Runs that have a reward."""
    failed: int = 0
    unscored: int = 0
    """Runs that did not fail and have no reward."""
    scenarios: dict[str, float] = Field(default_factory=dict, repr=False)
    """Scenario -> the mean reward of its runs; of runs without a scenario's name, none."""
    best_of: dict[int, float] = Field(default_factory=dict)
    """k -> expected best reward of k runs of a scenario (`best_of_scenarios`): pass@k."""
    node_rewards: dict[str, float] = Field(default_factory=dict)
    """Mean reward of a node's calls, by node, over the runs in which they have one."""
    tokens: dict[str, int] = Field(default_factory=dict)
    seconds: float = 0.0
    judge_cost: float | None = None
    """US dollars that the judge took, where the evaluator knows it."""

    @property
    def version(self) -> str:
        """`versions` as text: ``email-agent@17``, or ``writer@3 + critic@2``."""
        return " + ".join(self.versions)

    def __str__(self) -> str:
        mean = "no rewards" if self.mean is None else f"{self.mean:.3f}"
        spread = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        failed = f", {self.failed} failed" if self.failed else ""
        unscored = f", {self.unscored} unscored" if self.unscored else ""
        return f"{mean}{spread} (n={self.n}{failed}{unscored})"


class GroupResult(Record):
    """Results of one group of a step, for difficulty pools."""

    scenario: str
    reward: float
    """The mean of its runs' total returns."""
    flat: bool
    """It had zero variance: nothing to learn from."""


class StepRecord(Record):
    """One training step, as a line of ``history.jsonl``."""

    kind: Literal["step"] = "step"
    step: int
    results: dict[str, TrainResult]
    """policy -> the result of its job, in the order of the trainer's policies."""
    reward_mean: float | None
    """Mean of the runs' total returns: their own rewards and those of their calls."""
    reward_std: float | None
    """Standard deviation over all runs of the step."""
    reward_ci95: float | None = None
    """Half width of the 95 % interval of `reward_mean`, over groups; None with fewer than two."""
    node_rewards: dict[str, float] = Field(default_factory=dict)
    """Mean reward of a node's calls, by node, over the runs in which they have one."""
    groups: int
    runs: int = 0
    """Runs that have a reward (0 in records before this field)."""
    run_ids: tuple[tuple[str, ...], ...] = ()
    """Ids of all runs, group by group; empty in what an earlier release has written."""
    own_advantages: bool = False
    """`Trainer(advantages=)` gave them, and not the server."""
    failed: int = 0
    retried: int = 0
    unjudged: int = 0
    """Groups that the evaluator could not score."""
    resampled: int = 0
    """Groups rolled out by dynamic sampling, in place of groups with zero variance."""
    drawn: int = 0
    """Places of the shuffled epochs that the fit is past at the end of this step: scenarios that it
    drew or passed over."""
    passed_over: int = 0
    """Scenarios among these that difficulty pools passed over in this step."""
    pools: dict[str, int] = Field(default_factory=dict)
    """Scenarios by difficulty pool when the step was drawn: ``new``, ``mixed``, ``easy``, ``hard``;
    empty without `Trainer(difficulty_pools=True)`, as `group_results`."""
    group_results: tuple[GroupResult, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict)
    """``rollout``, ``judge``, ``train`` and ``total``."""
    tokens: dict[str, int] = Field(default_factory=dict)
    """``prompt`` and ``completion`` (sampled) of all runs, and ``trained`` of all policies."""
    judge_cost: float | None = None
    """US dollars that the judge took, where the evaluator knows it."""

    @property
    def versions(self) -> dict[str, int]:
        """Version that served after the step, by policy."""
        return {policy: result.version for policy, result in self.results.items()}

    @property
    def version(self) -> int:
        """The single policy's version. Raises ConfigError if there are several."""
        return sole(self.versions)[1]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the learner; with several policies as ``policy/name``."""
        return _named({policy: result.metrics for policy, result in self.results.items()})

    @property
    def excluded(self) -> dict[str, int]:
        """Counts by reason: the server's, and ``groups.unjudged`` of the client."""
        found = _named({policy: result.excluded for policy, result in self.results.items()})
        return found | ({"groups.unjudged": self.unjudged} if self.unjudged else {})

    @property
    def nodes(self) -> dict[str, NodeReport]:
        """Contribution of each node, without nodes whose calls are all another policy's."""
        reports = {policy: dict(result.nodes) for policy, result in self.results.items()}
        for node in {name for nodes in reports.values() for name in nodes}:
            having = [nodes for nodes in reports.values() if node in nodes]
            strange = [nodes for nodes in having if _is_elsewhere(nodes[node])]
            for nodes in strange[len(strange) == len(having) :]:
                del nodes[node]
        return _named(reports)

    @property
    def rewards_by_node(self) -> dict[str, float]:
        """`node_rewards` under the names of `nodes`."""
        several, found = len(self.results) > 1, self.node_rewards
        return {
            name: found[node]
            for name in self.nodes
            if (node := name.partition("/")[2] if several else name) in found
        }


class Rollback(Record):
    """A collapse, or what a gate refused, that a fit undid: a line of ``history.jsonl``."""

    kind: Literal["rollback"] = "rollback"
    step: int
    """Step after which it was seen."""
    to_step: int
    """The last step whose version is kept; 0: what the fit began with."""
    versions: dict[str, int]
    """Version that serves from then on, by policy."""
    learning_rate: Rates
    """Rate of the steps that follow; by policy, where these have configs of their own."""
    why: str


def rate_of(rates: Rates, policy: str) -> float:
    """A policy's learning rate."""
    return rates[policy] if isinstance(rates, dict) else rates


def scaled(rates: Rates, factor: float) -> Rates:
    """All learning rates times a factor."""
    if isinstance(rates, dict):
        return {policy: rate * factor for policy, rate in rates.items()}
    return rates * factor


def rates_in_words(rates: Rates) -> str:
    """``1e-05``, or ``1e-05 (writer) and 2e-05 (critic)``."""
    if isinstance(rates, dict):
        return " and ".join(f"{rate:.3g} ({policy})" for policy, rate in rates.items())
    return f"{rates:.3g}"


def _is_elsewhere(report: NodeReport) -> bool:
    return not report.calls and report.excluded.keys() == {"other_policy"}


def _named(by_policy: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    several = len(by_policy) > 1
    return {
        f"{policy}/{name}" if several else name: value
        for policy, values in by_policy.items()
        for name, value in values.items()
    }


def sole(versions: Mapping[str, int]) -> tuple[str, int]:
    """The one policy of `versions` and its version. Raises ConfigError if there are several."""
    if len(versions) != 1:
        raise ConfigError(
            f"{' and '.join(versions)} were trained together, so there is no one version: read "
            "`versions` (or `adapters`) instead"
        )
    return next(iter(versions.items()))
