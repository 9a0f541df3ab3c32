"""The records of a fit, the lines of its ``history.jsonl``; their measures, and the fit's result.

Where several policies learn in one graph, whatever is one policy's (`StepRecord.metrics`,
``excluded``, ``nodes``) is named ``policy/name``; with a single policy it is just ``name``.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import Field

from langchain_art._notebook import view_html
from langchain_art.errors import ConfigError
from langchain_art.statistics import intervals
from langchain_art.wire import NodeReport, TrainResult, Trajectory
from langchain_art.wire.identifiers import Frozen

T = TypeVar("T")
Rates: TypeAlias = dict[str, float]
"""policy -> its learning rate."""


class EvalResult(Frozen):
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

    def _repr_html_(self) -> str:
        return view_html("training.report:eval_view", self)

    def __str__(self) -> str:
        mean = "no rewards" if self.mean is None else f"{self.mean:.3f}"
        spread = "" if self.ci95 is None else f" ± {self.ci95:.3f}"
        failed = f", {self.failed} failed" if self.failed else ""
        unscored = f", {self.unscored} unscored" if self.unscored else ""
        return f"{mean}{spread} (n={self.n}{failed}{unscored})"


def best_of_evals(evals: Sequence[EvalResult]) -> EvalResult | None:
    """The evaluation with the highest mean; the earliest of equals, None without a mean."""
    return max((e for e in evals if e.mean is not None), key=lambda e: e.mean or 0.0, default=None)


def compared(before: EvalResult, after: EvalResult) -> intervals.Comparison:
    """Two evaluations by the mean rewards of their scenarios: in pairs, if they share two of them.

    See `statistics.intervals.compare_rewards`. Raises ValueError if one has no scenario's reward.
    """
    means = [{name: [mean] for name, mean in one.scenarios.items()} for one in (before, after)]
    return intervals.compare_rewards(before.version, after.version, *means)


class BatchFacts(Frozen):
    """Facts of a step that are known before it is trained."""

    step: int
    retried: int = 0
    unjudged: int = 0
    """Groups that the evaluator could not score."""
    resampled: int = 0
    """Groups rolled out by dynamic sampling, in place of groups with zero variance."""
    drawn: int = 0
    """Scenarios of the shuffled epochs that the fit has drawn by the end of this step."""
    left: tuple[int, ...] = ()
    """Places in these epochs whose groups were begun and not taken by a step: with
    `max_steps_ahead`, it takes those that end first. A resumed fit begins them again."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """``rollout``, ``judge``, and of a trained step ``train`` and ``total``."""
    judge_cost: float | None = None
    """US dollars that the judge took, where the evaluator knows it."""


class StepRecord(BatchFacts):
    """One training step, as a line of ``history.jsonl``."""

    kind: Literal["step"] = "step"
    results: dict[str, TrainResult]
    """policy -> the result of its job, in the order of the trainer's policies."""
    reward_mean: float | None
    """Mean of the runs' total returns: their own rewards and those of their calls."""
    reward_std: float | None
    reward_ci95: float | None = None
    """Half width of the 95 % interval of `reward_mean`, over groups; None with fewer than two."""
    node_rewards: dict[str, float] = Field(default_factory=dict)
    """Mean reward of a node's calls, by node, over the runs in which they have one."""
    groups: int
    runs: int = 0
    """Runs that have a reward."""
    run_ids: tuple[tuple[str, ...], ...] = ()
    """Ids of all runs, group by group."""
    own_advantages: bool = False
    """`Trainer(advantages=)` gave them, and not the server."""
    failed: int = 0
    tokens: dict[str, int] = Field(default_factory=dict)
    """``prompt`` and ``completion`` (sampled) of all runs, and ``trained`` of all policies."""

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


class Rollback(Frozen):
    """A collapse that a fit undid: a line of ``history.jsonl``."""

    kind: Literal["rollback"] = "rollback"
    step: int
    """Step after which it was seen."""
    to_step: int
    """The last step whose version is kept; 0: what the fit began with."""
    versions: dict[str, int]
    """Version that serves from then on, by policy."""
    learning_rate: Rates
    why: str


def scaled(rates: Rates, factor: float) -> Rates:
    """All learning rates times a factor."""
    return {policy: rate * factor for policy, rate in rates.items()}


def rates_in_words(rates: Rates) -> str:
    """``1e-05``, or where they differ ``1e-05 (writer) and 2e-05 (critic)``."""
    first, *others = dict.fromkeys(f"{rate:.3g}" for rate in rates.values())
    if not others:
        return first
    return " and ".join(f"{rate:.3g} ({policy})" for policy, rate in rates.items())


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


def summarize(
    trajectories: Sequence[Trajectory],
    *,
    step: int | None,
    versions: Sequence[str],
    seconds: float,
    judge_cost: float | None = None,
) -> EvalResult:
    """Mean and 95 % interval of the runs' total returns."""
    by_scenario: defaultdict[str | None, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if (worth := trajectory.total_return) is not None:
            by_scenario[trajectory.scenario].append(worth)
    found = intervals.mean_of_scenarios(by_scenario.values())
    failed = sum(t.status == "failed" and t.total_return is None for t in trajectories)
    return EvalResult(
        step=step,
        versions=tuple(versions),
        mean=found.mean,
        ci95=found.ci95,
        n=found.rewards,
        scenarios={
            name: statistics.fmean(rewards) for name, rewards in by_scenario.items() if name
        },
        best_of=intervals.best_of_scenarios(by_scenario.values()),
        failed=failed,
        unscored=len(trajectories) - found.rewards - failed,
        node_rewards=node_rewards(trajectories),
        tokens=tokens(trajectories),
        seconds=seconds,
        judge_cost=judge_cost,
    )


def node_rewards(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Mean by node over runs of what its calls that count are worth together."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in trajectories:
        own: defaultdict[str, float] = defaultdict(float)
        for turn in run.turns:
            if turn.reward is not None and turn.excluded_because is None:
                own[turn.label] += turn.reward
        for node, reward in own.items():
            found[node].append(reward)
    return {node: statistics.fmean(rewards) for node, rewards in found.items()}


def tokens(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Tokens of all calls whose usage is known: ``prompt`` and ``completion``."""
    usages = [turn.usage for t in trajectories for turn in t.turns if turn.usage]
    return {
        "prompt": sum(u.prompt_tokens for u in usages),
        "completion": sum(u.completion_tokens for u in usages),
    }


class FitResult(Frozen):
    """The result of a fit.

    Example::

        result = await trainer.fit(rollout, train, steps=50, eval_scenarios=held_out)
        result.before.mean, result.after.mean, result.adapter   # 0.31, 0.84, "email-agent@50"
    """

    fit_id: str
    name: str = ""
    """The name of its folder, as the page shows it."""
    versions: dict[str, int]
    """Version that serves now, by policy."""
    before: EvalResult | None = None
    after: EvalResult | None = None
    best: EvalResult | None = None
    """The evaluation with the highest mean; its versions are pinned on the server."""
    history: tuple[StepRecord, ...] = ()
    evals: tuple[EvalResult, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    stopped: str = ""
    """Reason why the fit ended before its steps did; empty: it did not."""

    def __repr__(self) -> str:
        parts = [" + ".join(self.adapters), f"{len(self.history)} steps"]
        if self.before is not None and self.after is not None:
            parts.append(f"held out {self.before} → {self.after}")
        if self.best is not None and self.best.version != " + ".join(self.adapters):
            parts.append(f"best {self.best}  {self.best.version}")
        return f"<FitResult {self.name or self.fit_id}: {', '.join(parts)}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return view_html("training.report:summary_view", self)

    def plot(self, path: str | Path | None = None, title: str = "Reward during training") -> Any:
        """Draw rewards by step, with held-out evaluations: a figure, which a notebook shows.

        Args:
            path: where a PNG goes, too. None: nowhere.
            title: above the figure.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        from langchain_art.training import report  # noqa: PLC0415 - it is made of these records

        figure = report.figure_of([report.Curve("", self.history, self.evals)], title)
        if path is not None:
            report.saved(figure, Path(path))
        return figure

    @property
    def policy(self) -> str:
        """The single policy's name. Raises ConfigError if there are several."""
        return sole(self.versions)[0]

    @property
    def version(self) -> int:
        """The version that serves now. Raises ConfigError if there are several policies."""
        return sole(self.versions)[1]

    @property
    def adapter(self) -> str:
        """The final version's name: ``email-agent@50``. Raises ConfigError if there are several."""
        policy, version = sole(self.versions)
        return f"{policy}@{version}"

    @property
    def adapters(self) -> tuple[str, ...]:
        """The final version's name of each policy."""
        return tuple(f"{policy}@{version}" for policy, version in self.versions.items())

    @property
    def excluded(self) -> dict[str, int]:
        """Counts of what all steps excluded, by reason."""
        return _sums(record.excluded for record in self.history)

    @property
    def seconds(self) -> float:
        """Seconds of all steps and evaluations."""
        steps = sum(one.seconds.get("total", 0.0) for one in self.history)
        return steps + sum(one.seconds for one in self.evals)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of all steps and evaluations: ``prompt``, ``completion`` and ``trained``."""
        return _sums(one.tokens for one in (*self.history, *self.evals))

    @property
    def judge_cost(self) -> float | None:
        """US dollars that the judge took in all; None where the evaluator does not know it."""
        costs = [one.judge_cost for one in (*self.history, *self.evals)]
        spent = [cost for cost in costs if cost is not None]
        return math.fsum(spent) if spent else None

    @property
    def nodes(self) -> dict[str, NodeReport]:
        """Contribution of each node to all steps."""
        return total_nodes(record.nodes for record in self.history)


def total_nodes(reports: Iterable[Mapping[str, NodeReport]]) -> dict[str, NodeReport]:
    """Node reports of several steps as one: counts added, advantages averaged over tokens."""
    by_node: defaultdict[str, list[NodeReport]] = defaultdict(list)
    for nodes in reports:
        for name, report in nodes.items():
            by_node[name].append(report)
    found: dict[str, NodeReport] = {}
    for name, several in by_node.items():
        tokens = sum(one.tokens for one in several)
        found[name] = NodeReport(
            calls=sum(one.calls for one in several),
            tokens=tokens,
            advantage_mean=sum(one.advantage_mean * one.tokens for one in several) / (tokens or 1),
            advantage_abs=sum(one.advantage_abs * one.tokens for one in several) / (tokens or 1),
            excluded=_sums(one.excluded for one in several),
        )
    return found


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
