"""Rule of what a step by reviews trains: its one home, for commands, programs and the page.

Runs are compared with runs of their scenario, and calls with calls of the same node in these. A
verdict that was trained with its value is not trained again; its value is still compared with.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import TypeAlias

from pydantic_core import to_json

from langchain_art import wire
from langchain_art.credit.credit_assignment import has_zero_variance
from langchain_art.errors import Conflict
from langchain_art.statistics.agreement import verdicts
from langchain_art.wire.trajectories import EVALUATION
from langchain_art_server.backends.chat.chat_template import image_names
from langchain_art_server.jobs.eligibility import CallEligibility, check_eligibility
from langchain_art_server.storage.review_store import VerdictMark
from langchain_art_server.storage.tables import CallRecord

#: What a verdict is on: `VerdictMark.subject`.
_Subject: TypeAlias = tuple[str, str, str, str]
#: Fates of rewards that others are compared with, though they are not trained.
_COMPARED = frozenset({"trained", "ordered", "stale", "rolled_back", "untrainable"})


@dataclass(frozen=True)
class ReviewedRun:
    """A run as a step by reviews sees it: which of its calls the policy can learn from."""

    trajectory: wire.Trajectory
    held_out: bool
    """True if an evaluation ran it, or its scenario."""
    calls: Sequence[CallEligibility]
    """Calls by turn."""
    lags: Sequence[int | None]
    """Steps since each call that the policy sampled; None: by a version that the serving one does
    not descend from."""

    @classmethod
    def of(
        cls,
        run: wire.Trajectory,
        records: Mapping[str, CallRecord],
        policy: str,
        lineage: Mapping[int, int],
        held_out: Collection[str],
    ) -> ReviewedRun:
        """A stored run, with the `records` of its calls, for the `policy` that learns.

        `lineage` is `steps_since` of the serving version, `held_out` the evaluations' scenarios.
        """
        calls = check_eligibility(run, records, policy, {})
        lags = [
            lineage.get(one.record.version or 0) if one.record else 0
            for one in calls
            if one.policy == policy
        ]
        evaluated = EVALUATION in run.metadata or run.scenario in held_out
        return cls(run, evaluated, calls, lags)

    def at(self, call_id: str) -> int | None:
        """The index of a call's turn: its step if it has one; None: the run has no such call."""
        turns = self.trajectory.turns
        found = [index for index, turn in enumerate(turns) if turn.call_id == call_id]
        steps = [index for index in found if turns[index].excluded_because is None]
        return next(iter([*steps, *found]), None)

    def fate(self, asked: wire.ReviewTraining, at: int | None = None) -> wire.VerdictFate:
        """``trains``, or what stands against it: of a reward of the run, or of its call `at`."""
        run = self.trajectory
        calls = self.calls if at is None else self.calls[at : at + 1]
        if self.held_out and not {run.id, run.scenario} & set(asked.held_out_too):
            return "held_out"
        if not any(one.policy == asked.policy for one in calls):
            return "other_model"
        if at is not None and run.turns[at].excluded_because is not None:
            return "superseded"
        if run.scenario is None:
            return "no_scenario"
        if None in self.lags:
            return "rolled_back"
        oldest, most = max(lag or 0 for lag in self.lags), asked.config.max_staleness
        if most is not None and oldest > most:
            return "stale"
        usable = any(one.excluded_because is None for one in calls)
        return "trains" if usable else "untrainable"


@dataclass(frozen=True)
class PlannedSteps:
    """A plan, and what is stored when it is ordered."""

    plan: wire.ReviewPlan
    reward_marks: Sequence[VerdictMark]
    """Marks of the step by rewards."""
    correction_marks: Sequence[VerdictMark]
    """Marks of each preference step."""
    pair_runs: Sequence[wire.Trajectory]
    """The runs of `ReviewPlan.pairs`."""


@dataclass
class _Reward:
    """A verdict with a value, and what it is compared in."""

    mark: VerdictMark
    value: float
    fate: wire.VerdictFate
    pool: tuple[str, str] = ("", "")
    """Scenario and node; no node: of whole runs."""


@dataclass
class _Scenario:
    """Trained items of one scenario."""

    runs: dict[str, None] = field(default_factory=dict[str, None])
    compared: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])


def plan_reviews(
    asked: wire.ReviewTraining,
    reviews: Sequence[wire.Review],
    runs: Mapping[str, ReviewedRun],
    marks: Iterable[VerdictMark],
    lineage: Collection[int],
) -> PlannedSteps:
    """The step that reviews, of any kind and name, make.

    Those of `runs` that are missing are not stored; `marks` are of the policy's jobs
    (`ReviewStore.marks`), `lineage` the versions that the serving one descends from, and itself.

    Raises:
        ConfigError: `min_agreement` is no number that can be used.
    """
    past: defaultdict[_Subject, list[VerdictMark]] = defaultdict(list)
    for mark in marks:
        if mark.state != "succeeded" or mark.version in lineage:
            past[mark.subject].append(mark)
    planner = _Planner(asked, reviews, runs, past)
    rewards = list(planner.rewards())
    pools: defaultdict[tuple[str, str], list[_Reward]] = defaultdict(list)
    for one in rewards:
        if one.fate == "trains" or one.fate in _COMPARED:
            pools[one.pool].append(one)
    scenarios: defaultdict[str, _Scenario] = defaultdict(_Scenario)
    for (scenario, node), pool in pools.items():
        live = [one for one in pool if one.fate == "trains"]
        values = [one.value for one in pool]
        if len(pool) < 2 or has_zero_variance(values, asked.config.zero_variance_tolerance):
            for one in live:
                one.fate = "alone" if len(pool) < 2 else "all_equal"
        elif live:
            found = scenarios[scenario]
            found.runs |= dict.fromkeys(one.mark.trajectory for one in live)
            found.compared[node] = tuple(one.value for one in pool if one.fate != "trains")
    trained = [one for one in rewards if one.fate == "trains"]
    for one in rewards:
        planner.note(one.mark, one.fate, one.value)
    corrected = list(planner.corrections())
    pairs = [_pair(run.trajectory, at, reply) for _, run, at, reply in corrected]
    compared = [
        {node: values for node, values in one.compared.items() if values}
        for one in scenarios.values()
    ]
    plan = wire.ReviewPlan(
        verdicts=tuple(planner.planned),
        groups=tuple(tuple(one.runs) for one in scenarios.values()),
        rewards={o.mark.trajectory: o.value for o in trained if not o.mark.call_id},
        turns={o.mark.call_id: o.value for o in trained if o.mark.call_id},
        compared=tuple(compared) if any(compared) else (),
        pairs=tuple((chosen.id, rejected.id) for chosen, rejected in pairs),
        nodes=_nodes(runs, trained, [run.calls[at].node for _, run, at, _ in corrected]),
    )
    digest = hashlib.sha256(plan.model_dump_json().encode()).hexdigest()
    return PlannedSteps(
        plan.model_copy(update={"digest": digest}),
        [one.mark for one in trained],
        [
            replace(mark, taught_by=rejected.id)
            for (mark, *_), (_, rejected) in zip(corrected, pairs, strict=True)
        ],
        [run for pair in pairs for run in pair],
    )


def require_untrained(job: str, marks: Sequence[VerdictMark], lineage: Collection[int]) -> None:
    """Refuse a job whose order was overtaken: its base has been trained on what it is to train.

    `marks` are those of the policy's jobs (`ReviewStore.marks`), `lineage` the versions that the
    job's base descends from, and the base.

    Raises Conflict: the base was trained on one of the job's verdicts, with its value.
    """
    last: dict[_Subject, VerdictMark] = {}
    for mark in marks:
        if mark.state == "succeeded" and mark.version in lineage:
            last[mark.subject] = mark
    again = [
        found
        for mark in marks
        if mark.job == job
        and (found := last.get(mark.subject)) is not None
        and found.said == mark.said
        and found.order != mark.order
    ]
    if again:
        raise Conflict(
            f"got {len(again)} verdicts that version {again[0].version} was trained on already, "
            "with these values: since the order, a rollback made it the one to go on from, or a "
            "step in between trained nothing. Order the step by reviews again: it trains what is "
            "left."
        )


def _nodes(
    runs: Mapping[str, ReviewedRun], trained: Iterable[_Reward], corrected: Sequence[str]
) -> dict[str, wire.PlannedNode]:
    """Calls that rewards train, and how often a node is `corrected`, by node."""
    learn: dict[tuple[str, int], str] = {}
    for one in trained:
        name, call = one.mark.trajectory, one.mark.call_id
        at = runs[name].at(call) if call else None
        for index, found in enumerate(runs[name].calls):
            if at in (None, index) and found.excluded_because is None:
                learn[name, index] = found.node
    calls, corrections = Counter(learn.values()), Counter(corrected)
    return {
        node: wire.PlannedNode(calls=calls[node], corrections=corrections[node])
        for node in sorted({*calls, *corrections})
    }


@dataclass
class _Planner:
    """The verdicts of a plan while it is made; `past` are the marks by subject, by job."""

    asked: wire.ReviewTraining
    reviews: Sequence[wire.Review]
    runs: Mapping[str, ReviewedRun]
    past: Mapping[_Subject, Sequence[VerdictMark]]
    planned: list[wire.PlannedVerdict] = field(default_factory=list[wire.PlannedVerdict])

    def rewards(self) -> Iterator[_Reward]:
        """The verdicts that have a value; those that have none are `planned` at once."""
        weights = self.asked.weights
        own = [one for one in self.reviews if one.name in weights and one.kind != "correction"]
        said = [
            {
                (one.trajectory, one.call_id): one
                for one in verdicts(own, name, min_agreement=self.asked.min_agreement).all
            }
            for name in weights
        ]
        given: defaultdict[tuple[str, str | None], list[wire.Review]] = defaultdict(list)
        for review in own:
            given[review.trajectory, review.call_id].append(review)
        for (run_id, call_id), reviewed in given.items():
            about = run_id, call_id or "", "reward", "+".join(weights)
            parts = [found.get((run_id, call_id)) for found in said]
            known = [one for one in parts if one is not None]
            if len(known) < len(parts):
                names = [(each.source, each.id) for each in reviewed]
                mark = VerdictMark(*about, "", "", names)
                self.note(mark, "incomplete" if known else "taken_back")
                continue
            names = [(each.source, each.id) for each in reviewed if each.value is not None]
            value = fsum(
                weight * one.value for weight, one in zip(weights.values(), known, strict=True)
            )
            mark = VerdictMark(*about, to_json(value).decode(), call_id or run_id, names)
            found = _Reward(mark, value, "disagreement")
            run = self.runs.get(run_id)
            at = run.at(call_id) if run is not None and call_id is not None else None
            if any(one.abstains for one in known):
                pass
            elif run is None or (call_id is not None and at is None):
                found.fate = "gone"
            else:
                found.fate = run.fate(self.asked, at)
                node = "" if at is None else run.calls[at].node
                found.pool = run.trajectory.scenario or "", node
            if found.fate in _COMPARED or found.fate == "trains":
                found.fate = self._last(mark) or found.fate
            yield found

    def corrections(self) -> Iterator[tuple[VerdictMark, ReviewedRun, int, wire.Message]]:
        """The corrected replies that are trained: mark, run, turn and reply. All are `planned`."""
        by_call: defaultdict[tuple[str, str], list[wire.Review]] = defaultdict(list)
        for one in sorted(self.reviews, key=lambda review: review.at):
            if one.kind == "correction":
                by_call[one.trajectory, one.call_id or ""].append(one)
        for (run_id, call_id), given in by_call.items():
            held = [one for one in given if not one.taken_back]
            last = (held or given)[-1]
            reply = last.correction or {}
            digest = hashlib.sha256(to_json(_said(reply))).hexdigest()
            names = [(last.source, last.id)]
            mark = VerdictMark(run_id, call_id, "correction", "", digest, "", names)
            run = self.runs.get(run_id)
            at = None if run is None else run.at(call_id)
            fate: wire.VerdictFate
            if not held:
                fate = "taken_back"
            elif run is None or at is None:
                fate = "gone"
            else:
                fate, sampled = run.fate(self.asked, at), run.trajectory.turns[at].reply
                if fate not in ("held_out", "other_model"):
                    same = sampled is not None and _said(sampled) == _said(reply)
                    fate = "no_reply" if sampled is None else "unchanged" if same else "trains"
                if fate == "trains" and image_names(run.trajectory.prompt(at)):
                    fate = "untrainable"  # the learner shows no images to replies that are given
                if fate == "trains":
                    fate = self._last(mark) or fate
                if fate == "trains":
                    yield mark, run, at, reply
            self.note(mark, fate)
            for _ in held[:-1]:
                self.note(mark, "revised")

    def _last(self, mark: VerdictMark) -> wire.VerdictFate | None:
        """``trained`` or ``ordered`` if the last job on the subject had what is said now."""
        past = self.past.get(mark.subject, ())
        if not past or past[-1].said != mark.said:
            return None
        return "trained" if past[-1].state == "succeeded" else "ordered"

    def note(self, mark: VerdictMark, fate: wire.VerdictFate, value: float | None = None) -> None:
        """Plan a verdict."""
        done = [one for one in self.past.get(mark.subject, ()) if one.state == "succeeded"]
        self.planned.append(
            wire.PlannedVerdict(
                trajectory=mark.trajectory,
                call_id=mark.call_id or None,
                kind="correction" if mark.kind == "correction" else "reward",
                value=value,
                fate=fate,
                trained=tuple(dict.fromkeys(f"{self.asked.policy}@{one.version}" for one in done)),
            )
        )


def _pair(
    run: wire.Trajectory, at: int, reply: wire.Message
) -> tuple[wire.Trajectory, wire.Trajectory]:
    """The corrected reply and the sampled one, each as a run of that call alone."""
    turn = run.turns[at]
    alone = {"extends": None, "messages": tuple(run.prompt(at)), "reward": None}
    sampled = turn.model_copy(update=alone | {"excluded_because": None})
    better = wire.Turn(messages=sampled.messages, reply=reply, tools=turn.tools, ours=False)
    return _named("correction", better), _named("call", sampled)


def _named(kind: str, turn: wire.Turn) -> wire.Trajectory:
    digest = hashlib.sha256(turn.model_dump_json().encode()).hexdigest()[:32]
    return wire.Trajectory(id=f"{kind}:{digest}", turns=(turn,))


def _said(reply: wire.Message) -> tuple[object, object]:
    return reply.get("content") or "", reply.get("tool_calls") or []
