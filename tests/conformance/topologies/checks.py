"""The five promises, each checked against the engine's journal: the table's columns."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any
from uuid import uuid4

from langchain_art.evaluators import score_groups
from langchain_art.wire import TrajectoryGroup, Turn
from langchain_art_server.algorithms.sequences.training_rows import Row, SampledCall, rows_of_run
from tests.conformance.topologies.harness import Expect, Performance


def captured(seen: Performance) -> None:
    """The turns are what the program did; the engine's calls are in them once, and none besides."""
    case, turns = seen.case, seen.trajectory.turns
    told = [_told(turn) for turn in turns]
    wanted = [_wanted(expect, seen) for expect in case.expects]
    if not case.ordered:
        told, wanted = _sorted(told), _sorted(wanted)
    assert told == wanted, [(t["path"], t["says"], t["step"]) for t in told]
    assert seen.trajectory.status == case.status, seen.trajectory.error
    assert seen.trajectory.metadata.get("not_captured") is None

    ids = Counter(turn.call_id for turn in turns if turn.ours and turn.call_id)
    assert ids == Counter(list(seen.journal))
    _tasks_are_told_apart(seen)


def _tasks_are_told_apart(seen: Performance) -> None:
    namespaces: dict[str, list[str | None]] = {}
    for turn in seen.trajectory.turns:
        namespaces.setdefault(_key(_told(turn)), []).append(turn.namespace)
    tasks: dict[str, set[str | None]] = {}
    for number, expect in enumerate(seen.case.expects):
        namespace = namespaces[_key(_wanted(expect, seen))].pop(0)
        assert (namespace is None) == (expect.path == "")
        if namespace is not None:
            tasks.setdefault(expect.task or f"call {number}", set()).add(namespace)
    assert all(len(found) == 1 for found in tasks.values()), f"one task, two namespaces: {tasks}"
    assert len(set.union(set(), *tasks.values())) == len(tasks), f"tasks share one: {tasks}"


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
    """The server's record of each call is the journal's, bit for bit."""
    for id, line in seen.journal.items():
        record = seen.records[id]
        for name in ("prompt_token_ids", "token_ids", "logprobs"):
            assert record[name] == line[name], (id, name)
        assert record["request"]["messages"] == line["messages"]
        assert record["tags"]["trajectory_id"] == seen.trajectory.id


def each_token_once(seen: Performance) -> None:
    """Rows hold every sampled token of every call that may train, once, after what it was shown."""
    rows_of_turns(seen)


def audited(seen: Performance, policy: str) -> None:
    """The server says of each stored turn what the topology expects: trained whole, or why not."""
    trajectory = seen.trajectory
    if seen.case.heard != "server":
        seen.client.post_trajectory(trajectory)
    audit = seen.client.audit(trajectory.id, policy)
    for turn, told in zip(trajectory.turns, audit.turns, strict=True):
        line = seen.journal.get(turn.call_id or "")
        whole = 0 if line is None else len(line["token_ids"])
        assert told.trained_tokens == (whole if _trains(turn, seen) else 0)
        assert told.excluded_because is None or told.excluded_because in seen.case.excluded
        assert (told.excluded_because is None) == _trains(turn, seen)
    assert (
        Counter(told.excluded_because for told in audit.turns if told.excluded_because)
        == seen.case.excluded
    )
    assert audit.rows == len(rows_of_turns(seen))


def rows_of_turns(seen: Performance) -> list[Row]:
    """The run's rows by the server's own algorithm, out of the journal; checked token by token."""
    learns = {turn.call_id for turn in seen.trajectory.turns if _trains(turn, seen)}
    calls = [
        SampledCall(
            call_id=turn.call_id,
            prompt_token_ids=line["prompt_token_ids"],
            token_ids=line["token_ids"],
            logprobs=line["logprobs"],
            temperature=seen.records[line["id"]]["temperature"],
            advantage=1.0,
        )
        for turn in seen.trajectory.turns
        if turn.call_id in learns and (line := seen.journal.get(turn.call_id or ""))
    ]
    rows = rows_of_run(calls)
    free = [[bool(trained) for trained in row.mask] for row in rows]
    for call in calls:
        shown, both = len(call.prompt_token_ids), [*call.prompt_token_ids, *call.token_ids]
        here = slice(shown, len(both))
        holding = [
            index
            for index, row in enumerate(rows)
            if row.token_ids[: len(both)] == both
            and row.logprobs[here] == list(call.logprobs)
            and all(free[index][here])
        ]
        assert holding, f"no row holds {call.call_id}"
        free[holding[0]][here] = [False] * len(call.token_ids)
    assert not any(any(row) for row in free), "a token is trained that nothing sampled"
    return rows


def _trains(turn: Turn, seen: Performance) -> bool:
    """By what the topology expects, not by what the server thinks."""
    return any(
        expect.why is None and _wanted(expect, seen) == _told(turn) for expect in seen.case.expects
    )


def judged(seen: Performance) -> None:
    """The transcript gives back every prompt and reply as the engine had them."""
    trajectory = seen.trajectory
    for index, turn in enumerate(trajectory.turns):
        line = seen.journal.get(turn.call_id or "")
        if line is not None:
            assert trajectory.prompt(index) == line["messages"]
            assert _said(turn.reply) == _said(seen.records[line["id"]]["reply"])

    def reads(group: TrajectoryGroup) -> list[float]:
        run = group.trajectories[0]
        whole = [[*run.prompt(i), turn.reply] for i, turn in enumerate(run.turns)]
        return [float(len(json.dumps(whole)))]

    group = TrajectoryGroup(id="judged", trajectories=(trajectory,))
    outcome = asyncio.run(score_groups([group], reads))
    if trajectory.status != "failed":
        assert outcome.groups[0].trajectories[0].reward


def _said(message: dict[str, Any] | None) -> tuple[Any, Any]:
    """What a reply says, whatever it was signed with or cut into."""
    assert message is not None
    return _text(message["content"]), message.get("tool_calls") or []


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content)
    return content or ""


def trained(first: Performance, second: Performance, policy: str) -> None:
    """Two runs train, node by node, and what is excluded is counted with its reason."""
    case = first.case
    runs = (first.trajectory, second.trajectory)
    group = TrajectoryGroup(id=uuid4().hex, trajectories=runs)
    result = first.client.wait(first.client.train([group], policy, key=uuid4().hex))
    excluded = Counter({f"calls.{why}": 2 * count for why, count in case.excluded.items()})
    if not case.trained:
        excluded["runs.without_trainable_calls"] = 2
        if set(case.excluded) <= {"foreign", "other_policy"}:  # the policy had no part in it
            excluded["groups.empty"] = 1
    assert Counter(result.excluded) == excluded
    assert result.metrics["calls_trained"] == 2 * case.trained
    for path in {expect.path for expect in case.expects}:
        whys = [expect.why for expect in case.expects if expect.path == path]
        report = result.nodes[path or "-"]
        assert report.calls == 2 * whys.count(None)
        assert report.excluded == {why: 2 * whys.count(why) for why in set(whys) if why}
    if case.trained:
        sampled = sum(
            len(seen.journal[turn.call_id]["token_ids"])
            for seen in (first, second)
            for turn in seen.trajectory.turns
            if turn.call_id and _trains(turn, seen)
        )
        assert result.metrics["tokens_trained"] == sampled
        assert sum(report.tokens for report in result.nodes.values()) == sampled
        assert result.metrics["logprob_gap_mean"] <= 1e-5
