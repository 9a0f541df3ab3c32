"""What a review will do, said before it is saved: the rules of ``langchain-art review train``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Literal

from pydantic import BaseModel

from langchain_art.errors import NotFound
from langchain_art.wire import HUMAN_REWARD, Message, Review, Trajectory, Turn

Effect = Literal[
    "teaches_preference",
    "teaches_reward",
    "is_kept",
    "is_taken_back",
    "other_model",
    "no_reply",
    "unchanged",
    "superseded",
    "no_scenario",
    "alone",
    "all_equal",
]


class ReviewEffect(BaseModel):
    """What becomes of one review if it is saved now."""

    effect: Effect
    """
    ``teaches_preference``: the next ``langchain-art review train`` prefers the correction to what
    was sampled. ``teaches_reward``: it compares the run with the reviewed ones of its scenario, or
    the call with the reviewed ones of its node in these.
    ``is_kept``: what has another name than ``human_reward`` is shown and compared, never trained
    on.
    ``is_taken_back``: a reward without a value; the run is as if it had not been reviewed.
    The others say why nothing learns from it: the call is ``other_model``'s, the graph got
    ``no_reply`` from it or threw it away (``superseded``), the correction is ``unchanged``, the run
    has ``no_scenario``, nothing that it is compared with is reviewed (``alone``), or all of that
    has the same reward (``all_equal``)."""
    policy: str | None
    """Which policy would learn; None: none."""
    revises: str | None
    """The id of this reviewer's earlier review of the same thing, which it replaces."""
    compared_with: int
    """How many other runs of the scenario are reviewed; of a call, how many of its node's."""


def effect_of(
    review: Review,
    runs: Mapping[str, Trajectory],
    said: Sequence[Review],
    policies: Collection[str],
) -> ReviewEffect:
    """What a review of a run will do, by what others say; what reviewers differ in is averaged.

    Args:
        review: not saved yet.
        runs: by id: the one that it is about; if it is of a call, also those of the reviewed calls.
        said: the reviews of the run and of the other runs of its scenario.
        policies: that there are.

    Raises:
        NotFound: the run has no such call.
    """
    run = runs[review.trajectory]
    turn = _turn(run, review.call_id) if review.call_id is not None else None
    turns = run.turns if turn is None else (turn,)
    learner = next((name for one in turns if (name := _policy(one)) in policies), None)
    values = _others(review, turn, runs, said)
    effect = _effect(review, run, turn, learner, values)
    return ReviewEffect(
        effect=effect,
        policy=learner if effect.startswith("teaches") else None,
        revises=next(
            (one.id for one in said if one.id != review.id and _same_subject(one, review)), None
        ),
        compared_with=len(values),
    )


def _others(
    review: Review, turn: Turn | None, runs: Mapping[str, Trajectory], said: Sequence[Review]
) -> list[float]:
    """What people say of all that the subject of a review is compared with."""
    latest: dict[tuple[str, str | None], dict[str, float | None]] = {}
    for one in sorted(said, key=lambda one: one.at):
        subject = (one.trajectory, one.call_id)
        if one.name != review.name or one.kind == "correction":
            continue
        if subject == (review.trajectory, review.call_id):
            continue
        if (one.call_id is None) != (turn is None):
            continue
        run = runs.get(one.trajectory)
        if turn is not None and (run is None or _node_of(run, one.call_id) != _node(turn)):
            continue
        latest.setdefault(subject, {})[one.reviewer or one.id] = one.value
    given = [[value for value in by.values() if value is not None] for by in latest.values()]
    return [fmean(values) for values in given if values]


def _node(turn: Turn) -> str:
    return "/".join(turn.path) or turn.node or ""


def _node_of(run: Trajectory, call_id: str | None) -> str | None:
    """The node of a call, if it is a step of the run."""
    found = (turn for turn in run.turns if turn.call_id == call_id)
    return next((_node(turn) for turn in found if turn.excluded_because is None), None)


def _effect(
    review: Review, run: Trajectory, turn: Turn | None, learner: str | None, others: list[float]
) -> Effect:
    if review.correction is not None:
        if learner is None:
            return "other_model"
        if turn is None or turn.reply is None:
            return "no_reply"
        same = _said(turn.reply) == _said(review.correction)
        return "unchanged" if same else "teaches_preference"
    if review.name != HUMAN_REWARD:
        return "is_kept"
    if review.value is None:
        return "is_taken_back"
    if learner is None:
        return "other_model"
    if turn is not None and turn.excluded_because is not None:
        return "superseded"
    if run.scenario is None:
        return "no_scenario"
    if not others:
        return "alone"
    return "all_equal" if set(others) == {review.value} else "teaches_reward"


def _turn(run: Trajectory, call_id: str) -> Turn:
    for turn in run.turns:
        if turn.call_id == call_id:
            return turn
    raise NotFound(f"Trajectory {run.id!r} has no call {call_id!r}.")


def _policy(turn: Turn) -> str:
    return (turn.model or "").partition("@")[0] if turn.ours else ""


def _same_subject(one: Review, other: Review) -> bool:
    def subject(review: Review) -> tuple[object, ...]:
        whose = (review.source, review.reviewer, review.trajectory, review.call_id)
        return (*whose, review.name, review.kind)

    return subject(one) == subject(other)


def _said(reply: Message) -> tuple[object, object]:
    return reply.get("content") or "", reply.get("tool_calls") or []
