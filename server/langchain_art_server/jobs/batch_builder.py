"""From scored runs to rows: which calls learn, why the others do not, and with what advantage.

`judge` is the one judgement of a run's calls; training and the audit both ask it. The reasons are
the words behind ``calls.`` in `TrainResult.excluded`:

- ``superseded_…``: the graph threw the call away;
- ``foreign``: another server's model;
- ``other_policy``: sampled by another policy, or by the base model;
- ``frozen``: `TrainRequest.trainable` does not choose it;
- ``lost``: no record of it is here;
- ``greedy``, ``top_p``, ``grammar`` …: not sampled as the learner would repeat it;
- ``empty``: nothing was sampled;
- ``too_long``: more tokens than the model takes (of a turn that was not sampled here);
- ``repeated``: a reply that was used twice (from a cache); it learns where it was used first.

**What a baseline is made of.** A group's statistics are those of the policy's own behaviour, so a
run counts in them only if the policy sampled a call of it that `trainable` chooses. Whether that
call can be trained does not matter: if its tokens were lost, or drawn under a grammar, or its
attempt was thrown away, the run's reward is still a sample of what the policy does. A run without
such a call (frozen helpers, foreign models, other policies) is left out before the statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from langchain_art.wire import NodeReport, SFTConfig, TrainRequest, Trajectory, Turn
from langchain_art_server.algorithms.credit.batch_plan import plan
from langchain_art_server.algorithms.credit.candidates import CandidateCall, CandidateRun, Verdict
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.storage.tables import CallRecord


@dataclass(frozen=True)
class Judged:
    """A turn, its record if there is one, and why it does not learn (None: it does)."""

    turn: Turn
    record: CallRecord | None
    excluded_because: str | None

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
    trainable: Mapping[str, bool],
    *,
    imitates: bool = False,
) -> list[Judged]:
    """Say of each turn of a run whether it learns, and if not, why.

    Args:
        run: its turns are judged in their order.
        records: by call id, those that are here.
        policy: that is to learn; None: whichever sampled the turn.
        trainable: `TrainRequest.trainable`.
        imitates: what is to be learned is that it was said, by whomever (`imitation`).
    """
    judged: list[Judged] = []
    learning: set[str] = set()
    for turn in run.turns:
        record = records.get(turn.call_id or "")
        excluded_because = _why_excluded(turn, record, policy, trainable, imitates)
        if excluded_because is None and record is not None:
            excluded_because = "repeated" if record.id in learning else None
            learning.add(record.id)
        judged.append(Judged(turn, record, excluded_because))
    return judged


def _why_excluded(
    turn: Turn,
    record: CallRecord | None,
    policy: str | None,
    trainable: Mapping[str, bool],
    imitates: bool,
) -> str | None:
    if turn.excluded_because is not None:
        return f"superseded_{turn.excluded_because}"
    if record is None and not turn.ours:
        return "foreign"
    if not imitates and record and (not record.policy or policy not in (None, record.policy)):
        return "other_policy"
    if not turn.learns(trainable):
        return "frozen"
    if record is None:
        return "lost"
    if record.excluded_because is not None:
        return record.excluded_because.partition(":")[0].replace(" ", "_")
    return None if record.token_ids else "empty"


def rows_of(judged: Sequence[Judged], verdicts: Sequence[Verdict] | None = None) -> list[Row]:
    """The rows of the turns that learn.

    Args:
        judged: the turns of a run.
        verdicts: on each of them; None: all that are not excluded_because, with nothing to learn.

    Raises:
        InvalidRequest: a record makes no sense.
    """
    found: list[SampledCall] = []
    for one, verdict in zip(judged, verdicts or [Verdict(None)] * len(judged), strict=True):
        if one.record is None or one.excluded_because is not None or verdict.reason is not None:
            continue
        found.append(
            SampledCall(
                call_id=one.record.id,
                prompt_token_ids=one.record.prompt_token_ids,
                token_ids=one.record.token_ids,
                logprobs=one.record.logprobs,
                temperature=one.record.temperature,
                advantage=verdict.advantage,
                weight=verdict.weight,
            )
        )
    return rows_of_run(found)


@dataclass
class _Node:
    """What one node contributes, while it is counted."""

    calls: int = 0
    tokens: int = 0
    advantage: float = 0.0
    advantage_abs: float = 0.0
    excluded: Counter[str] = field(default_factory=Counter[str])

    def report(self) -> NodeReport:
        return NodeReport(
            calls=self.calls,
            tokens=self.tokens,
            advantage_mean=self.advantage / self.tokens if self.tokens else 0.0,
            advantage_abs=self.advantage_abs / self.tokens if self.tokens else 0.0,
            excluded=dict(self.excluded),
        )


@dataclass
class Batch:
    """What a job's groups come down to: rows for the learner, and a count of all that is not."""

    request: TrainRequest
    base_version: int
    rows: list[Row] = field(default_factory=list[Row])
    excluded: Counter[str] = field(default_factory=Counter[str])
    trained: list[str] = field(default_factory=list[str])
    calls: list[CallRecord] = field(default_factory=list[CallRecord])
    names: set[str] = field(default_factory=set[str])
    """All that `TrainRequest.trainable` could have chosen calls by."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """`Plan.metrics`."""
    _runs: list[list[tuple[Trajectory, list[Judged]]]] = field(
        default_factory=list[list[tuple[Trajectory, list[Judged]]]]
    )
    _candidates: list[list[CandidateRun]] = field(default_factory=list[list[CandidateRun]])
    _nodes: dict[str, _Node] = field(default_factory=dict[str, _Node])

    def add_group(
        self,
        runs: Sequence[Trajectory],
        records: Mapping[str, CallRecord],
    ) -> None:
        """Add the runs of one group as they were scored, and the records of their calls."""
        policy, trainable = self.request.policy, self.request.trainable
        judged = [(run, judge(run, records, policy, trainable, imitates=self._sft)) for run in runs]
        self.names.update(*(turn.names for run in runs for turn in run.turns))
        self._runs.append(judged)
        self._candidates.append(
            [
                CandidateRun(
                    calls=tuple(map(self._candidate, calls)),
                    reward=run.reward,
                    scores=run.scores,
                    failed=run.status == "failed",
                    truncated=run.status == "truncated",
                )
                for run, calls in judged
            ]
        )

    @property
    def _sft(self) -> bool:
        return isinstance(self.request.config, SFTConfig)

    def _candidate(self, one: Judged) -> CandidateCall:
        record, request = one.record, self.request
        superseded = one.turn.excluded_because is not None
        config = request.config
        anchored = not isinstance(config, SFTConfig) and config.credit.kind == "anchor"
        return CandidateCall(
            tokens=len(record.token_ids) if record else 0,
            node=one.node,
            learns=(self._sft or one.policy == request.policy)
            and one.turn.learns(request.trainable),
            superseded=superseded,
            excluded_because=one.excluded_because,
            truncated=record is not None and record.finish_reason == "length",
            lag=self.base_version - (record.version or 0) if record and not self._sft else 0,
            reward=None if superseded else one.turn.reward,
            anchor=tuple(record.prompt_token_ids) if record and anchored else None,
        )

    def settle(self) -> None:
        """After the last group: decide on every call, and lay out what learns."""
        made = plan(self._candidates, self.request.config)
        self.excluded += made.excluded
        self.metrics = made.metrics
        for runs, verdicts in zip(self._runs, made.verdicts, strict=True):
            for (run, judged), decided in zip(runs, verdicts, strict=True):
                self._add_run(run, judged, decided)

    def _add_run(
        self, run: Trajectory, judged: Sequence[Judged], verdicts: Sequence[Verdict]
    ) -> None:
        for one, verdict in zip(judged, verdicts, strict=True):
            unit, _, why = (verdict.reason or "").partition(".")
            if unit not in ("", "calls"):
                continue  # its run or its group is left out as a whole
            node = self._nodes.setdefault(one.node, _Node())
            if why:
                node.excluded[why] += 1
            elif one.record is not None:
                tokens = len(one.record.token_ids)
                node.calls += 1
                node.tokens += tokens
                node.advantage += verdict.advantage * tokens
                node.advantage_abs += abs(verdict.advantage) * tokens
                self.calls.append(one.record)
        if rows := rows_of(judged, verdicts):
            self.rows += rows
            self.trained.append(run.id)

    def nodes(self) -> dict[str, NodeReport]:
        """What each node gave: `calls_trained` and the ``calls.`` of `excluded`, shared out."""
        return {name: self._nodes[name].report() for name in sorted(self._nodes)}
