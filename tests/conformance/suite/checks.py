"""The five promises, each checked against what a witness saw: the table's columns.

Each check raises `NotHeld` with the reason, or `CannotBeChecked` with what is missing.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any
from uuid import uuid4

from langchain_art.evaluators import score_groups
from langchain_art.wire import TrainConfig, TrajectoryAudit, TrajectoryGroup, Turn
from tests.conformance.suite.harness import Expect
from tests.conformance.suite.model import TWINS
from tests.conformance.suite.outcomes import CannotBeChecked, NotHeld, holds, same
from tests.conformance.suite.performance import Performance


def captured(seen: Performance) -> None:
    """The turns are what the program did; the calls made are in them once, and none besides."""
    case, turns = seen.case, seen.trajectory.turns
    told = [_told(turn) for turn in turns]
    wanted = [_wanted(expect, seen) for expect in case.expects]
    if not case.ordered:
        told, wanted = _sorted(told), _sorted(wanted)
    same("the number of turns", len(told), len(wanted))
    for index, (one, other) in enumerate(zip(told, wanted, strict=True)):
        same(f"turn {index}", _differing(one, other), _differing(other, one))
    same(f"the run's status (error: {seen.trajectory.error})", seen.trajectory.status, case.status)
    same("what was not captured", seen.trajectory.metadata.get("not_captured"), None)

    ids = Counter(turn.call_id for turn in turns if turn.ours and turn.call_id)
    same("the ids of the turns' calls", dict(ids), dict.fromkeys(seen.witnessed, 1))
    _tasks_are_told_apart(seen)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What a turn says, and of the rest what is not as expected."""
    return {k: v for k, v in one.items() if k in ("path", "says") or v != other[k]}


def _tasks_are_told_apart(seen: Performance) -> None:
    namespaces: dict[str, list[str | None]] = {}
    for turn in seen.trajectory.turns:
        namespaces.setdefault(_key(_told(turn)), []).append(turn.namespace)
    tasks: dict[str, set[str | None]] = {}
    for number, expect in enumerate(seen.case.expects):
        namespace = namespaces[_key(_wanted(expect, seen))].pop(0)
        same(f"call {number} is outside of a graph", namespace is None, expect.path == "")
        if namespace is not None:
            tasks.setdefault(expect.task or f"call {number}", set()).add(namespace)
    holds(all(len(found) == 1 for found in tasks.values()), f"one task, two namespaces: {tasks}")
    apart = len(set[str | None]().union(*tasks.values())) == len(tasks)
    holds(apart, f"two tasks have one namespace: {tasks}")


def _told(turn: Turn) -> dict[str, Any]:
    return {
        "path": "/".join(turn.path),
        "says": says(turn),
        "step": turn.step,
        "node": turn.node,
        "attempt": turn.attempt,
        "excluded_because": turn.excluded_because,
        "ours": turn.ours,
        "tags": turn.tags,
        "thread": turn.thread,
    }


def _wanted(expect: Expect, seen: Performance) -> dict[str, Any]:
    why = expect.why or ""
    threaded = seen.case.threaded if expect.threaded is None else expect.threaded
    return {
        "path": expect.path,
        "says": expect.says,
        "step": expect.step,
        "node": expect.node or expect.path.rpartition("/")[2] or None,
        "attempt": expect.attempt,
        "excluded_because": why.removeprefix("superseded_")
        if why.startswith("superseded_")
        else None,
        "ours": why != "foreign",
        "tags": expect.tags,
        "thread": seen.thread if threaded else None,
    }


def _key(one: dict[str, Any]) -> str:
    return json.dumps(one, sort_keys=True)


def _sorted(all: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(all, key=_key)


def says(turn: Turn) -> str:
    """The reply's text, or the names of the tools it calls."""
    reply = turn.reply or {}
    calls = [call["function"]["name"] for call in reply.get("tool_calls") or ()]
    return _text(reply.get("content")) or ", ".join(calls)


def exact_tokens(seen: Performance) -> None:
    """The server's record of each call is what the witness saw, bit for bit."""
    for id, call in seen.witnessed.items():
        record = seen.record(id)
        if call.sampled is None:
            raise CannotBeChecked("the answers carry neither token ids nor log-probabilities")
        for name in ("prompt_token_ids", "token_ids", "logprobs"):
            if (known := getattr(call, name)) is not None:
                same(f"{name} of the record of {id}", record.get(name), known)
        same(f"the record's messages of {id}", record["request"]["messages"], call.messages)
        owner = record["tags"].get("trajectory_id")
        same(f"the run that {id} is tagged with", owner, seen.trajectory.id)


def really_sampled(seen: Performance) -> None:
    """The recorded ids are the sampled ones, not those of a reply that was tokenised again.

    Half of the sampled bytes are twins, which no tokenizer gives (`model`). Without a twin among
    as many bytes, the record is wrong; sampling does that once in 2^32.
    """
    said: list[int] = []
    for call in seen.witnessed:
        record = seen.record(call)
        asked = record["request"]
        free = asked.get("tool_choice") in (None, "auto", "none")
        if free and not asked.get("response_format"):  # under a grammar, twins are never drawn
            said += [id_ for id_ in record["token_ids"] if id_ < TWINS.stop]
    if len(said) >= 32 and not any(id_ in TWINS for id_ in said):
        raise NotHeld(
            f"none of {len(said)} recorded tokens is a twin, expected about half of them: the "
            "replies were tokenised again, and these are not the tokens that were sampled"
        )


def audited(seen: Performance, policy: str) -> TrajectoryAudit:
    """The server says of each stored turn what the topology expects: trained whole, or why not."""
    trajectory = seen.trajectory
    if seen.case.heard != "server":
        seen.client.post_trajectory(trajectory)
    audit = seen.client.audit(trajectory.id, policy)
    same("the number of audited turns", len(audit.turns), len(trajectory.turns))
    for index, (turn, told) in enumerate(zip(trajectory.turns, audit.turns, strict=True)):
        learns = trains(turn, seen)
        call = seen.witnessed.get(turn.call_id or "")
        whole = 0 if call is None else sampled(call.sampled)
        same(f"trained tokens of turn {index}", told.trained_tokens, whole if learns else 0)
        if learns:
            same(f"why turn {index} is excluded", told.excluded_because, None)
        else:
            holds(
                told.excluded_because in seen.case.excluded,
                f"why turn {index} is excluded: got {told.excluded_because}, expected one of "
                f"{sorted(seen.case.excluded)}",
            )
    reasons = Counter(told.excluded_because for told in audit.turns if told.excluded_because)
    same("the reasons for turns that are excluded", dict(reasons), dict(seen.case.excluded))
    return audit


def sampled(count: int | None) -> int:
    """How many tokens the witness saw sampled. Raises CannotBeChecked if it did not see."""
    if count is None:
        raise CannotBeChecked("the answers do not tell how many tokens were sampled")
    return count


def trains(turn: Turn, seen: Performance) -> bool:
    """By what the topology expects, not by what the server thinks."""
    return any(
        expect.why is None and _wanted(expect, seen) == _told(turn) for expect in seen.case.expects
    )


def judged(seen: Performance) -> None:
    """The transcript gives back every prompt and reply as they were sent."""
    trajectory = seen.trajectory
    for index, turn in enumerate(trajectory.turns):
        call = seen.witnessed.get(turn.call_id or "")
        if call is not None:
            same(f"the prompt of turn {index}", trajectory.prompt(index), call.messages)
            same(f"the reply of turn {index}", _said(turn.reply), _said(seen.reply(call.id)))

    def reads(group: TrajectoryGroup) -> list[float]:
        run = group.trajectories[0]
        whole = [[*run.prompt(i), turn.reply] for i, turn in enumerate(run.turns)]
        return [float(len(json.dumps(whole)))]

    group = TrajectoryGroup(id="judged", trajectories=(trajectory,))
    outcome = asyncio.run(score_groups([group], reads))
    if trajectory.status != "failed":
        holds(outcome.groups[0].trajectories[0].reward, "an evaluator's score is not the run's")


def _said(message: dict[str, Any] | None) -> tuple[Any, Any]:
    """What a reply says, whatever it was signed with or cut into."""
    if message is None:
        raise NotHeld("a call that was answered has no reply")
    return _text(message.get("content")), message.get("tool_calls") or []


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content)
    return content or ""


def trained(first: Performance, second: Performance, policy: str, gap: float = 2e-5) -> None:
    """Two runs train, node by node, and what is excluded is counted with its reason.

    Args:
        first: rewarded 0.
        second: rewarded 1.
        policy: what learns.
        gap: most nats between learner and sampler, mean of the tokens. In float32, replies behind
            a deep agent's prompt of 7,000 tokens have up to 1.2e-5.
    """
    case = first.case
    runs = (first.trajectory, second.trajectory)
    group = TrajectoryGroup(id=uuid4().hex, trajectories=runs)
    small = TrainConfig(learning_rate=2e-5)  # the policy is to go on saying what its scripts say
    result = first.client.wait(first.client.train([group], policy, small, key=uuid4().hex))
    excluded = Counter({f"calls.{why}": 2 * count for why, count in case.excluded.items()})
    if not case.trained:
        excluded["runs.without_trainable_calls"] = 2
        if set(case.excluded) <= {"foreign", "other_policy"}:  # the policy had no part in it
            excluded["groups.empty"] = 1
    same("what the step excludes", dict(result.excluded), dict(excluded))
    same("calls_trained", result.metrics["calls_trained"], 2 * case.trained)
    for path in {expect.path for expect in case.expects}:
        whys = [expect.why for expect in case.expects if expect.path == path]
        report = result.nodes[path or "-"]
        same(f"trained calls of {path!r}", report.calls, 2 * whys.count(None))
        left = {why: 2 * whys.count(why) for why in set(whys) if why}
        same(f"excluded calls of {path!r}", dict(report.excluded), left)
    if case.trained:
        whole = sum(
            sampled(seen.witnessed[turn.call_id].sampled)
            for seen in (first, second)
            for turn in seen.trajectory.turns
            if turn.call_id and trains(turn, seen)
        )
        same("tokens_trained", result.metrics["tokens_trained"], whole)
        same("tokens of the nodes", sum(node.tokens for node in result.nodes.values()), whole)
        apart = result.metrics["logprob_gap_mean"]
        holds(apart <= gap, f"learner and sampler differ by {apart} nats, expected {gap} at most")
