"""Rows from scored runs: which calls are trained, and with what advantage.

A group's baseline consists of the runs in which the policy sampled a call that `trainable` chooses,
even if that call cannot be trained (tokens lost, sampled at temperature 0, superseded): the run's
reward is still a sample of what the policy does. Other runs (frozen nodes, foreign models, other
policies) are excluded before the statistics.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

from langchain_art import wire
from langchain_art.credit.batch_plan import plan
from langchain_art.credit.candidates import (
    CallDecision,
    CandidateCall,
    candidate_call,
    candidate_run,
)
from langchain_art.errors import Damaged
from langchain_art_server.algorithms.sequences.token_sets import unpack
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from langchain_art_server.jobs.eligibility import (
    CallEligibility,
    check_eligibility,
    steps_since,
    why_no_pair,
)
from langchain_art_server.storage.reward_snapshot import RewardSnapshot
from langchain_art_server.storage.store import Store
from langchain_art_server.storage.tables import CallRecord

_CheckedRun: TypeAlias = tuple[wire.Trajectory, list[CallEligibility]]
#: A call, the decision on it, and why it is excluded (empty: it is trained).
_CheckedCall: TypeAlias = tuple[CallEligibility, CallDecision, str]


def rows_of(
    judged: Sequence[CallEligibility], decisions: Sequence[CallDecision] | None = None
) -> list[Row]:
    """The rows of a run's trained turns.

    Without `decisions` on its turns, all that are not excluded are trained, with advantage 0.

    Raises InvalidRequest: a record is invalid (`rows_of_run`).
    """
    return rows_of_run(
        SampledCall(
            call_id=record.id,
            prompt_token_ids=record.prompt_token_ids,
            token_ids=record.token_ids,
            logprobs=record.logprobs,
            temperature=record.temperature,
            drawn_from=unpack(record.drawn_from),
            images=record.images,
            advantage=decision.advantage,
            weight=decision.weight,
        )
        for one, decision in zip(
            judged, decisions or [CallDecision(None)] * len(judged), strict=True
        )
        if one.excluded_because is None and decision.excluded_because is None
        if (record := one.record) is not None
    )


@dataclass
class Batch:
    """A job's groups as rows for the learner, with a count of what is excluded, by reason."""

    request: wire.TrainRequest
    base_version: int
    parents: Mapping[int, int] = field(default_factory=dict[int, int])
    """Parents of the policy's versions: see `steps_since`."""
    rows: list[Row] = field(default_factory=list[Row])
    owners: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Owner of each row: the index of its group, and that of its run in the group."""
    excluded: Counter[str] = field(default_factory=Counter[str])
    trained: list[str] = field(default_factory=list[str])
    calls: list[CallRecord] = field(default_factory=list[CallRecord])
    names: set[str] = field(default_factory=set[str])
    """All names by which `TrainRequest.trainable` could choose calls of the groups."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """`BatchPlan.metrics`; of what the policy sampled, ``tokens_sampled`` and ``truncated_share``;
    and what the request's `seconds` say."""
    decided: dict[str, list[CallDecision]] = field(default_factory=dict[str, list[CallDecision]])
    """Decisions on the turns of each run, by run."""
    _learning: set[str] = field(default_factory=set[str])
    _groups: list[list[_CheckedRun]] = field(default_factory=list[list[_CheckedRun]])
    _nodes: defaultdict[str, list[_CheckedCall]] = field(
        default_factory=lambda: defaultdict[str, list[_CheckedCall]](list)
    )

    def __post_init__(self) -> None:
        self.lineage = steps_since(self.parents, self.base_version)

    async def read_group(
        self, store: Store, scored: Mapping[str, RewardSnapshot], ids: Sequence[str]
    ) -> tuple[list[wire.Trajectory], dict[str, CallRecord], Collection[str]]:
        """The arguments of `add_group`, before the job or after it, by the rewards stored with it.

        Runs and calls that another job of the `lineage` trained are not trained again: what was
        trained on the way to another version, which a rollback discarded, may be.

        Raises RunsGone: a run is not stored any more.
        """
        known, request = await store.trajectories(ids), self.request
        if lost := [one for one in ids if one not in known]:
            raise RunsGone(f"The trajectories {lost[:5]} are not in the database any more.")
        once = isinstance(request.config, wire.TrainConfig) and not request.retrain
        of = request.policy, self.lineage
        marked = await store.jobs.trained_runs(ids, *of) if once else {}
        if marked:
            self.excluded["runs.already_trained"] += len(marked)
        runs = [scored[one].on(known[one].trajectory) for one in ids if one not in marked]
        wanted = [turn.call_id for run in runs for turn in run.turns if turn.call_id]
        trained = await store.jobs.trained_calls(wanted, *of) if once else {}
        return runs, await store.calls(wanted), trained.keys()

    def add_group(
        self,
        runs: Sequence[wire.Trajectory],
        records: Mapping[str, CallRecord],
        trained: Collection[str] = (),
    ) -> None:
        """Add the runs of one group, and the records of their calls.

        `trained` are ids of calls that earlier jobs trained.
        """
        policy, trainable = self.request.policy, self.request.trainable
        self.names.update(*(turn.names for run in runs for turn in run.turns))
        pair = isinstance(self.request.config, wire.PreferenceConfig)
        group = [
            (
                run,
                check_eligibility(
                    run,
                    records,
                    policy,
                    trainable,
                    imitates=self._sft,
                    trained=trained,
                    # A call may be in both sides of a pair, and in several pairs.
                    learning=set() if pair else self._learning,
                ),
            )
            for run in runs
        ]
        if pair and (why := why_no_pair([judged for _, judged in group])):
            self.excluded += why
        else:
            self._groups.append(group)

    @property
    def config(self) -> wire.StepConfig:
        """Config that the learner gets."""
        config = self.request.config
        return config.weighted if isinstance(config, wire.PreferenceConfig) else config

    @property
    def _sft(self) -> bool:
        return isinstance(self.config, wire.SFTConfig)

    def settle(self) -> None:
        """Decide on every call after the last group, and make the rows of the trained ones."""
        given, compared = self.request.advantages, self.request.compared
        while True:
            candidates = [
                [candidate_run(run, map(self._candidate, judged), given) for run, judged in group]
                for group in self._groups
            ]
            made = plan(candidates, self.config, given=given is not None, compared=compared)
            if not self._hand_over(made.decisions):
                break
        self.excluded += made.excluded
        took = self.request.seconds.model_dump() if self.request.seconds is not None else {}
        self.metrics = made.metrics | self._sampled()
        self.metrics |= {f"{name}_seconds": value for name, value in took.items()}
        places = ((g, i) for g, group in enumerate(self._groups) for i in range(len(group)))
        for place, (run, judged), decisions in zip(
            places, chain(*self._groups), chain(*made.decisions), strict=True
        ):
            self.decided[run.id] = list(decisions)
            for one, decision in zip(judged, decisions, strict=True):
                unit, _, why = (decision.excluded_because or "calls.").partition(".")
                if unit == "calls":  # else its run or its group is excluded whole
                    self._nodes[one.node].append((one, decision, why))
                    if not why and one.record is not None:
                        self.calls.append(one.record)
            if rows := rows_of(judged, decisions):
                self.rows += rows
                self.owners += [place] * len(rows)
                self.trained.append(run.id)

    def _hand_over(self, decisions: Sequence[Sequence[Sequence[CallDecision]]]) -> bool:
        """Let each call that is not trained by the use that had it be trained by its next one.

        The run or group of the former use may be left out. False if nothing was handed over.
        """
        if isinstance(self.request.config, wire.PreferenceConfig):
            return False  # a pair's sides may share calls
        uses = defaultdict[str, list[tuple[list[CallEligibility], int, str | None]]](list)
        for (_, judged), decided in zip(chain(*self._groups), chain(*decisions), strict=True):
            for n, (one, decision) in enumerate(zip(judged, decided, strict=True)):
                if one.record is not None and one.excluded_because in (None, "repeated"):
                    uses[one.record.id].append((judged, n, decision.excluded_because))
        found = False
        for several in uses.values():
            marks = [judged[n].excluded_because for judged, n, _ in several]
            has = marks.index(None) if None in marks else -1
            if has + 1 < len(several) and (has < 0 or several[has][2]):
                for place, mark in ((has, "repeated"), (has + 1, None)):
                    if place >= 0:
                        judged, n, _ = several[place]
                        judged[n] = replace(judged[n], excluded_because=mark)
                found = True
        return found

    def _sampled(self) -> dict[str, float]:
        """Distinct calls that the policy sampled for these runs, trained or not.

        ``truncated_share`` is the share of their replies that ``max_tokens`` cut off.
        """
        if self._sft:  # it learns from what others wrote, too
            return {}
        judged = (one for group in self._groups for _, calls in group for one in calls)
        mine = {
            one.record.id: one.record
            for one in judged
            if one.record is not None and one.policy == self.request.policy
        }
        cut = sum(one.finish_reason == "length" for one in mine.values())
        return {
            "tokens_sampled": float(sum(len(one.token_ids) for one in mine.values())),
            "truncated_share": cut / (len(mine) or 1),
        }

    def _candidate(self, one: CallEligibility) -> CandidateCall:
        record, request = one.record, self.request
        mine = self._sft or one.policy == request.policy
        return replace(
            candidate_call(one.turn, mine, request.trainable),
            tokens=len(record.token_ids) if record else 0,
            excluded_because=one.excluded_because,
            truncated=record is not None and record.finish_reason == "length",
            lag=self._lag(record),
            prompt=record.prompt_token_ids if record else None,
        )

    def _lag(self, record: CallRecord | None) -> int | None:
        if self._sft or record is None or record.policy != self.request.policy:
            return 0
        return self.lineage.get(record.version or 0)

    def nodes(self) -> dict[str, wire.NodeReport]:
        """The report of each node: trained calls, and ``calls.`` of `excluded`, by node."""
        return {name: _report(self._nodes[name]) for name in sorted(self._nodes)}


def _report(calls: list[_CheckedCall]) -> wire.NodeReport:
    trained = [
        (len(one.record.token_ids), decision)
        for one, decision, why in calls
        if not why and one.record is not None
    ]
    tokens = sum(count for count, _ in trained)
    return wire.NodeReport(
        calls=len(trained),
        tokens=tokens,
        advantage_mean=sum(count * decision.mean for count, decision in trained) / (tokens or 1),
        advantage_abs=sum(count * decision.mean_abs for count, decision in trained) / (tokens or 1),
        excluded=dict(Counter(why for *_, why in calls if why)),
    )


class RunsGone(Damaged):
    """Runs of a job are not stored any more."""
