"""Corrected replies as pairs for preference steps: the correction, and what was sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_art.errors import NotFound
from langchain_art.wire import Message, Review, Trajectory, Turn

if TYPE_CHECKING:
    from langchain_art.client.sync_client import ArtClient

#: Why a correction is not trained on.
REASONS = {
    "gone": "corrections of calls that the server has in no trajectory",
    "no_reply": "corrections of calls that the graph got no reply from",
    "unchanged": "corrections that say what was sampled",
    "revised": "corrections of a call that a later one corrects",
}


@dataclass(frozen=True)
class Corrected:
    """A call whose reply a person corrected."""

    turn: Turn
    """With the whole prompt as its messages, and what was sampled as its reply."""
    reply: Message
    """The correction."""

    @property
    def pair(self) -> tuple[dict[str, Any], Trajectory]:
        """Chosen and rejected, as `ArtClient.prefer` takes them."""
        context = [
            one | {"weight": 0} if one.get("role") == "assistant" else one
            for one in self.turn.messages
        ]
        chosen = {"messages": [*context, self.reply], "tools": list(self.turn.tools)}
        return chosen, Trajectory(id=f"call:{self.turn.call_id}", turns=(self.turn,))


@dataclass(frozen=True)
class Corrections:
    """The corrections that can be trained on, one a call, and why others cannot."""

    calls: tuple[Corrected, ...]
    left_out: Counter[str]
    """Reason (`REASONS`) -> count."""


def read_corrections(client: ArtClient, reviews: Sequence[Review]) -> Corrections:
    """The latest correction of each call, with what the server knows of the call."""
    latest: dict[tuple[str, str], Review] = {}
    left_out: Counter[str] = Counter()
    for one in sorted(reviews, key=lambda review: review.at):
        if one.call_id is not None and one.correction is not None:
            left_out["revised"] += (one.trajectory, one.call_id) in latest
            latest[one.trajectory, one.call_id] = one
    found: list[Corrected] = []
    for (run_id, call_id), one in latest.items():
        turn = _turn(client, run_id, call_id)
        if turn is None:
            left_out["gone"] += 1
        elif turn.reply is None:
            left_out["no_reply"] += 1
        elif _said(turn.reply) == _said(one.correction or {}):
            left_out["unchanged"] += 1
        else:
            found.append(Corrected(turn, one.correction or {}))
    return Corrections(tuple(found), +left_out)


def _turn(client: ArtClient, run_id: str, call_id: str) -> Turn | None:
    """The call as a turn of its own."""
    try:
        run = client.trajectory(run_id)
    except NotFound:  # its calls are tagged with its id, and it has no reward yet
        return None
    for index, turn in enumerate(run.turns):
        if turn.call_id == call_id:
            whole = {"extends": None, "messages": tuple(run.prompt(index)), "reward": None}
            return turn.model_copy(update=whole | {"excluded_because": None})
    return None


def _said(reply: Message) -> tuple[Any, Any]:
    return reply.get("content") or "", reply.get("tool_calls") or []
