from typing import Any

import pytest

from langchain_art.wire import TrainConfig, TrainRequest, Trajectory, Turn
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.eligibility import check_eligibility, steps_since
from langchain_art_server.storage.tables import CallRecord
from tests.support.call_records import record


def turn(call_id: str | None, node: str = "writer", **changes: Any) -> Turn:
    return Turn(call_id=call_id, node=node, model="p@0", **changes)


def batch_of(
    runs: dict[str, tuple[float, list[Turn]]],
    records: list[CallRecord],
    trainable: dict[str, bool] | None = None,
    policy: str = "p",
    base: int = 0,
    parents: dict[int, int] | None = None,
    **config: Any,
) -> Batch:
    request = TrainRequest(
        policy=policy,
        groups=(tuple(runs),),
        trainable=trainable or {},
        config=TrainConfig(**({"advantage": "mean"} | config)),
    )
    batch = Batch(request, base, parents or {})
    scored = [
        Trajectory(id=i, turns=tuple(turns), reward=reward) for i, (reward, turns) in runs.items()
    ]
    batch.add_group(scored, {one.id: one for one in records})
    batch.settle()
    return batch


def advantages(batch: Batch) -> list[float]:
    return [max(row.advantages, key=abs) for row in batch.rows]


@pytest.mark.parametrize(
    ("one", "known", "policy", "trainable", "why"),
    [
        (turn("c"), record("c"), "p", {}, None),
        (turn("c"), record("c"), None, {}, None),
        (turn("c", excluded_because="retried"), record("c"), "p", {}, "superseded_retried"),
        (turn("c", ours=False), None, "p", {"writer": False}, "foreign"),
        (turn("c"), None, "p", {}, "lost"),
        (turn("c"), None, "p", {"writer": False}, "frozen"),
        (turn("c"), record("c"), "q", {}, "other_policy"),
        (turn("c"), record("c", policy=None), "p", {}, "other_policy"),
        (turn("c"), record("c", policy=None), None, {}, "other_policy"),
        (turn("c"), record("c", policy="q"), None, {}, None),
        (turn("c"), record("c"), "p", {"critic": True}, "frozen"),
        (turn("c"), record("c"), "p", {"critic": False}, None),
        (turn("c", tags=("x",)), record("c"), "p", {"x": True, "p": True}, None),
        (turn("c"), record("c", excluded_because="top_p: 0.9 < 1"), "p", {}, "top_p"),
        (turn("c"), record("c", excluded_because="top_p: 0.9 < 1"), "p", {"p": False}, "frozen"),
        (turn("c"), record("c", said=()), "p", {}, "empty"),
    ],
)
def test_why_a_call_does_not_learn(
    one: Turn,
    known: CallRecord | None,
    policy: str | None,
    trainable: dict[str, bool],
    why: str | None,
) -> None:
    records = {known.id: known} if known else {}
    (judged,) = check_eligibility(Trajectory(id="t", turns=(one,)), records, policy, trainable)
    assert judged.excluded_because == why


def test_a_reply_that_was_used_twice_learns_where_it_first_counts() -> None:
    thrice = (turn("c", excluded_because="error"), turn("c"), turn("c", "critic"))
    judged = check_eligibility(Trajectory(id="t", turns=thrice), {"c": record("c")}, "p", {})
    assert [one.excluded_because for one in judged] == ["superseded_error", None, "repeated"]
    judged = check_eligibility(
        Trajectory(id="t", turns=thrice), {"c": record("c")}, "p", {"writer": False}
    )
    assert [one.excluded_because for one in judged] == ["superseded_error", "frozen", None]


@pytest.mark.parametrize(
    ("fate", "known"),
    [
        ({}, None),  # lost
        ({"excluded_because": "error"}, record("c-2")),
        ({}, record("c-2", excluded_because="grammar: json_schema")),
    ],
)
def test_a_run_that_the_policy_made_counts_though_no_token_of_it_can_learn(
    fate: dict[str, Any], known: CallRecord | None
) -> None:
    records = [record("c-0"), record("c-1"), *([known] if known else [])]
    runs = {
        "a": (1.0, [turn("c-0")]),
        "b": (1.0, [turn("c-1")]),
        "c": (0.25, [turn("c-2", **fate)]),
    }
    batch = batch_of(runs, records)
    assert advantages(batch) == [0.25, 0.25]  # flat without the third
    assert batch.excluded["runs.without_trainable_calls"] == 1
    assert batch.metrics["reward_mean"] == 0.75
    frozen = batch_of(runs, records, {"writer": False})
    assert frozen.excluded["groups.empty"] == 1 and not frozen.rows
    assert frozen.excluded["runs.without_trainable_calls"] == 3


def test_what_the_config_decides_reaches_the_rows() -> None:
    records = [record(f"c-{i}", prompt=(9, i), said=(2,) * (i + 1)) for i in range(4)]
    runs = {
        "a": (1.0, [turn("c-0", reward=1.0), turn("c-1", "critic")]),
        "b": (
            0.0,
            [turn("c-2"), turn("c-3", "critic"), turn("c-0", excluded_because="error", reward=9)],
        ),
    }
    by_run = batch_of(runs, records, loss={"kind": "clip", "aggregation": "run"})
    assert advantages(by_run) == [1.0, 1.0, -1.0, -1.0]  # 2 and 0: what was thrown away is nothing
    assert [max(row.weights) for row in by_run.rows] == [1 / 6, 1 / 6, 1 / 14, 1 / 14]
    by_node = batch_of(runs, records, credit="node", advantage="maxrl")
    assert advantages(by_node) == [1.0, 1.0, -1.0, -1.0]
    by_node = batch_of(runs, records, credit="node")
    assert advantages(by_node) == [1.0, 0.5, -1.0, -0.5]
    old = batch_of(runs, records, base=9)
    assert old.excluded == {"groups.stale": 1} and not old.rows
    assert batch_of(runs, records, base=8).metrics["staleness_mean"] == 8.0


def test_staleness_is_counted_along_the_parents_of_versions() -> None:
    """Versions 0, 1, 2; a rollback to 1; then 9, made from 1, and 10."""
    parents = {1: 0, 2: 1, 9: 1, 10: 9}

    def sampled_by(version: int, base: int, **config: Any) -> Batch:
        records = [record(f"c-{i}", version=version) for i in range(2)]
        runs = {str(i): (float(i), [turn(f"c-{i}")]) for i in range(2)}
        return batch_of(runs, records, base=base, parents=parents, **config)

    for version, steps in ((10, 0), (9, 1), (1, 2), (0, 3)):
        assert sampled_by(version, 10).metrics["staleness_mean"] == steps
    assert sampled_by(0, 10, max_staleness=2).excluded == {"groups.stale": 1}
    for version, base in ((2, 10), (2, 1), (9, 1), (9, 2)):
        discarded = sampled_by(version, base, max_staleness=None)
        assert discarded.excluded == {"groups.rolled_back": 1} and not discarded.rows
    with pytest.raises(ValueError, match="got 2 as the parent of version 2"):
        steps_since({2: 2}, 2)


def test_states_are_prompts() -> None:
    records = [record(f"c-{i}", prompt=(9, i % 2)) for i in range(4)]
    runs = {
        "a": (1.0, [turn("c-0"), turn("c-1")]),
        "b": (1.0, [turn("c-2")]),
        "c": (1.0, [turn("c-3")]),
    }
    found = batch_of(runs, records, credit={"kind": "anchor", "discount": 0.5})
    assert advantages(found) == [-0.25, 0.25]
    assert found.excluded == {"calls.zero_variance": 2, "runs.without_trainable_calls": 1}


def test_a_call_is_trained_once_in_a_batch_and_never_after_an_earlier_job() -> None:
    request = TrainRequest(policy="p", groups=(("a", "b"), ("c", "d")))
    records = {name: record(name) for name in ("shared", "own", "old", "late")}
    batch = Batch(request, 0)

    def run(name: str, reward: float, *calls: str) -> Trajectory:
        return Trajectory(id=name, reward=reward, turns=tuple(turn(call) for call in calls))

    batch.add_group([run("a", 1.0, "shared"), run("b", 0.0, "own")], records)
    batch.add_group([run("c", 1.0, "shared", "old"), run("d", 0.0, "late")], records, {"old"})
    batch.settle()
    assert [one.id for one in batch.calls] == ["shared", "own", "late"]
    why = {"calls.repeated": 1, "calls.already_trained": 1, "runs.without_trainable_calls": 1}
    assert batch.excluded == why
    assert batch.trained == ["a", "b", "d"]


@pytest.mark.parametrize("apart", [False, True], ids=["a group", "two groups"])
def test_a_reply_of_several_runs_is_trained_where_the_first_of_them_is_left_out(
    apart: bool,
) -> None:
    """Whatever the order: of run a, a judge failed, or all of its group are worth the same."""
    a = [Trajectory(id="a", turns=(turn("plan"),), reward=1.0 if apart else None)]
    b = [
        Trajectory(id="b", turns=(turn("plan"), turn("b1")), reward=1.0),
        Trajectory(id="c", turns=(turn("c1"),), reward=0.0),
    ]
    alike = [*a, Trajectory(id="d", turns=(turn("d1"),), reward=1.0)]
    for groups in ([alike, b], [b, alike]) if apart else ([a + b], [b + a]):
        ids = tuple(tuple(run.id for run in group) for group in groups)
        batch = Batch(TrainRequest(policy="p", groups=ids), 0)
        for group in groups:
            names = [one.call_id or "" for run in group for one in run.turns]
            batch.add_group(group, {name: record(name) for name in names})
        batch.settle()
        assert {one.id for one in batch.calls} == {"plan", "b1", "c1"}
        assert len(batch.rows) == 3
