"""From scored runs to rows: which calls learn, why the others do not, and with what advantage.

`judge` is the one judgement of a run's calls; training and the audit both ask it. The reasons are
the words behind ``calls.`` in `TrainResult.dropped`:

- ``discarded_…``: the graph threw the call away;
- ``foreign``: another server's model;
- ``other_policy``: sampled by another policy, or by the base model;
- ``frozen``: `TrainRequest.train` does not choose it;
- ``lost``: no record of it is here;
- ``greedy``, ``top_p``, ``grammar`` …: not sampled as the learner would repeat it;
- ``empty``: nothing was sampled;
- ``repeated``: a reply that was used twice (from a cache); it learns where it was used first.

**What a baseline is made of.** A group's statistics are those of the policy's own behaviour, so a
run counts in them only if the policy sampled a call of it that `train` chooses. Whether that call
can be trained does not matter: if its tokens were lost, or drawn under a grammar, or its attempt
was thrown away, the run's reward is still a sample of what the policy does. A run without such a
call (frozen helpers, foreign models, other policies) is left out before the statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from langchain_art.wire import NodeReport, TrainRequest, Trajectory, Turn
from langchain_art_server.algorithms.advantages import group_advantages, is_flat
from langchain_art_server.algorithms.samples import Row, SampledCall, rows_of_run
from langchain_art_server.tables import CallRecord


@dataclass(frozen=True)
class Judged:
    """A turn, its record if there is one, and why it does not learn (None: it does)."""

    turn: Turn
    record: CallRecord | None
    masked: str | None

    @property
    def node(self) -> str:
        """Its key in `TrainResult.nodes`."""
        return "/".join(self.turn.path) or self.turn.node or "-"

    @property
    def policy(self) -> str | None:
        """Which policy sampled it, as far as is known; None: none of ours."""
        if self.record is not None:
            return self.record.policy
        return (self.turn.model or "").partition("@")[0] if self.turn.ours else None


def judge(
    run: Trajectory,
    records: Mapping[str, CallRecord],
    policy: str | None,
    train: Mapping[str, bool],
) -> list[Judged]:
    """Say of each turn of a run whether it learns, and if not, why.

    Args:
        run: its turns are judged in their order.
        records: by call id, those that are here.
        policy: that is to learn; None: whichever sampled the turn.
        train: `TrainRequest.train`.
    """
    judged: list[Judged] = []
    learning: set[str] = set()
    for turn in run.turns:
        record = records.get(turn.call_id or "")
        masked = _why_not(turn, record, policy, train)
        if masked is None and record is not None:
            masked = "repeated" if record.id in learning else None
            learning.add(record.id)
        judged.append(Judged(turn, record, masked))
    return judged


def _why_not(
    turn: Turn, record: CallRecord | None, policy: str | None, train: Mapping[str, bool]
) -> str | None:
    if turn.discarded is not None:
        return f"discarded_{turn.discarded}"
    if record is None and not turn.ours:
        return "foreign"
    if record is not None and (record.policy is None or policy not in (None, record.policy)):
        return "other_policy"
    if not turn.learns(train):
        return "frozen"
    if record is None:
        return "lost"
    if record.untrainable is not None:
        return record.untrainable.partition(":")[0].replace(" ", "_")
    return None if record.token_ids else "empty"


def rows_of(judged: Sequence[Judged], advantage: float) -> list[Row]:
    """The rows of the turns that learn. Raises InvalidRequest if a record makes no sense."""
    return rows_of_run(
        (
            SampledCall(
                call_id=one.record.id,
                prompt_token_ids=one.record.prompt_token_ids,
                token_ids=one.record.token_ids,
                logprobs=one.record.logprobs,
                temperature=one.record.temperature,
            )
            for one in judged
            if one.record is not None and one.masked is None
        ),
        advantage,
    )


@dataclass
class _Node:
    """What one node contributes, while it is counted."""

    calls: int = 0
    tokens: int = 0
    advantage: float = 0.0
    advantage_abs: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter[str])

    def report(self) -> NodeReport:
        return NodeReport(
            calls=self.calls,
            tokens=self.tokens,
            advantage_mean=self.advantage / self.tokens if self.tokens else 0.0,
            advantage_abs=self.advantage_abs / self.tokens if self.tokens else 0.0,
            dropped=dict(self.dropped),
        )


@dataclass
class Batch:
    """What a job's groups come down to: rows for the learner, and a count of all that is not."""

    request: TrainRequest
    base_version: int
    rows: list[Row] = field(default_factory=list[Row])
    dropped: Counter[str] = field(default_factory=Counter[str])
    trained: list[str] = field(default_factory=list[str])
    calls: list[CallRecord] = field(default_factory=list[CallRecord])
    rewards: list[float] = field(default_factory=list[float])
    names: set[str] = field(default_factory=set[str])
    """All that `TrainRequest.train` could have chosen calls by."""
    _nodes: dict[str, _Node] = field(default_factory=dict[str, _Node])

    def add_group(
        self, scored: Sequence[tuple[Trajectory, float]], records: Mapping[str, CallRecord]
    ) -> None:
        """Add the scored runs of one group, with the records of their calls."""
        request = self.request
        counted: list[tuple[Trajectory, float, list[Judged]]] = []
        for run, reward in scored:
            judged = judge(run, records, request.policy, request.train)
            self.names.update(*(turn.names for turn in run.turns))
            if any(j.policy == request.policy and j.turn.learns(request.train) for j in judged):
                counted.append((run, reward, judged))
            else:
                self._add_run(run, judged, 0.0)
        rewards_G = [reward for _, reward, _ in counted]
        self.rewards += rewards_G
        if len(counted) < 2:
            self.dropped["groups.single" if counted else "groups.empty"] += 1
        elif is_flat(rewards_G):
            self.dropped["groups.zero_variance"] += 1
        else:
            advantages_G = group_advantages(rewards_G, request.config.advantage)
            for (run, _, judged), advantage in zip(counted, advantages_G, strict=True):
                self._add_run(run, judged, advantage)

    def _add_run(self, run: Trajectory, judged: Sequence[Judged], advantage: float) -> None:
        learned = [one.record for one in judged if one.record and one.masked is None]
        for one in judged:
            node = self._nodes.setdefault(one.node, _Node())
            if one.masked is not None:
                self.dropped[f"calls.{one.masked}"] += 1
                node.dropped[one.masked] += 1
            elif one.record is not None:
                tokens = len(one.record.token_ids)
                node.calls += 1
                node.tokens += tokens
                node.advantage += advantage * tokens
                node.advantage_abs += abs(advantage) * tokens
        if not learned:
            self.dropped["runs.without_trainable_calls"] += 1
            return
        self.rows += rows_of(judged, advantage)
        self.calls += learned
        self.trained.append(run.id)

    def nodes(self) -> dict[str, NodeReport]:
        """What each node gave: `calls_trained` and the ``calls.`` of `dropped`, shared out."""
        return {name: self._nodes[name].report() for name in sorted(self._nodes)}

    def metrics(self) -> dict[str, float]:
        """Counts of what goes in."""
        lags = [self.base_version - (call.version or 0) for call in self.calls]
        return {
            "runs_trained": float(len(self.trained)),
            "calls_trained": float(len(self.calls)),
            "reward_mean": sum(self.rewards) / len(self.rewards) if self.rewards else 0.0,
            "staleness_mean": sum(lags) / len(lags) if lags else 0.0,
            "staleness_max": float(max(lags, default=0)),
        }
