"""Runs whose states differ anywhere are never judged equal without a judge."""

import copy
import json
import random
from typing import Any

import pytest

from langchain_art import RulerEvaluator
from langchain_art.evaluators import as_group
from langchain_art.wire import Trajectory
from tests.support.judges.groups import says
from tests.support.judges.literal_judge import ScriptedJudge
from tests.support.soak import count

ASK = {"role": "user", "content": "When?"}
TALK = [ASK, says("Done.")]
IMAGE = "data:image/png;base64,AAA"


def shows(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [part]}


def searched(first: str, second: str, *, of: str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"{of}{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for n in range(2)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"{of}{n}", "content": text}
        for n, text in enumerate((first, second))
    ]
    return [ASK, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def asked_of(*outputs: Any) -> list[str]:
    """The requests that a judge got about runs with these outputs."""
    model = ScriptedJudge()
    RulerEvaluator(model, passes=1).invoke(as_group(outputs))
    return model.requests


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"messages": [shows(IMAGE), says("x")]}, {"messages": [shows(IMAGE + "B"), says("x")]}),
        ({"messages": TALK, "again": "Done."}, {"messages": TALK}),
        ({"messages": searched("a", "b", of="c")}, {"messages": searched("b", "a", of="c")}),
        ({"messages": [{**says("x"), "name": "a"}]}, {"messages": [{**says("x"), "name": "b"}]}),
        ([], {"messages": []}),
    ],
)
def test_neighbours(left: Any, right: Any) -> None:
    assert len(asked_of(left, right)) == 1
    assert asked_of(left, copy.deepcopy(left)) == []


def test_a_captured_run_that_returns_an_earlier_text() -> None:
    replies = as_group([[ASK, says("a"), says("b")]]).trajectories[0].turns
    runs = [Trajectory(id=text, turns=replies, output=text) for text in ("a", "b")]
    assert len(asked_of(*runs)) == 1


def test_ids_that_are_drawn_and_reasoning_are_no_difference() -> None:
    thought = {**says("x"), "reasoning_content": "hm"}
    assert asked_of({"messages": [ASK, thought]}, {"messages": [ASK, says("x")]}) == []
    ours, theirs = ({"messages": searched("a", "b", of=of)} for of in "cd")
    assert asked_of(ours, theirs) == []


VALUES: list[Any] = [None, True, 1, 1.0, 0, "", "x", "1", [], {}, ["x"], {"k": None}, {"k": 1}]


def state(rng: random.Random) -> dict[str, Any]:
    """A state of few values, so that two of them are often nearly the same."""
    texts = ["x", "y", '{"a":1}', ""]
    messages = [
        {"role": rng.choice(["user", "assistant", "system"]), "content": rng.choice(texts)}
        for _ in range(rng.randint(1, 3))
    ]
    fields = {key: rng.choice(VALUES) for key in rng.sample(["a", "b", "c"], rng.randint(0, 2))}
    return {"messages": messages, **fields}


def changed(rng: random.Random, one: dict[str, Any]) -> dict[str, Any]:
    """`one` with one field or message changed, added or left out; or as it is."""
    other = copy.deepcopy(one)
    match rng.randrange(5):
        case 0:
            other[rng.choice("abc")] = rng.choice(VALUES)
        case 1:
            other.pop(rng.choice("abc"), None)
        case 2:
            other["messages"].append(rng.choice(other["messages"]))
        case 3:
            rng.choice(other["messages"])["content"] = rng.choice(["x", "y", ""])
        case _:
            rng.shuffle(other["messages"])
    return other


@pytest.mark.parametrize("seed", range(count(2, 100)))
def test_states_that_differ_anywhere_are_judged(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        one = state(rng)
        other = changed(rng, one)
        same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
        assert bool(asked_of(one, other)) is not same, (one, other)
