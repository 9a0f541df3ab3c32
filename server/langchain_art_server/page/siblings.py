"""Runs of one group side by side: what each said, why it was scored so, and where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any

from pydantic import BaseModel

from langchain_art.wire import Trajectory, Turn
from langchain_art_server.storage.run_index import text_of
from langchain_art_server.storage.run_list import RunSummary

#: Characters of one reply that are sent; the run's own page has all.
MAX_REPLY = 2000
#: The key of `Trajectory.metadata` under which evaluators put why they gave a score.
_JUDGED = "judged"


class SiblingTurn(BaseModel):
    """One call of a run of a group."""

    call_id: str | None
    node: str | None
    reply: str
    """The first `MAX_REPLY` characters of what it said, tool calls included."""
    characters: int
    """Characters of the whole reply."""
    excluded_because: str | None
    reward: float | None


class Parting(BaseModel):
    """Place where a run stops being the same as the one that it is compared with."""

    turn: int
    """The first call that differs, counted from 0: in node or reply, or one has no such call."""
    characters: int
    """Number of characters that the two replies share."""


class Sibling(BaseModel):
    """One run of a group."""

    summary: RunSummary
    judged: dict[str, str]
    """Explanation of the score, by evaluator."""
    turns: list[SiblingTurn]
    parts: Parting | None
    """Parting from the run that was asked for; None: it does not, or it is that run."""


class Siblings(BaseModel):
    """The runs of a group, in the order in which they came."""

    of: str
    """The run that the others are compared with."""
    runs: list[Sibling]


def compare(of: str, summaries: Sequence[RunSummary], runs: Mapping[str, Trajectory]) -> Siblings:
    """The runs of `summaries`, each compared with `of`, which is one of them."""
    mine = runs[of]
    return Siblings(
        of=of,
        runs=[
            Sibling(
                summary=one,
                judged=explanations(runs[one.id]),
                turns=[_turn(turn) for turn in runs[one.id].turns],
                parts=None if one.id == of else parting(mine, runs[one.id]),
            )
            for one in summaries
            if one.id in runs  # else it was deleted meanwhile
        ],
    )


def parting(one: Trajectory, other: Trajectory) -> Parting | None:
    """Place where two runs part, call by call; None: they have the same nodes and replies."""
    for index, (mine, its) in enumerate(zip_longest(one.turns, other.turns)):
        if mine is None or its is None:
            return Parting(turn=index, characters=0)
        said, says = _said(mine), _said(its)
        if said != says or mine.node != its.node:
            pairs = zip(said, says, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            return Parting(turn=index, characters=same)
    return None


def explanations(run: Trajectory) -> dict[str, str]:
    """Explanations that evaluators gave with their scores, as far as they are text."""
    judged: Any = run.metadata.get(_JUDGED)
    if not isinstance(judged, dict):
        return {}
    known: dict[Any, Any] = judged
    return {str(name): why for name, why in known.items() if isinstance(why, str) and why}


def _said(turn: Turn) -> str:
    return text_of(turn.reply) if turn.reply else ""


def _turn(turn: Turn) -> SiblingTurn:
    said = _said(turn)
    return SiblingTurn(
        call_id=turn.call_id,
        node=turn.node,
        reply=said[:MAX_REPLY],
        characters=len(said),
        excluded_because=turn.excluded_because,
        reward=turn.reward,
    )
