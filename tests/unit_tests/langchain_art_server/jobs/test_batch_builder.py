from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art.wire import TrainConfig, TrainRequest, Trajectory, Turn
from langchain_art_server.jobs.audit import audit
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.jobs.eligibility import check_eligibility, steps_since
from langchain_art_server.storage.tables import CallRecord, StoredRun
from tests.support.call_records import record
from tests.support.call_trees import common, sampled_tokens, trained_tokens, trees_of_calls
from tests.support.soak import count


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


def test_what_was_sampled_is_counted_whether_it_is_trained_or_not() -> None:
    records = [
        record("a", said=(1, 2, 3)),
        record("b", said=(1, 2), finish_reason="length"),
        record("c", said=(1,), excluded_because="greedy_decoding"),
        record("q", said=(1, 2, 3, 4), policy="q"),
    ]
    shared = turn("a")  # one call in two runs is one call
    runs = {"s": (1.0, [shared, turn("b")]), "t": (0.0, [shared, turn("c"), turn("q")])}
    metrics = batch_of(runs, records).metrics
    assert metrics["tokens_sampled"] == 6
    assert metrics["truncated_share"] == pytest.approx(1 / 3)
    assert "rollout_seconds" not in metrics


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


def stored(*turns: Turn) -> StoredRun:
    return StoredRun(Trajectory(id="t", turns=turns, reward=1.0), False, {"p": "job-1"})


Runs = tuple[list[Turn], dict[str, CallRecord]]


@st.composite
def runs(draw: st.DrawFn, name: str) -> Runs:
    """A run over a random tree of calls: some lost, foreign, superseded, frozen, repeated …"""
    turns: list[Turn] = []
    records: dict[str, CallRecord] = {}
    for call in draw(trees_of_calls()):
        fate = draw(
            st.sampled_from(["", "", "", "", "excluded_because", "lost", "foreign", "again"])
        )
        key = f"{name}-{call.call_id}"
        policy = draw(st.sampled_from(["p", "p", "p", "q", None]))
        if fate not in ("lost", "foreign"):
            records[key] = record(
                key,
                call.prompt_token_ids,
                call.token_ids,
                logprobs=list(call.logprobs),
                temperature=call.temperature,
                policy=policy,
                excluded_because=draw(st.sampled_from([None] * 6 + ["grammar: x", "top_p: 0.5"])),
            )
        turn = Turn(
            call_id=key,
            node=draw(st.sampled_from(["writer", "critic", None])),
            path=draw(st.sampled_from([(), ("team", "writer")])),
            model=policy and f"{policy}@0",
            ours=fate != "foreign",
            excluded_because="retried" if fate == "excluded_because" else None,
        )
        turns += [turn] * (2 if fate == "again" else 1)
    return turns, records


CHOICES = st.dictionaries(
    st.sampled_from(["writer", "critic", "team", "p", "q@0"]), st.booleans(), max_size=3
)


@pytest.mark.soak
@settings(max_examples=count(40, 2000), deadline=None)
@given(runs("a"), runs("b"), CHOICES)
def test_audit_and_training_agree_on_any_run(
    one: Runs, other: Runs, trainable: dict[str, bool]
) -> None:
    records = one[1] | other[1]
    trajectories = [
        Trajectory(id=name, turns=tuple(turns), reward=reward)
        for name, (turns, _), reward in (("a", one, 1.0), ("b", other, 0.0))
    ]
    batch = Batch(TrainRequest(policy="p", groups=(("a", "b"),), trainable=trainable), 0)
    batch.add_group(trajectories, records)
    audits = [audit(StoredRun(t, False, {}), records, "p", trainable) for t in trajectories]
    for told, trajectory in zip(audits, trajectories, strict=True):
        for turn, source in zip(told.turns, trajectory.turns, strict=True):
            known = records.get(source.call_id or "")
            learns = turn.excluded_because is None and known is not None
            assert turn.trained_tokens == (len(known.token_ids) if learns and known else 0)
            assert (turn.excluded_because is None) == (turn.trained_tokens > 0)
    if not batch.rows:
        assert not batch.trained and not batch.calls
        return
    assert len(batch.rows) == sum(told.rows for told in audits)
    trained = sum(told.trained_tokens for told in audits)
    assert trained == sum(sum(row.mask) for row in batch.rows)
    assert trained == sum(node.tokens for node in batch.nodes().values())
    reasons = Counter(
        f"calls.{t.excluded_because}" for told in audits for t in told.turns if t.excluded_because
    )
    assert reasons == {k: v for k, v in batch.excluded.items() if k.startswith("calls.")}
    learning = [
        records[source.call_id or ""]
        for told, trajectory in zip(audits, trajectories, strict=True)
        for turn, source in zip(told.turns, trajectory.turns, strict=True)
        if turn.trained_tokens
    ]
    assert trained_tokens(batch.rows) == sampled_tokens(learning)


@pytest.mark.soak
@settings(max_examples=count(40, 2000), deadline=None)
@given(runs("a"))
def test_prefixes_are_those_of_a_naive_comparison(run: Runs) -> None:
    turns, records = run
    told = audit(stored(*turns), records, None, {})
    for index, turn in enumerate(told.turns):
        mine = records.get(turn.call_id or "")
        if mine is None:
            assert turn.prefix is None
            continue
        earlier = {
            i: [*known.prompt_token_ids, *known.token_ids]
            for i, before in enumerate(turns[:index])
            if (known := records.get(before.call_id or "")) is not None
        }
        shared = {i: common(tokens, mine.prompt_token_ids) for i, tokens in earlier.items()}
        longest = max(shared.values(), default=0)
        assert turn.prefix_tokens == longest
        if longest == 0:
            assert (turn.prefix, turn.prefix_turn) == ("starts", None)
            continue
        assert turn.prefix_turn is not None and shared[turn.prefix_turn] == longest
        wholly = any(len(earlier[i]) == n == longest for i, n in shared.items())
        assert turn.prefix == ("extends" if wholly else "forks")
        assert (len(earlier[turn.prefix_turn]) == longest) == wholly
