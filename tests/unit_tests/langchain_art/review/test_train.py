"""People's rewards are compared within scenarios, and what cannot be is counted by reason."""

from __future__ import annotations

from langchain_art.review.train import REASONS, plan
from langchain_art.wire import Review, Trajectory, Turn


def said(run: str, value: float | None, reviewer: str = "ann", call: str | None = None) -> Review:
    return Review(
        id=f"{run}-{reviewer}-{call}",
        source="page",
        trajectory=run,
        call_id=call,
        kind="reward",
        name="human_reward",
        value=value,
        reviewer=reviewer,
        at=1.0,
    )


def run(name: str, scenario: str | None, *turns: Turn) -> Trajectory:
    return Trajectory(id=name, scenario=scenario, turns=turns)


def turn(call: str, node: str = "writer", *, thrown: bool = False) -> Turn:
    return Turn(call_id=call, node=node, excluded_because="retried" if thrown else None)


def by_id(*runs: Trajectory) -> dict[str, Trajectory]:
    return {one.id: one for one in runs}


def test_reviewed_runs_are_grouped_by_scenario() -> None:
    names = {"a1": "a", "a2": "a", "b1": "b", "c1": "c", "c2": "c", "n": None}
    runs = by_id(*(run(name, scenario, turn("call")) for name, scenario in names.items()))
    corrected = Review(
        id="x",
        source="page",
        trajectory="a1",
        call_id="call",
        kind="correction",
        name="correction",
        correction={"role": "assistant", "content": "No."},
        at=1.0,
    )
    found = plan(
        [
            *(said("a1", 1.0), said("a1", 0.5, "bob"), said("a2", 0.0), said("a2", 0.0, "bob")),
            *(said("b1", 1.0), said("c1", 0.5), said("c2", 0.5), said("n", 1.0)),
            *(said("lost", 1.0), said("a1", 1.0, call="call"), said("c1", None, "eve"), corrected),
        ],
        runs,
        min_agreement=-1,
    )
    assert found.groups == (("a1", "a2"),)
    assert found.rewards == {"a1": 0.75, "a2": 0.0} and found.turns == {}
    assert found.left_out == {
        "alone": 1,
        "all_equal": 2,
        "no_scenario": 1,
        "gone": 1,
        "call_alone": 1,
        "taken_back": 1,
    }
    assert set(found.left_out) <= set(REASONS)


def test_runs_on_which_reviewers_disagree_are_left_out() -> None:
    split = [said("a1", 1.0), said("a1", 0.0, "bob"), said("a2", 0.0), said("a2", 0.0, "bob")]
    found = plan(split, by_id(run("a1", "a"), run("a2", "a")))
    assert found.groups == () and found.left_out == {"disagreement": 1, "alone": 1}


def test_reviewed_calls_are_compared_with_those_of_their_node() -> None:
    runs = by_id(
        run("a1", "a", turn("p1", "planner"), turn("w1"), turn("w2"), turn("x", thrown=True)),
        run("a2", "a", turn("p2", "planner"), turn("w3")),
        run("b1", "b", turn("w4"), turn("w5")),
        run("b2", "b", turn("w6")),
        run("c1", "c", turn("w7")),
    )
    reviews = [
        *(said("a1", 1.0), said("a2", 1.0)),  # equal: they teach nothing, and their calls do
        *(said("a1", 0.0, call="w1"), said("a1", 1.0, call="w2"), said("a1", 1.0, call="x")),
        *(said("a1", 0.5, "bob", "w1"), said("a1", 1.0, call="p1")),
        *(said("b1", 0.5, call="w4"), said("b1", 0.5, call="w5"), said("b2", 0.5, call="w6")),
        *(said("c1", 0.5, call="w7"), said("lost", 0.5, call="w8"), said("a2", None, call="w3")),
    ]
    found = plan(reviews, runs, min_agreement=-1)
    assert found.groups == (("a1",),)
    assert found.rewards == {} and found.turns == {"w1": 0.25, "w2": 1.0}
    assert found.left_out == {
        "all_equal": 2,
        "superseded": 1,
        "call_alone": 2,
        "calls_equal": 3,
        "gone": 1,
        "taken_back": 1,
    }
    assert set(found.left_out) <= set(REASONS)


def test_a_run_and_its_call_are_compared_each_with_their_kind() -> None:
    runs = by_id(*(run(f"a{i}", "a", turn(f"p{i}", "planner"), turn(f"w{i}")) for i in range(3)))
    reviews = [said("a0", 1.0), said("a1", 0.0), said("a0", 0.0, call="w0")]
    found = plan([*reviews, said("a2", 1.0, call="w2")], runs)
    assert found.groups == (("a0", "a1", "a2"),)
    assert found.rewards == {"a0": 1.0, "a1": 0.0} and found.turns == {"w0": 0.0, "w2": 1.0}
