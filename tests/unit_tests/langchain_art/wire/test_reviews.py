"""Reviews say what their kind says, and each of them once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from langchain_art.wire import Review, Reviews

SAID = {"id": "r-1", "source": "api", "trajectory": "t-1", "name": "human_reward", "at": 1.0}
ANSWER = {"role": "assistant", "content": "In May."}


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
        ({"kind": "reward", "value": float("nan")}, "finite"),
        ({"kind": "reward", "value": True}, "expected a number"),
    ],
)
def test_a_review_that_does_not_say_what_its_kind_says_is_refused(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        review(**values)


def test_a_reward_without_a_value_takes_the_reviewers_word_back() -> None:
    assert review(kind="reward").value is None


def test_one_request_has_each_review_once() -> None:
    twice = review(kind="reward", value=1.0)
    other = twice.model_copy(update={"source": "page"})
    assert len(Reviews(reviews=(twice, other)).reviews) == 2
    with pytest.raises(ValidationError, match=r"twice: \['r-1'\]"):
        Reviews(reviews=(twice, other, twice))
