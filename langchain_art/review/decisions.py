"""A person's decisions on tool calls (`HumanInTheLoopMiddleware`) as reviews of model calls."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langgraph.types import Interrupt

from langchain_art.errors import ConfigError
from langchain_art.tracing.run import Run
from langchain_art.wire import Review, Trajectory, Turn
from langchain_art.wire.reviews import HUMAN_REWARD

_TYPES = ("approve", "edit", "reject", "respond")


def decision_reviews(
    run: Run | Trajectory,
    interrupts: Sequence[Interrupt],
    resume: Mapping[str, Any],
    *,
    reviewer: str | None = None,
) -> list[Review]:
    """Reviews by a person's decisions at an interrupt, of the calls that asked for the tools.

    ``approve`` of all of a call's tools is the reward 1. ``reject`` of one is the reward 0, with
    its message as the comment. ``edit`` is a correction: the reply with the edited calls, and
    without rejected ones. ``respond``, the tool's result by hand, says nothing of the call.

    Args:
        run: what `capture()` recorded until the interrupt, or later.
        interrupts: ``state["__interrupt__"]``. Others than the middleware's are passed over.
        resume: what ``Command(resume=…)`` was given: ``{"decisions": […]}``; or by the interrupts'
            ids, each one's such mapping, or its single decision (``interrupt_mode="per_call"``).
        reviewer: who decided.

    Returns:
        For `ArtClient.put_reviews`, once the run was sent. The same decision has the same id.

    Raises:
        ConfigError: no interrupt is the middleware's, an interrupt has another number of decisions,
            a decision is none, or no call of the run asked for these tools.

    Example::

        decision = {"decisions": [{"type": "reject", "message": "Not to everyone."}]}
        client.put_reviews(decision_reviews(run, state["__interrupt__"], decision))
    """
    asked = [(one, actions) for one in interrupts if (actions := _actions(one.value))]
    if not asked:
        raise ConfigError(
            f"got {len(interrupts)} interrupts of which none asks for a decision on a tool call, "
            'expected state["__interrupt__"] of a graph with HumanInTheLoopMiddleware'
        )
    decided: dict[int, dict[int, Mapping[str, Any]]] = {}
    for interrupt, actions in reversed(asked):  # of equal calls, the later one is the later task's
        decisions = _decisions(interrupt, resume, len(asked), len(actions))
        at, places = _place(run.turns, actions, decided)
        decided.setdefault(at, {}).update(zip(places, decisions, strict=True))
    return [
        review
        for at, by_place in sorted(decided.items())
        for review in _reviews(run.id, run.turns[at], dict(sorted(by_place.items())), reviewer)
    ]


def _actions(value: Any) -> list[Mapping[str, Any]]:
    """The tool calls that an interrupt asks about; empty if it is not the middleware's."""
    if not isinstance(value, Mapping):
        return []
    return [value] if value.get("type") == "tool_approval" else value.get("action_requests", [])


def _decisions(
    interrupt: Interrupt, resume: Mapping[str, Any], interrupts: int, count: int
) -> list[Mapping[str, Any]]:
    answer = resume.get(interrupt.id, resume if interrupts == 1 else None)
    found = answer.get("decisions", [answer]) if isinstance(answer, Mapping) else []
    kinds = [one.get("type") if isinstance(one, Mapping) else one for one in found]
    if len(kinds) != count or not set(kinds) <= set(_TYPES):
        raise ConfigError(
            f"got resume={resume!r:.300}, expected for the interrupt {interrupt.id} "
            f"{count} decision{'' if count == 1 else 's'} of the types {', '.join(_TYPES)}"
        )
    return found


def _place(
    turns: Sequence[Turn],
    actions: Sequence[Mapping[str, Any]],
    decided: Mapping[int, Mapping[int, Any]],
) -> tuple[int, list[int]]:
    """The latest turn that asked for these tools, and which of its tool calls not `decided` yet."""
    for at in reversed(range(len(turns))):
        calls = [
            one for one in enumerate(_tool_calls(turns[at])) if one[0] not in decided.get(at, ())
        ]
        left, places = iter(calls), list[int]()
        for action in actions:  # in the order of the reply
            places += next(([k] for k, one in left if _is(one, action)), [])
        kept = turns[at].call_id and turns[at].excluded_because is None
        if kept and len(places) == len(actions):
            return at, places
    names = [action["name"] for action in actions]
    raise ConfigError(
        f"got decisions on the tools {names}, which none of the {len(turns)} calls of the run "
        "asked for: pass the run that was captured until the interrupt"
    )


def _tool_calls(turn: Turn) -> list[dict[str, Any]]:
    return list((turn.reply or {}).get("tool_calls") or [])


def _is(tool_call: Mapping[str, Any], action: Mapping[str, Any]) -> bool:
    if "tool_call_id" in action:
        return tool_call.get("id") == action["tool_call_id"]
    said = tool_call["function"]
    return said["name"] == action["name"] and _read(said["arguments"]) == action["args"]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:  # no call that a tool was asked for
        return None


def _reviews(
    run: str, turn: Turn, decided: Mapping[int, Mapping[str, Any]], reviewer: str | None
) -> Iterator[Review]:
    key = json.dumps([run, turn.call_id, sorted(decided)])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    about: dict[str, Any] = {
        "source": "interrupt",
        "trajectory": run,
        "call_id": turn.call_id,
        "name": HUMAN_REWARD,
        "reviewer": reviewer,
        "at": time.time(),
    }
    by_type = {kind: [d for d in decided.values() if d["type"] == kind] for kind in _TYPES}
    if by_type["reject"]:
        said = "\n".join(str(one["message"]) for one in by_type["reject"] if one.get("message"))
        value, comment = 0.0, said or None
        yield Review(id=f"{name}-reward", kind="reward", value=value, comment=comment, **about)
    elif by_type["approve"] and not by_type["edit"]:
        yield Review(id=f"{name}-reward", kind="reward", value=1.0, **about)
    if by_type["edit"]:
        calls = [
            _edited(tool_call, decision)
            for place, tool_call in enumerate(_tool_calls(turn))
            if (decision := decided.get(place, {})).get("type") != "reject"
        ]
        reply = {**(turn.reply or {}), "tool_calls": calls}
        yield Review(id=f"{name}-correction", kind="correction", correction=reply, **about)


def _edited(tool_call: dict[str, Any], decision: Mapping[str, Any]) -> dict[str, Any]:
    if decision.get("type") != "edit":
        return tool_call
    action = decision["edited_action"]
    arguments = json.dumps(action["args"], ensure_ascii=False)
    function = {**tool_call["function"], "name": action["name"], "arguments": arguments}
    return {**tool_call, "function": function}
