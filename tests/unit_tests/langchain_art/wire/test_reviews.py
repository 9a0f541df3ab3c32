from typing import Any

import pytest
from pydantic import ValidationError

from langchain_art.wire import Review, Reviews, Trajectory
from langchain_art.wire.reviews import ranked

SAID = {"id": "r-1", "source": "api", "trajectory": "t-1", "name": "human_reward", "at": 1.0}
ANSWER = {"role": "assistant", "content": "In May."}
CALLS = {"role": "assistant", "content": None}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BROKEN = CALL | {"function": {"name": "f", "arguments": "a: 1"}}
CORRECTS = {"kind": "correction", "call_id": "c"}


def review(**values: Any) -> Review:
    return Review(**(SAID | values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "reward", "correction": ANSWER}, "with no other"),
        ({"kind": "correction", "call_id": "c"}, "with kind='correction'"),
        ({"kind": "correction", "correction": ANSWER}, "the id of the call"),
        ({"kind": "correction", "correction": ANSWER, "call_id": "c", "value": 1.0}, "no value"),
        ({"kind": "score"}, "without a value"),
        ({"kind": "correction", "call_id": "c", "correction": {"role": "user"}}, "'assistant'"),
        (CORRECTS | {"correction": ANSWER | {"content": [{"type": "image"}]}}, "expected a text"),
        (CORRECTS | {"correction": CALLS | {"tool_calls": [BROKEN]}}, "arguments are JSON objects"),
        ({"kind": "reward", "value": 1.0, "at": 1_790_000_000_000}, "less than 1000"),
        ({"kind": "reward", "value": float("nan")}, "finite"),
    ],
)
def test_a_review_that_does_not_say_what_its_kind_says_is_refused(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        review(**values)


def test_a_correction_is_a_text_or_calls() -> None:
    parts = ANSWER | {"content": [{"type": "text", "text": "In May."}]}
    for reply in (ANSWER, parts, CALLS | {"tool_calls": [CALL]}):
        assert review(**CORRECTS, correction=reply).correction == reply


def test_one_request_has_each_review_once() -> None:
    twice = review(kind="reward", value=1.0)
    other = twice.model_copy(update={"source": "page"})
    assert len(Reviews(reviews=(twice, other)).reviews) == 2
    with pytest.raises(ValidationError, match=r"twice: \['r-1'\]"):
        Reviews(reviews=(twice, other, twice))


def run(id_: str, reward: float | None = None, scenario: str | None = None, **scores: float):
    return Trajectory(id=id_, reward=reward, scenario=scenario, scores=scores)


def ids(runs: list[Trajectory]) -> list[str]:
    return [one.id for one in runs]


def test_lowest_puts_the_lowest_return_first_and_leaves_out_what_was_not_scored() -> None:
    runs = [run("a", 0.5), run("b"), run("c", -1.0), run("d", 0.0)]
    assert ids(ranked(runs, "lowest")) == ["c", "d", "a"]


def test_disagreement_compares_scores_by_their_ranks() -> None:
    runs = [
        run("agreed", ruler=0.1, tests=0.0),
        run("split", ruler=0.9, tests=-5.0),
        run("middle", ruler=0.5, tests=50.0),
        run("one-score", ruler=0.2),
    ]
    assert ids(ranked(runs, "disagreement"))[0] == "split"
    assert "one-score" not in ids(ranked(runs, "disagreement"))


def test_uncertain_puts_scenarios_first_whose_runs_fare_differently() -> None:
    runs = [run("a1", 1.0, "a"), run("a2", 1.0, "a"), run("b1", 0.0, "b"), run("b2", 1.0, "b")]
    found = ids(ranked([*runs, run("alone", 0.0, "c"), run("none", None, "b")], "uncertain"))
    assert set(found[:2]) == {"b1", "b2"} and set(found[2:]) == {"a1", "a2"}


def test_random_is_the_same_each_time_and_not_the_order_that_was_given() -> None:
    runs = [run(f"r-{i}") for i in range(50)]
    found = ids(ranked(runs, "random"))
    assert found == ids(ranked(runs[::-1], "random"))
    assert sorted(found) == sorted(ids(runs)) and found != ids(runs)
