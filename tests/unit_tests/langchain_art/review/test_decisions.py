import json
from typing import Any

import pytest
from langgraph.types import Interrupt

from langchain_art.errors import ConfigError
from langchain_art.review.decisions import decision_reviews
from langchain_art.wire import Trajectory, Turn

Asked = tuple[str, dict[str, Any]]
SEND: Asked = ("send", {"to": "all"})
READ: Asked = ("read", {"n": 1})


def turn(call_id: str, *tools: Asked) -> Turn:
    calls = [
        {
            "id": f"{call_id}-{k}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(args)},
        }
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
EDIT = {"type": "edit", "edited_action": {"name": "send", "args": {"to": "Ann"}}}
RESPOND = {"type": "respond", "message": "Sent."}


def tools_of(review: Any) -> list[tuple[str, Any]]:
    called = [one["function"] for one in review.correction["tool_calls"]]
    return [(one["name"], json.loads(one["arguments"])) for one in called]


def test_an_approved_call_is_worth_1() -> None:
    (found,) = decision_reviews(RUN, [batched(SEND)], decide(APPROVE), reviewer="ann")
    assert (found.kind, found.value, found.comment) == ("reward", 1.0, None)
    assert (found.trajectory, found.call_id, found.reviewer) == ("run-1", "c-1", "ann")
    assert (found.source, found.name) == ("interrupt", "human_reward")
    assert found.id == decision_reviews(RUN, [batched(SEND)], decide(REJECT))[0].id, "a revision"


def test_an_edited_call_is_a_correction() -> None:
    (found,) = decision_reviews(RUN, [batched(SEND)], decide(EDIT))
    assert (found.kind, found.value, found.call_id) == ("correction", None, "c-1")
    assert tools_of(found) == [READ, ("send", {"to": "Ann"})]
    assert found.correction is not None and found.correction["content"] == "So"
    reward, corrected = decision_reviews(
        RUN, [batched(READ, SEND)], decide({"type": "reject"}, EDIT)
    )
    assert (reward.kind, reward.value, reward.comment) == ("reward", 0.0, None)
    assert tools_of(corrected) == [("send", {"to": "Ann"})], "what was rejected is not shown"


def test_a_result_by_hand_says_nothing_of_the_call() -> None:
    assert decision_reviews(RUN, [batched(SEND)], decide(RESPOND)) == []


def test_each_interrupt_may_ask_about_one_tool_call() -> None:
    asked = [
        Interrupt(
            value={"type": "tool_approval", "tool_call_id": f"c-1-{k}", "name": name, "args": args},
            id=f"i-{k}",
        )
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
        ([Interrupt(value="?", id="i")], decide(APPROVE), "HumanInTheLoopMiddleware"),
        ([batched(SEND)], decide(), "i-0 1 decision of the types approve, edit"),
        ([batched(READ, SEND)], decide(APPROVE), "2 decisions of the types"),
        ([batched(SEND)], decide({"type": "allow"}), "got resume={'decisions'"),
        ([batched(SEND)], {"i-0": "yes"}, "1 decision of the types"),
        ([batched(("drop", {}))], decide(APPROVE), "the tools .'drop'., which none of the 3 calls"),
        ([batched(("send", {"to": "Bo"}))], decide(APPROVE), "none of the 3 calls"),
    ],
)
def test_what_fits_no_call_is_refused(
    interrupts: list[Interrupt], resume: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        decision_reviews(RUN, interrupts, resume)
