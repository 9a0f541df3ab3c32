"""Each of Langfuse's scores becomes the review that it is, or is left out for a named reason."""

from typing import Any

import pytest
from langfuse.api import ScoreV3
from langfuse.api.core.pydantic_utilities import parse_obj_as

from langchain_art.errors import ConfigError
from langchain_art.review.scores import REASONS, LeftOut, Reading, Trace, review_of
from tests.support.langfuse_server.scores import Score

OURS = Trace("run-1", {"o-1": "call-1", "o-2": "call-2"}, {"root"})
ALONE = Trace("run-2", {"o-9": "call-9"}, {"root"})
TRACES = {"t-1": OURS, "t-2": ALONE, "theirs": Trace(None)}


def score(value: Any, kind: str = "NUMERIC", trace: str = "t-1", **more: Any) -> Any:
    """As the SDK gives it."""
    subject = {"kind": "trace", "id": trace}
    if about := more.pop("about", None):
        subject = {"kind": "observation", "id": about, "traceId": trace}
    base: dict[str, Any] = {"id": "s-1", "name": "human_reward", "author": "ann"}
    one = Score(**(base | {"subject": subject} | more), value=value, data_type=kind)
    groups = {"details", "subject", "annotation"}
    return parse_obj_as(ScoreV3, one.public(groups, "project"))  # type: ignore[arg-type]


def test_a_score_on_a_trace_is_the_runs_and_on_a_call_the_calls() -> None:
    whole = review_of(score(0.5, comment="so so", updated=7.0), TRACES, Reading())
    assert (whole.trajectory, whole.call_id, whole.value) == ("run-1", None, 0.5)
    assert (whole.kind, whole.reviewer, whole.comment, whole.at) == ("reward", "ann", "so so", 7.0)
    assert review_of(score(1, about="root"), TRACES, Reading()).call_id is None
    assert review_of(score(1, about="o-2"), TRACES, Reading()).call_id == "call-2"
    other = review_of(score(3, name="tone"), TRACES, Reading())
    assert (other.kind, other.name, other.value) == ("score", "tone", 3.0)


def test_labels_are_worth_what_they_are_said_to_be() -> None:
    reading = Reading(values={"good": 1.0, "bad": -1.0})
    assert review_of(score("bad", "CATEGORICAL"), TRACES, reading).value == -1.0
    assert review_of(score(True, "BOOLEAN"), TRACES, Reading()).value == 1.0
    assert review_of(score(False, "BOOLEAN"), TRACES, Reading(values={"false": -1})).value == -1.0


def test_a_correction_is_the_reply_that_the_call_should_have_given() -> None:
    said = review_of(score("In May.", "CORRECTION", about="o-1", name="output"), TRACES, Reading())
    assert (said.kind, said.call_id) == ("correction", "call-1")
    assert said.correction == {"role": "assistant", "content": "In May."}
    called = '{"content": null, "tool_calls": [{"name": "find", "args": {"q": "May"}, "id": "c"}]}'
    said = review_of(score(called, "CORRECTION", trace="t-2", name="output"), TRACES, Reading())
    assert said.call_id == "call-9"  # the run's only call
    function = {"name": "find", "arguments": '{"q": "May"}'}
    assert said.correction is not None
    assert said.correction["tool_calls"] == [{"id": "c", "type": "function", "function": function}]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (score(1, trace="unseen"), "no_trace"),
        (score(1, trace="theirs"), "foreign_trace"),
        (score(1, about="a-tool"), "not_a_call"),
        (score("long", "TEXT"), "text"),
        (score("good", "CATEGORICAL"), "unmapped"),
        (score(1e10), "out_of_range"),
        (score("x", "CORRECTION"), "correction_of_run"),
        (score(" ", "CORRECTION", about="o-1"), "empty_correction"),
        (score('{"role": "user", "content": "x"}', "CORRECTION", about="o-1"), "not_a_reply"),
        (score('{"content": null, "tool_calls": [7]}', "CORRECTION", about="o-1"), "not_a_reply"),
    ],
)
def test_what_is_no_review_is_left_out_for_its_reason(given: Any, reason: str) -> None:
    assert reason in REASONS
    with pytest.raises(LeftOut, match=f"^{reason}$"):
        review_of(given, TRACES, Reading())


def test_a_score_of_a_session_is_about_no_run() -> None:
    one = Score("s", "human_reward", 1.0, "NUMERIC", {"kind": "session", "id": "s"})
    given: Any = parse_obj_as(ScoreV3, one.public({"subject"}, "p"))  # type: ignore[arg-type]
    with pytest.raises(LeftOut, match="not_about_a_run"):
        review_of(given, TRACES, Reading())


def test_what_langchain_art_exports_itself_is_no_verdict_of_a_person() -> None:
    with pytest.raises(ConfigError, match="no verdict of a person"):
        Reading(name="reward", source="API")
    with pytest.raises(ConfigError, match="ANNOTATION or API"):
        Reading(source="EVAL")
    with pytest.raises(ConfigError, match="nan"):
        Reading(values={"good": float("nan")})
