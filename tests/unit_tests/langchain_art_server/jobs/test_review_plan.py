"""Verdicts are compared with their like, trained once with each value, or left out by a reason."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from langchain_art.cli.review_train import FATES
from langchain_art.wire import Review, ReviewTraining, TrainConfig, Trajectory, Turn, VerdictFate
from langchain_art.wire.trajectories import EVALUATION
from langchain_art_server.jobs.review_plan import PlannedSteps, ReviewedRun, plan_reviews
from langchain_art_server.storage.review_store import VerdictMark
from tests.support.call_records import record

REPLY = {"role": "assistant", "content": "sampled"}
BETTER = {"role": "assistant", "content": "better"}
#: The version that serves is three steps away from 0; 4 was rolled back.
LINEAGE = {3: 0, 2: 1, 1: 2, 0: 3}


def said(
    run: str, value: float | None, by: str = "ann", call: str | None = None, **more: Any
) -> Review:
    about: dict[str, Any] = {
        "id": f"{run}-{by}-{call}",
        "source": "page",
        "trajectory": run,
        "call_id": call,
    }
    about |= {"kind": "reward", "name": "human_reward", "value": value, "reviewer": by, "at": 1.0}
    return Review.model_validate(about | more)


def corrected(run: str, call: str, text: str = "better", **more: Any) -> Review:
    reply = {"role": "assistant", "content": text}
    return said(run, None, call=call, kind="correction", name="c", correction=reply, **more)


def turn(call: str, node: str = "writer", **more: Any) -> Turn:
    return Turn.model_validate(
        {"call_id": call, "node": node, "model": "p@3", "reply": REPLY} | more
    )


def run(
    name: str,
    scenario: str | None,
    *turns: Turn,
    versions: Sequence[int] = (),
    held_out: Sequence[str] = (),
    **of_calls: Any,
) -> ReviewedRun:
    its = turns or (turn(f"{name}-c"),)
    stored = Trajectory(id=name, scenario=scenario, turns=its)
    records = {
        one.call_id: record(one.call_id or "", version=version, **of_calls)
        for one, version in zip(its, versions or [3] * len(its), strict=True)
        if one.ours
    }
    known = {call: one for call, one in records.items() if call is not None}
    return ReviewedRun.of(stored, known, "p", LINEAGE, held_out)


def plan(
    reviews: Sequence[Review],
    runs: Sequence[ReviewedRun],
    marks: Sequence[VerdictMark] = (),
    **asked: Any,
) -> PlannedSteps:
    by_id = {one.trajectory.id: one for one in runs}
    return plan_reviews(ReviewTraining(policy="p", **asked), reviews, by_id, marks, LINEAGE)


def fates(found: PlannedSteps) -> dict[tuple[str, str | None], list[VerdictFate]]:
    got: dict[tuple[str, str | None], list[VerdictFate]] = {}
    for one in found.plan.verdicts:
        got.setdefault((one.trajectory, one.call_id), []).append(one.fate)
    return got


def test_reviewed_runs_are_grouped_by_scenario() -> None:
    scenarios = {"a1": "a", "a2": "a", "b1": "b", "c1": "c", "c2": "c", "n": None}
    runs = [run(name, scenario) for name, scenario in scenarios.items()]
    runs[0] = run("a1", "a", turn("a1-c"), turn("x", excluded_because="retried"))
    reviews = [
        *(said("a1", 1.0), said("a1", 0.5, "bob"), said("a2", 0.0), said("a2", 0.0, "bob")),
        *(said("b1", 1.0), said("c1", 0.5), said("c2", 0.5), said("n", 1.0), said("lost", 1.0)),
        *(said("a1", 1.0, call="a1-c"), said("b1", None, "eve", "b1-c")),
        *(said("a1", 7.0, name="another"), said("a1", 1.0, call="x"), said("a1", 1.0, call="w9")),
    ]
    found = plan(reviews, runs, min_agreement=-1)
    assert found.plan.groups == (("a1", "a2"),)
    assert found.plan.rewards == {"a1": 0.75, "a2": 0.0}
    assert (found.plan.turns, found.plan.compared, found.plan.pairs) == ({}, (), ())
    assert fates(found) == {
        ("a1", None): ["trains"],
        ("a2", None): ["trains"],
        ("b1", None): ["alone"],
        ("c1", None): ["all_equal"],
        ("c2", None): ["all_equal"],
        ("n", None): ["no_scenario"],
        ("lost", None): ["gone"],
        ("a1", "a1-c"): ["alone"],
        ("a1", "x"): ["superseded"],
        ("a1", "w9"): ["gone"],
        ("b1", "b1-c"): ["taken_back"],
    }


def test_several_criteria_are_one_reward_by_their_weights() -> None:
    runs = [run(f"a{i}", "a", turn(f"w{i}")) for i in range(4)]
    scores: dict[str, Any] = {"kind": "score"}

    def rated(name: str, correct: float, *tone: float) -> list[Review]:
        tones = [
            said(name, one, f"r{i}", name="tone", id=f"{name}-t{i}", **scores)
            for i, one in enumerate(tone)
        ]
        return [said(name, correct, name="correct", id=f"{name}-c", **scores), *tones]

    reviews = [*rated("a0", 1.0, 0.0), *rated("a1", 0.0, 1.0, 0.5), *rated("a2", 1.0)]
    reviews += [said("a3", 1.0), *rated("a2", 0.25, 1.0)[:1]]
    asked = {"criteria": {"tone": 0.25, "correct": 0.75}, "min_agreement": -9}
    found = plan(reviews, runs, **asked)
    assert found.plan.rewards == {"a0": 0.75, "a1": 0.25 * 0.75}
    assert fates(found) == {
        ("a0", None): ["trains"],
        ("a1", None): ["trains"],
        ("a2", None): ["incomplete"],
    }
    every = [*found.reward_marks, *found.correction_marks]
    about = [(one.subject, one.said, one.taught_by, one.reviews) for one in every]
    marks = [VerdictMark(*s, v, t, r, "j1", "succeeded", 1) for s, v, t, r in about]
    again = plan(reviews, runs, marks, **asked).plan.verdicts
    assert {one.fate for one in again} == {"trained", "incomplete"}
    discarded = [replace(mark, version=4) for mark in marks]
    assert plan(reviews, runs, discarded, **asked).plan.rewards == found.plan.rewards
    weighed = plan(reviews, runs, marks, **asked | {"criteria": {"correct": 1.0, "tone": 0.0}})
    assert weighed.plan.rewards == {"a0": 1.0, "a1": 0.0}  # another value is trained again
    del asked["min_agreement"]
    split = [*rated("a0", 1.0, 0.0, 1.0), *rated("a1", 0.0, 1.0, 1.0)]
    assert fates(plan(split, runs, **asked))["a0", None] == ["disagreement"]
    back = [said("a0", None, name="correct"), said("a0", None, name="tone")]
    assert fates(plan(back, runs, **asked)) == {("a0", None): ["taken_back"]}
    split = [said("a1", 1.0), said("a1", 0.0, "bob"), said("a2", 1.0), said("a2", 1.0, "bob")]
    runs = [run("a1", "a"), run("a2", "a")]
    assert fates(plan(split, runs)) == {("a1", None): ["disagreement"], ("a2", None): ["alone"]}
    third = plan([*split, said("a1", 0.0, "eve")], runs)
    assert third.plan.rewards == {"a1": 0.0, "a2": 1.0}


@pytest.mark.parametrize(
    ("bad", "fate", "compared"),
    [
        (run("x", "a", turn("w1"), turn("w2"), versions=[3, 0]), "stale", True),
        (run("x", "a", versions=[4]), "rolled_back", True),
        (run("x", "a", excluded_because="greedy decoding: …"), "untrainable", True),
        (run("x", "a", policy="another"), "other_model", False),
        (run("x", "a", turn("f", ours=False, model="gpt")), "other_model", False),
        (run("x", "a", held_out=["a"]), "held_out", False),
    ],
)
def test_runs_that_cannot_be_trained_are_named(
    bad: ReviewedRun, fate: VerdictFate, compared: bool
) -> None:
    reviews = [said("x", 1.0), said("good", 0.0)]
    asked: Any = {"config": TrainConfig(credit="call", max_staleness=2)}
    found = plan(reviews, [bad, run("good", "a")], **asked)
    assert fates(found)["x", None] == [fate]
    assert found.plan.rewards == ({"good": 0.0} if compared else {})
    assert bad.fate(ReviewTraining(policy="p", **asked)) == fate
    assert run("good", "a").fate(ReviewTraining(policy="p")) == "trains"


def test_held_out_scenarios_and_runs_are_trained_if_they_are_named() -> None:
    held = [run(name, "a", held_out=["a"]) for name in ("a0", "a1")]
    reviews = [said("a0", 1.0), said("a1", 0.0), corrected("a0", "a0-c")]
    found = plan(reviews, held)
    assert found.plan.groups == ()
    assert {one.fate for one in found.plan.verdicts} == {"held_out"}
    assert len(plan(reviews, held, held_out_too=["a"]).plan.rewards) == 2
    one = plan(reviews, held, held_out_too=["a0"])
    assert one.plan.pairs and fates(one)["a0", None] == ["alone"]
    alone = Trajectory(id="e", metadata={EVALUATION: "p@0"}, turns=(turn("c"),))
    assert ReviewedRun.of(alone, {"c": record("c")}, "p", LINEAGE, ()).held_out


def test_a_correction_of_a_call_with_an_image_holds_up_no_other() -> None:
    """The learner shows images to no reply that is given: the step of all would fail."""
    shown = {"role": "user", "content": [{"type": "image", "sha256": "ab"}]}
    later = turn("later", extends=0, messages=({"role": "user", "content": "So?"},))
    found = plan(
        [corrected("a", "seen"), corrected("a", "later"), corrected("b", "b-c")],
        [run("a", "s", turn("seen", messages=(shown,)), later), run("b", "s")],
    )
    assert fates(found) == {
        ("a", "seen"): ["untrainable"],
        ("a", "later"): ["untrainable"],
        ("b", "b-c"): ["trains"],
    }
    assert len(found.plan.pairs) == 1


def test_the_last_correction_of_a_call_is_a_pair_on_its_prompt() -> None:
    asked = ({"role": "user", "content": "When?"},)
    tools = ({"type": "function", "function": {"name": "search"}},)
    first = turn("w0", messages=asked)
    more = turn("w1", messages=({"role": "tool", "content": "x"},), extends=0, tools=tools)
    runs = [run("a0", None, first, more, turn("silent", reply=None), versions=[0, 0, 0])]
    reviews = [
        *(corrected("a0", "w1", "first", id="1"), corrected("a0", "w1", id="2", at=2.0)),
        *(corrected("a0", "w0", "sampled"), corrected("a0", "silent"), corrected("b", "w")),
    ]
    found = plan(reviews, runs)
    assert fates(found) == {
        ("a0", "w1"): ["trains", "revised"],
        ("a0", "w0"): ["unchanged"],
        ("a0", "silent"): ["no_reply"],
        ("b", "w"): ["gone"],
    }
    chosen, rejected = found.pair_runs
    assert found.plan.pairs == ((chosen.id, rejected.id),)
    prompt = (*asked, REPLY, {"role": "tool", "content": "x"})
    assert chosen.turns == (Turn(messages=prompt, reply=BETTER, tools=tools, ours=False),)
    assert rejected.turns[0].messages == prompt and rejected.turns[0].reply == REPLY
    assert (rejected.turns[0].call_id, rejected.turns[0].extends) == ("w1", None)

    about: Any = {"kind": "correction", "name": "c", "id": "2", "at": 3.0, "deleted": True}
    taken = said("a0", None, call="w1", **about)
    older = plan([reviews[0], taken], runs)
    assert fates(older)["a0", "w1"] == ["trains"]  # what was said before it holds again
    assert older.pair_runs[0].turns[0].reply == BETTER | {"content": "first"}
    assert fates(plan([taken], runs))["a0", "w1"] == ["taken_back"]
    foreign = run("a0", "a", turn("w1", ours=False, model="gpt"))
    assert fates(plan([reviews[1]], [foreign]))["a0", "w1"] == ["other_model"]


def test_every_fate_has_its_words() -> None:
    assert set(FATES) == set(get_args(VerdictFate))
