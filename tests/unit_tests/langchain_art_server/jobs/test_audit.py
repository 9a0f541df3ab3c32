"""The audit says of every turn what training makes of it: the same, token by token."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_art.wire import TrainRequest, Trajectory, Turn
from langchain_art_server.jobs.audit import audit
from langchain_art_server.jobs.batch_builder import Batch
from langchain_art_server.storage.tables import CallRecord, StoredRun
from tests.support.call_records import record
from tests.support.call_trees import common, sampled_tokens, trained_tokens, trees_of_calls
from tests.support.soak import count


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
