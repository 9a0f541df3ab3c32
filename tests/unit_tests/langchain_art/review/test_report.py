"""Judges are compared with people, and people's decisions are reviews."""

import json
from typing import Any

import pytest
from langgraph.types import Interrupt

from langchain_art.errors import ConfigError
from langchain_art.evaluators.calibration import Agreement, Correlation
from langchain_art.review.decisions import decision_reviews
from langchain_art.review.report import bands_of, judge_agreement, trust
from langchain_art.statistics.intervals import wilson
from langchain_art.wire import Trajectory, Turn

HUMAN = {f"{scenario}-{i}": i / 4 for scenario in "abcd" for i in range(4)}


def runs(scenario: bool = True) -> list[Trajectory]:
    return [
        Trajectory(
            id=id_,
            scenario=id_[0] if scenario else None,
            # Scenarios differ in level: only within one of them does the order say something.
            reward=value + ord(id_[0]),
            scores={"upside down": -value, "human_reward": value},
        )
        for id_, value in HUMAN.items()
    ]


def test_a_judge_is_compared_within_scenarios() -> None:
    found, across, missing = judge_agreement(runs(), HUMAN)
    assert not across and not missing
    assert set(found) == {"reward", "upside down"}  # and people are not compared with themselves
    assert found["reward"].kendall.value == 1.0
    assert found["upside down"].kendall.value == -1.0
    assert trust(found["reward"]) == "ranks runs as people do, beyond chance"
    assert "do not train on it" in trust(found["upside down"])


def test_runs_of_different_scenarios_are_compared_only_if_there_are_no_siblings() -> None:
    found, across, _ = judge_agreement(runs(scenario=False), HUMAN)
    assert across and found["reward"].runs == len(HUMAN)
    lonely, across, missing = judge_agreement(runs()[:1], HUMAN)
    assert (lonely, across, missing) == ({}, False, ["reward", "upside down"])


def test_trust_needs_an_interval_that_leaves_out_chance() -> None:
    for interval, words in (((0.3, -0.1, 0.6), "review more"), ((None,) * 3, "cannot be told")):
        one = Correlation(*interval)  # type: ignore[arg-type]
        assert words in trust(Agreement(one, one, runs=4, groups=1))


def test_a_band_is_trusted_where_people_agree_beyond_what_is_asked() -> None:
    judged = {f"r{i}": i / 40 for i in range(40)}
    human: dict[str, float | None] = {f"r{i}": 0.0 for i in range(8)}  # as the judge says
    human |= {f"r{i}": float(i % 2) for i in range(20, 28)}  # one half otherwise
    human |= {"r30": 1.0, "r31": None}  # one alone, and one on which people disagree
    low, second, third, high = bands_of(judged, human)
    bands = [(one.reviewed, one.agree, one.trusted) for one in (low, second, third, high)]
    assert bands == [(8, 8, True), (0, 0, False), (8, 4, False), (1, 1, False)]
    assert low.interval == wilson(8, 8) and second.interval is None
    assert low.open == {"r8": 0.2, "r9": 0.225}
    assert "r31" not in high.open and len(high.open) == 8
    assert (low.low, low.high, high.high) == (0.0, second.low, judged["r39"])
    assert not any(one.trusted for one in bands_of(judged, human, at_least=0.7))
    swapped = bands_of(judged, dict.fromkeys(human, 1.0), good=0.9)
    assert swapped[0].agree == 0 and not swapped[0].trusted


def test_equal_scores_are_in_one_band() -> None:
    judged = {"a": 0.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}
    bands = bands_of(judged, dict.fromkeys("bcde", 1.0))
    assert [len(one.open) + one.reviewed for one in bands] == [1, 4]
    assert [one.trusted for one in bands] == [False, True]
    assert len(bands_of({"a": 0.5, "b": 0.5}, {})) == 1
    assert bands_of({}, {}) == []


Asked = tuple[str, dict[str, Any]]
SEND: Asked = ("send", {"to": "all"})
READ: Asked = ("read", {"n": 1})


def turn(call_id: str, *tools: Asked) -> Turn:
    calls = [
        {"id": f"{call_id}-{k}", "function": {"name": name, "arguments": json.dumps(args)}}
        for k, (name, args) in enumerate(tools)
    ]
    return Turn(call_id=call_id, reply={"role": "assistant", "content": "So", "tool_calls": calls})


RUN = Trajectory(
    id="run-1", turns=(turn("c-0", SEND), turn("c-1", READ, SEND), Turn(call_id="c-2"))
)


def batched(*tools: Asked) -> Interrupt:
    asked = [{"name": name, "args": args, "description": "?"} for name, args in tools]
    return Interrupt(value={"action_requests": asked, "review_configs": []}, id="i-0")


def decide(*decisions: dict[str, Any]) -> dict[str, Any]:
    return {"decisions": list(decisions)}


APPROVE = {"type": "approve"}
REJECT = {"type": "reject", "message": "Not to all."}
EDITED: Asked = ("send", {"to": "Ann"})
EDIT = {"type": "edit", "edited_action": {"name": EDITED[0], "args": EDITED[1]}}
RESPOND = {"type": "respond", "message": "Sent."}


def test_an_approved_call_is_worth_1_and_a_result_by_hand_says_nothing() -> None:
    (found,) = decision_reviews(RUN, [batched(SEND)], decide(APPROVE), reviewer="ann")
    assert (found.kind, found.value, found.comment) == ("reward", 1.0, None)
    assert (found.trajectory, found.call_id, found.reviewer) == ("run-1", "c-1", "ann")
    assert (found.source, found.name) == ("interrupt", "human_reward")
    assert found.id == decision_reviews(RUN, [batched(SEND)], decide(REJECT))[0].id, "a revision"
    assert decision_reviews(RUN, [batched(SEND)], decide(RESPOND)) == []


def test_an_edited_call_is_a_correction_that_shows_no_rejected_one() -> None:
    (found,) = decision_reviews(RUN, [batched(SEND)], decide(EDIT))
    assert (found.kind, found.value, found.call_id) == ("correction", None, "c-1")
    assert found.correction is not None and found.correction["content"] == "So"
    decided = decide({"type": "reject"}, EDIT)
    reward, corrected = decision_reviews(RUN, [batched(READ, SEND)], decided)
    assert (reward.kind, reward.value, reward.comment) == ("reward", 0.0, None)
    for one, tools in ((found, [READ, EDITED]), (corrected, [EDITED])):
        called = [tool["function"] for tool in (one.correction or {})["tool_calls"]]
        assert [(tool["name"], json.loads(tool["arguments"])) for tool in called] == tools


def test_each_interrupt_may_ask_about_one_tool_call() -> None:
    kind = {"type": "tool_approval"}
    asked = [
        Interrupt(kind | {"tool_call_id": f"c-1-{k}", "name": name, "args": args}, id=f"i-{k}")
        for k, (name, args) in enumerate((READ, SEND))
    ]
    other = Interrupt(value="What is your name?", id="i-9")
    (found,) = decision_reviews(RUN, [other, *asked], {"i-0": APPROVE, "i-1": REJECT})
    assert (found.call_id, found.value) == ("c-1", 0.0)
    first = decision_reviews(RUN, asked[:1], {"i-0": APPROVE})
    second = decision_reviews(RUN, asked[1:], {"i-1": REJECT})
    assert [one.value for one in (*first, *second)] == [1.0, 0.0]
    assert first[0].id != second[0].id, "decisions one after the other are not one's revision"


def test_equal_calls_of_parallel_branches_keep_a_decision_each() -> None:
    run = Trajectory(id="run-1", turns=(turn("c-0", SEND), turn("c-1", SEND)))
    asked = [Interrupt(value=batched(SEND).value, id=name) for name in ("i-0", "i-1")]
    decided = {"i-0": decide(REJECT), "i-1": decide(APPROVE)}
    found = decision_reviews(run, asked, decided)
    assert [(one.call_id, one.value) for one in found] == [("c-0", 0.0), ("c-1", 1.0)]


@pytest.mark.parametrize(
    ("interrupts", "resume", "words"),
    [
        ([], decide(APPROVE), "got 0 interrupts of which none asks"),
        ([batched(SEND)], decide(), "i-0 1 decision of the types approve, edit"),
        ([batched(READ, SEND)], decide(APPROVE), "2 decisions of the types"),
        ([batched(SEND)], decide({"type": "allow"}), "got resume={'decisions'"),
        ([batched(("drop", {}))], decide(APPROVE), "the tools .'drop'., which none of the 3 calls"),
        ([batched(("send", {"to": "Bo"}))], decide(APPROVE), "none of the 3 calls"),
    ],
)
def test_what_fits_no_call_is_refused(
    interrupts: list[Interrupt], resume: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        decision_reviews(RUN, interrupts, resume)
